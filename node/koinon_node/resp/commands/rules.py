"""Checks that a caller may send a command: it may do all actions that the command needs."""

from __future__ import annotations

from koinon_node.resp.commands.spec import Spec
from koinon_node.resp.outcomes import Arguments
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action, Permissions

_TELLING = (b"GET", b"IFEQ", b"IFNE")
"""The options of SET that tell something about the value that is there."""


def check(spec: Spec, arguments: Arguments, session: Session) -> None:
    """Raise PermissionDeniedError unless the caller may send this command; of a command that needs
    an action, UnknownKeyspaceError as ``Session.served`` does.
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
    """Raise PermissionDeniedError unless the caller may know how many records there are."""
    if not session.caller.may_on_cluster(Action.VIEW):
        session.caller.check_prefix(Action.SCAN, session.served.keyspace_id, b"")
