"""The table of who may call which method: what is not in it is refused.

A server (a node, a coordinator) is let in by its kind, where it acts as itself. A user needs one of
a rule's actions, on some key at least; which keys, the handlers check once they know them. docs/
security.md prints this table, and a test calls each method of running servers as everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import PermissionDeniedError, UnauthenticatedError
from koinon_proto.security.authorization import Caller
from koinon_proto.security.names import Kind

Claim = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """``servers`` may call as themselves; users with one of the ``actions``, all if ``any_user``;
    everybody with a certificate if ``open``. ``claims`` returns the name under which a server
    speaks in its (first) request: it has to be its own.
    """

    servers: frozenset[Kind] = frozenset()
    actions: tuple[Action, ...] = ()
    any_user: bool = False
    open: bool = False
    claims: Claim | None = None


_NODES = frozenset({Kind.NODE})
_COORDINATORS = frozenset({Kind.COORDINATOR})
_SERVERS = _NODES | _COORDINATORS


def _node_id(request: Any) -> str:
    return str(request.node_id)


def _member_id(batch: Any) -> str:
    return str(batch.hello.member_id)


_NODE_ITSELF = Rule(servers=_NODES, claims=_node_id)
_NODE = Rule(servers=_NODES)
_READ, _WRITE = Rule(actions=(Action.READ,)), Rule(actions=(Action.WRITE,))
_SCAN, _LOAD = Rule(actions=(Action.SCAN,)), Rule(actions=(Action.LOAD,))
_VIEW, _OPERATE = Rule(actions=(Action.VIEW,)), Rule(actions=(Action.OPERATE,))
_ACCESS = Rule(actions=(Action.ACCESS,))
_OPEN = Rule(open=True)

RULES: dict[str, Rule] = {
    f"/{service}/{method}": rule
    for service, methods in {
        "koinon.v1.KeyValue": {
            "Get": _READ,
            "BatchGet": _READ,
            "Put": _WRITE,
            "Delete": _WRITE,
            "BatchWrite": _WRITE,
            "BatchUpdate": _WRITE,
            "CommitBatch": Rule(actions=(Action.READ, Action.WRITE)),
            "Scan": _SCAN,
            "Attend": Rule(any_user=True),
        },
        "koinon.v1.Bulk": {"Stage": _LOAD, "Prepare": _LOAD, "ReadColumns": _SCAN},
        "koinon.v1.Loads": {
            "OpenLoad": _LOAD,
            "TouchLoad": _LOAD,
            "CommitLoad": _LOAD,
            "AbortLoad": Rule(actions=(Action.LOAD, Action.OPERATE)),
            "GetLoads": Rule(actions=(Action.LOAD, Action.VIEW)),
            "GetManifest": _NODE,
            "ReportMerged": _NODE,
        },
        "koinon.v1.TableService": {
            "GetTable": Rule(servers=_SERVERS, any_user=True),
            "WatchTable": Rule(servers=_SERVERS, any_user=True),
        },
        "koinon.v1.Traffic": {"GetTraffic": _VIEW, "SampleKeys": _OPERATE},
        "koinon.v1.Membership": {
            "Register": _NODE_ITSELF,
            "Heartbeat": _NODE_ITSELF,
            "AlterPartitions": _NODE_ITSELF,
            "Leave": _NODE_ITSELF,
        },
        "koinon.v1.Raft": {"Exchange": Rule(servers=_COORDINATORS, claims=_member_id)},
        "koinon.v1.Replication": {
            "Follow": _NODE,
            "ReadPage": _NODE,
            "ReadKeys": _NODE,
            "Checksums": Rule(servers=_NODES, actions=(Action.OPERATE,)),
            "PartitionSizes": Rule(servers=_NODES, actions=(Action.VIEW, Action.OPERATE)),
        },
        "koinon.v1.Admin": {
            # By it loads and operators find who leads.
            "GetStatus": Rule(actions=(Action.LOAD, Action.VIEW, Action.OPERATE, Action.ACCESS)),
            "GetMoves": _VIEW,
            "PlanMoves": _VIEW,
            "AddCoordinator": _OPERATE,
            "RemoveCoordinator": _OPERATE,
            "TransferLeadership": _OPERATE,
            "ExecutePlan": _OPERATE,
            "CancelMoves": _OPERATE,
            "SetMoves": _OPERATE,
            "SetNodeStatus": _OPERATE,
            "RestorePrimaries": _OPERATE,
            "ForcePrimaries": _OPERATE,
            "CreateKeyspace": _OPERATE,
            "AlterKeyspace": _OPERATE,
            "DropKeyspace": _OPERATE,
            "GetAccess": _ACCESS,
            "ChangeAccess": _ACCESS,
        },
        "grpc.health.v1.Health": {"Check": _OPEN, "Watch": _OPEN},
        "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _VIEW},
    }.items()
    for method, rule in methods.items()
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
    if rule.claims is None or principal is None:
        return
    claimed = rule.claims(request)
    if claimed != principal.name:
        raise PermissionDeniedError(
            principal=caller.name, action="speak", what=f"for {claimed or 'nobody'!r}"
        )
