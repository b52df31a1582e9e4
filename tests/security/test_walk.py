"""Every method of the running servers, called by everybody: nobody comes in without a rule.

The methods are those that the servers have registered, found where they do it; reflection does not
know all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon_proto.contract.access import Access, AccessState, Action, Effect, Grant, Role, User
from koinon_proto.security import rules
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.server.aio_server import GuardedServer
from koinon_proto.v1 import membership_pb2, raft_pb2
from tests.security.servers import Servers, serving

Code = grpc.StatusCode
REFUSALS = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
CALL_S = 10.0
ACTIONS = tuple(Action)
DOCUMENT = Path(__file__).parents[2] / "docs/security.md"


class Walk:
    """The servers, and what they serve: (address, path, whether it answers with a stream)."""

    def __init__(self, servers: Servers, methods: list[tuple[str, bool]]) -> None:
        self.servers = servers
        self.methods = dict(methods)

    def addresses(self, path: str) -> list[str]:
        on_both = path.startswith(("/koinon.v1.TableService/GetTable", "/grpc."))
        if on_both:
            return [self.servers.coordinator, self.servers.node]
        on_node = path.startswith(
            tuple(f"/koinon.v1.{name}/" for name in ("KeyValue", "Bulk", "Replication", "Traffic"))
        )
        return [self.servers.node if on_node else self.servers.coordinator]

    def answer(self, path: str, kind: Kind, name: str = "", request: bytes = b"") -> Code:
        """Return how a call of the method ends for this caller, the same on all who serve it."""
        dialing = self.servers.identities.dialing(kind, name)
        codes = set()
        for address in self.addresses(path):
            with dialing.channel(address, ANY_SERVER, ()) as channel:
                method: Any = channel.stream_stream(path)
                call = method(iter([request]), timeout=CALL_S)
                try:
                    next(iter(call), None)
                    codes.add(Code.OK)
                except grpc.RpcError as error:
                    codes.add(error.code())
                call.cancel()
        assert len(codes) == 1, codes
        return codes.pop()


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    found: list[tuple[str, bool]] = []
    add = GuardedServer.add_registered_method_handlers

    def noting(self: Any, service: str, handlers: Any) -> None:
        for name, handler in handlers.items():
            if self._guard.guarded(f"/{service}/{name}", handler) is not None:
                found.append((f"/{service}/{name}", handler.response_streaming))
        add(self, service, handlers)

    directory: Path = tmp_path_factory.mktemp("walk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuardedServer, "add_registered_method_handlers", noting)
        with serving(directory) as servers:
            users = [
                User(name=f"may-{action.name.lower()}", roles=(action.name.lower(),))
                for action in ACTIONS
            ]
            state = AccessState(
                version=1,
                roles=tuple(
                    Role(
                        name=action.name.lower(),
                        grants=(Grant(effect=Effect.ALLOW, actions=(action,)),),
                    )
                    for action in ACTIONS
                ),
                users=(*users, User(name="nothing")),
            )
            servers.set_access(Access(state))
            yield Walk(servers, found)


def may(rule: rules.Rule, action: Action) -> bool:
    return rule.open or rule.any_user or action in rule.actions


def test_each_method_that_is_served_has_a_rule_and_each_rule_a_method(walk: Walk) -> None:
    assert set(walk.methods) == set(rules.RULES)


def test_the_table_of_rules_is_printed_in_the_documents() -> None:
    printed = DOCUMENT.read_text(encoding="utf-8")
    for path, rule in rules.RULES.items():
        assert table_row(path, rule) in printed


def table_row(path: str, rule: rules.Rule) -> str:
    """Return the row of a method in docs/security.md."""
    service, _, method = path.rpartition(".")[2].partition("/")
    who = [f"{kind} itself" if rule.claims else f"any {kind}" for kind in sorted(rule.servers)]
    if rule.open:
        who.append("everybody with a certificate")
    if rule.any_user:
        who.append("any user")
    who += [f"user with `{action.name.lower()}`" for action in rule.actions]
    return f"| {service}/{method} | {', '.join(who)} |"


def test_nobody_comes_in_without_a_certificate(walk: Walk) -> None:
    for address in (walk.servers.coordinator, walk.servers.node):
        with grpc.insecure_channel(address) as channel:
            call: Any = channel.unary_unary("/koinon.v1.TableService/GetTable")
            with pytest.raises(grpc.RpcError) as raised:
                call(b"", timeout=CALL_S)
        assert raised.value.code() is Code.UNAVAILABLE


@pytest.mark.parametrize("path", sorted(rules.RULES))
def test_each_method_is_refused_to_all_but_those_of_its_rule(walk: Walk, path: str) -> None:
    rule = rules.RULES[path]

    def answers(kind: Kind, name: str, allowed: bool) -> None:
        code = walk.answer(path, kind, name, _request(path, name))
        assert (code not in REFUSALS) is allowed, (kind, name, code)

    for kind, name in ((Kind.NODE, "n1"), (Kind.COORDINATOR, "c1")):
        answers(kind, name, rule.open or kind in rule.servers)
    answers(Kind.CLIENT, "", rule.open)
    answers(Kind.USER, "unheard-of", False)
    answers(Kind.USER, "nothing", rule.open or rule.any_user)
    for action in ACTIONS:
        answers(Kind.USER, f"may-{action.name.lower()}", may(rule, action))
    answers(Kind.USER, "root", bool(rule.actions) or rule.any_user or rule.open)


@pytest.mark.parametrize("path", sorted(p for p, r in rules.RULES.items() if r.claims))
def test_a_server_speaks_for_itself_alone(walk: Walk, path: str) -> None:
    kind = next(iter(rules.RULES[path].servers))
    own = {Kind.NODE: "n1", Kind.COORDINATOR: "c1"}[kind]
    assert walk.answer(path, kind, own, _request(path, "other")) is Code.PERMISSION_DENIED


def test_a_method_without_a_rule_is_refused(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/koinon.v1.TableService/GetTable"
    monkeypatch.delitem(rules.RULES, path)
    assert walk.answer(path, Kind.USER, "root") is Code.PERMISSION_DENIED
    assert walk.answer(path, Kind.NODE, "n1") is Code.PERMISSION_DENIED


def test_a_revoked_certificate_ends_calls_and_streams(walk: Walk) -> None:
    async def watch() -> Code:
        dialing = walk.servers.identities.dialing(Kind.USER, "may-read")
        async with dialing.aio_channel(walk.servers.coordinator, ANY_SERVER, ()) as channel:
            method: Any = channel.unary_stream("/koinon.v1.TableService/WatchTable")
            call = method(b"", timeout=CALL_S)
            assert await call.read() is not grpc.aio.EOF
            before = walk.servers.access
            walk.servers.set_access(Access(AccessState(version=before.version + 1)))
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            finally:
                walk.servers.set_access(Access(before.state))
            return Code.OK

    assert asyncio.run(watch()) is Code.UNAUTHENTICATED


def _request(path: str, name: str) -> bytes:
    """Return a request in which a server says that it is the one of this name."""
    rule = rules.RULES[path]
    if rule.claims is None:
        return b""
    if Kind.COORDINATOR in rule.servers:
        return raft_pb2.RaftBatch(hello=raft_pb2.RaftHello(member_id=name)).SerializeToString()
    method = path.rpartition("/")[2]
    made: bytes = getattr(membership_pb2, f"{method}Request")(node_id=name).SerializeToString()
    return made
