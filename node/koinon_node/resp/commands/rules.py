"""The actions that a user needs for each command: what is not in this table is refused.

The actions are needed on each key of the command, or, of one without keys, on some key: in the
keyspace ``default``, which is the one that this port serves.
"""

from __future__ import annotations

from koinon_node.resp.commands.table import COMMANDS, Arguments, Spec
from koinon_proto.contract.access import Action, Permissions
from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.contract.keyspaces import DEFAULT_ID
from koinon_proto.security.caller import Caller

_NONE: tuple[Action, ...] = ()
_READ, _WRITE, _BOTH = (Action.READ,), (Action.WRITE,), (Action.READ, Action.WRITE)

NEEDS: dict[str, tuple[Action, ...]] = {
    **dict.fromkeys(
        ("AUTH", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "ECHO", "HELLO", "INFO"), _NONE
    ),
    **dict.fromkeys(("DISCARD", "EXEC", "MULTI", "UNWATCH"), _NONE),  # what is queued is checked
    **dict.fromkeys(
        ("KOINON.HELLO", "PING", "QUIT", "READONLY", "READWRITE", "RESET", "SELECT", "WAIT"), _NONE
    ),
    **dict.fromkeys(
        ("EXISTS", "EXPIRETIME", "GET", "MGET", "PEXPIRETIME", "PTTL", "STRLEN", "TTL", "TYPE"),
        _READ,
    ),
    **dict.fromkeys(("KOINON.ENTRY", "KOINON.EXISTS", "KOINON.GET", "WATCH"), _READ),
    **dict.fromkeys(
        ("DEL", "EXPIRE", "EXPIREAT", "MSET", "PERSIST", "PEXPIRE", "PEXPIREAT", "PSETEX"), _WRITE
    ),
    **dict.fromkeys(("SET", "SETEX", "SETNX", "UNLINK"), _WRITE),
    **dict.fromkeys(("KOINON.DELETE", "KOINON.PUT", "KOINON.TOUCH"), _WRITE),
    **dict.fromkeys(
        ("APPEND", "DECR", "DECRBY", "GETDEL", "GETEX", "INCR", "INCRBY", "INCRBYFLOAT"), _BOTH
    ),
    **dict.fromkeys(("KOINON.GETORPUT", "KOINON.INCREMENT"), _BOTH),
    "SCAN": (Action.SCAN,),  # on what the pattern begins with: the command looks itself
    "DBSIZE": _NONE,  # it looks itself (``check_counting``), as CLUSTER COUNTKEYSINSLOT does
}


def check(spec: Spec, arguments: Arguments, caller: Caller) -> None:
    """Raise PermissionDeniedError unless the caller may send this command."""
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
        caller.check_some(action, DEFAULT_ID)
        caller.check_keys(action, DEFAULT_ID, keys)


def check_counting(caller: Caller) -> None:
    """Raise PermissionDeniedError unless the caller may know how many records there are."""
    if not caller.may_on_cluster(Action.VIEW):
        caller.check_prefix(Action.SCAN, DEFAULT_ID, b"")
