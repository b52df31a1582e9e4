"""Checks a caller's rights to a command: to every action that the command needs."""

from __future__ import annotations

from koinon_node.resp.commands.spec import Spec
from koinon_node.resp.outcomes import Arguments
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action, Permissions

_TELLING = (b"GET", b"IFEQ", b"IFNE")
"""The options of SET whose reply reveals something about the existing value."""


def check(spec: Spec, arguments: Arguments, session: Session) -> None:
    """Raise PermissionDeniedError unless the caller may send this command. For a command that needs
    an action on keys, raise UnknownKeyspaceError like ``Session.served``.
    """
    caller = session.caller
    if caller.permissions is Permissions.ALL:
        return
    actions = spec.needs
    if spec.name == "SET" and any(o.upper() in _TELLING for o in arguments[3:]):
        actions = (Action.READ, Action.WRITE)
    keys = spec.keys_in(arguments)
    for action in actions:
        keyspace_id = session.served.keyspace_id
        caller.check_some(action, keyspace_id)
        caller.check_keys(action, keyspace_id, keys)


def check_counting(session: Session) -> None:
    """Raise PermissionDeniedError unless the caller may know the number of records."""
    if not session.caller.may_on_cluster(Action.VIEW):
        session.caller.check_prefix(Action.SCAN, session.served.keyspace_id, b"")
