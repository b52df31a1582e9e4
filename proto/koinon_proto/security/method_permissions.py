"""Checks that a caller may call a method: a method without a rule is refused to everybody.

The rules of our services are options of the methods in ``v1/*.proto``. A server (a node, a
coordinator) is let in by its kind, where it acts as itself. A user needs one of a rule's actions,
on some key at least; which keys, the handlers check once they know them. docs/security.md prints
the rules, and a test calls each method of running servers as everybody. Streams at a coordinator's
peer port, which are no methods of gRPC, have rules of the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import PermissionDeniedError, UnauthenticatedError
from koinon_proto.security.authorization import Caller
from koinon_proto.security.callers_gen import CALLERS
from koinon_proto.security.names import Kind


@dataclass(frozen=True, slots=True)
class Rule:
    """``servers`` may call as themselves; users with one of the ``actions``, all if ``any_user``;
    everybody with a certificate if ``open``. ``speaks_as``: the field of a server's (first) request
    that has to be the server's own name; "": there is none.
    """

    servers: frozenset[Kind] = frozenset()
    actions: tuple[Action, ...] = ()
    any_user: bool = False
    open: bool = False
    speaks_as: str = ""


def _rule(servers: tuple[str, ...], users: tuple[str, ...], speaks_as: str) -> Rule:
    """Return the rule that a method's options state."""
    any_user = users == ("any",)
    actions = () if any_user else tuple(Action[user.upper()] for user in users)
    return Rule(frozenset(map(Kind, servers)), actions, any_user, speaks_as=speaks_as)


HEARTBEATS, RAFT_MESSAGES = "/koinon.v1.Membership/Heartbeat", "/koinon.v1.Raft/Exchange"
STREAMS = frozenset({HEARTBEATS, RAFT_MESSAGES})

RULES: dict[str, Rule] = {
    **{path: _rule(*callers) for path, callers in CALLERS.items()},
    HEARTBEATS: Rule(frozenset({Kind.NODE}), speaks_as="node_id"),
    RAFT_MESSAGES: Rule(frozenset({Kind.COORDINATOR}), speaks_as="hello.member_id"),
    "/grpc.health.v1.Health/Check": Rule(open=True),
    "/grpc.health.v1.Health/Watch": Rule(open=True),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(actions=(Action.VIEW,)),
}


def check(path: str, caller: Caller) -> Rule:
    """Return the rule by which the caller may call the method.

    Raises:
        PermissionDeniedError: it may not.
        UnauthenticatedError: the certificate names no caller, and no token came with it.
    """
    rule, principal = RULES.get(path), caller.principal
    if principal is None:  # on a plain connection callers need not say who they are
        return rule or Rule()
    if rule is None:
        raise PermissionDeniedError(
            principal=caller.name, action="call", what=f"{path}, for which there is no rule"
        )
    if rule.open:
        return rule
    if principal.kind in (Kind.NODE, Kind.COORDINATOR):
        if principal.kind in rule.servers:
            return rule
    elif principal.kind is Kind.CLIENT:
        raise UnauthenticatedError(
            reason="this certificate names no user, and no token came with the call: set "
            "token_file, Spark's tokenFile, or KOINON_TOKEN_FILE (`koinon admin tokens create` "
            "makes one)"
        )
    elif rule.any_user or caller.may_some(*rule.actions):
        return rule
    actions = " or ".join(action.name.lower() for action in rule.actions)
    raise PermissionDeniedError(
        principal=caller.name, action=actions or "call", what="" if actions else path
    )


def check_claim(rule: Rule, caller: Caller, request: Any) -> None:
    """Raise PermissionDeniedError if a server speaks for another one."""
    principal = caller.principal
    if not rule.speaks_as or principal is None:
        return
    claimed = attrgetter(rule.speaks_as)(request)
    if claimed != principal.name:
        raise PermissionDeniedError(
            principal=caller.name, action="speak", what=f"for {claimed or 'nobody'!r}"
        )
