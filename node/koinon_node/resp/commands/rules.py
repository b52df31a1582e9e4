"""The actions that a user needs for each command: what is not in this table is refused.

The actions are needed on each key of the command, or, of one without keys, on some key: in the
keyspace that the connection's commands are in.
"""

from __future__ import annotations

from koinon_node.resp.commands.table import COMMANDS, Arguments, Spec
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action, Permissions
from koinon_proto.contract.errors import PermissionDeniedError

_NONE: tuple[Action, ...] = ()
_READ, _WRITE, _BOTH = (Action.READ,), (Action.WRITE,), (Action.READ, Action.WRITE)

NEEDS: dict[str, tuple[Action, ...]] = {
    **dict.fromkeys(
        ("AUTH", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "ECHO", "HELLO", "INFO"), _NONE
    ),
    **dict.fromkeys(("DISCARD", "EXEC", "MULTI", "UNWATCH"), _NONE),  # what is queued is checked
    **dict.fromkeys(
        ("KOINON.HELLO", "PING", "QUIT", "READONLY", "READWRITE", "RESET", "SELECT"), _NONE
    ),
    **dict.fromkeys(("TIME", "WAIT"), _NONE),
    "KOINON.FOLLOW": _NONE,  # for nodes: it looks itself
    **dict.fromkeys(
        ("EXISTS", "EXPIRETIME", "GET", "GETRANGE", "MGET", "PEXPIRETIME", "PTTL", "STRLEN"), _READ
    ),
    **dict.fromkeys(("SUBSTR", "TOUCH", "TTL", "TYPE"), _READ),
    **dict.fromkeys(("KOINON.ENTRY", "KOINON.EXISTS", "KOINON.GET", "WATCH"), _READ),
    **dict.fromkeys(
        ("DEL", "EXPIRE", "EXPIREAT", "MSET", "PERSIST", "PEXPIRE", "PEXPIREAT", "PSETEX"), _WRITE
    ),
    **dict.fromkeys(("MSETNX", "SET", "SETEX", "SETNX", "UNLINK"), _WRITE),
    **dict.fromkeys(("KOINON.DELETE", "KOINON.PUT", "KOINON.TOUCH"), _WRITE),
    **dict.fromkeys(
        ("APPEND", "DECR", "DECRBY", "GETDEL", "GETEX", "GETSET", "INCR", "INCRBY"), _BOTH
    ),
    **dict.fromkeys(("INCRBYFLOAT", "SETRANGE"), _BOTH),
    **dict.fromkeys(("KOINON.GETORPUT", "KOINON.INCREMENT"), _BOTH),
    "KOINON.GETMANY": _READ,  # on the keys of its message: the command looks itself
    # On what the prefix, or the pattern, begins with: the command looks itself.
    **dict.fromkeys(("KOINON.SCAN", "SCAN"), (Action.SCAN,)),
    "DBSIZE": _NONE,  # it looks itself (``check_counting``), as CLUSTER COUNTKEYSINSLOT does
}


def check(spec: Spec, arguments: Arguments, session: Session) -> None:
    """Raise PermissionDeniedError unless the caller may send this command; of one that needs leave,
    UnknownKeyspaceError as ``Session.served`` does.
    """
    caller = session.caller
    if caller.permissions is Permissions.ALL:
        return
    actions = NEEDS.get(spec.name)
    if actions is None:
        if spec.name.encode() not in COMMANDS:
            return  # it is answered as not known
        raise PermissionDeniedError(
            principal=caller.name, action="call", what=f"{spec.name}, for which there is no rule"
        )
    if spec.name == "SET" and any(option.upper() == b"GET" for option in arguments[3:]):
        actions = _BOTH
    keys = spec.keys_in(arguments)
    for action in actions:
        keyspace_id = session.served.keyspace_id
        caller.check_some(action, keyspace_id)
        caller.check_keys(action, keyspace_id, keys)


def check_counting(session: Session) -> None:
    """Raise PermissionDeniedError unless the caller may know how many records there are."""
    if not session.caller.may_on_cluster(Action.VIEW):
        session.caller.check_prefix(Action.SCAN, session.served.keyspace_id, b"")
