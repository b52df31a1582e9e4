"""Every method of the running servers, called by all kinds of callers; no rule, no entry.

The methods are those that the servers have registered, found where they do it; reflection does not
know all of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon_proto.contract.access import Access, AccessState, Action, Effect, Grant, Role, User
from koinon_proto.contract.keyspaces import DEFAULT_ID, Keyspace, KeyspaceId
from koinon_proto.partitioner import partitioner
from koinon_proto.security import method_permissions
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.server.aio_server import GuardedServer
from koinon_proto.v1 import backup_pb2, groups_pb2, kv_pb2, loads_pb2, membership_pb2, raft_pb2
from tests.node.kit.staged_chunks import chunk_of
from tests.security.servers import Servers, serving

Code = grpc.StatusCode
REFUSALS = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
CALL_S = 60.0
ACTIONS = tuple(Action)
KEYS = (Action.READ, Action.WRITE, Action.SCAN, Action.LOAD, Action.BACKUP, Action.FEED)
_jobs = itertools.count()
HELD_IN = {
    "mine": {"default", "vip"},
    "mine-in-default": {"default"},
    "mine-in-vip": {"vip"},
    "mine-but-in-vip": {"default"},
}
"""The keyspaces in which each of these users may do all with the keys of ``mine:``."""


def grants_of(user: str, vip: KeyspaceId) -> tuple[Grant, ...]:
    everywhere = Grant(effect=Effect.ALLOW, actions=KEYS, prefix=b"mine:")
    return {
        "mine": (everywhere,),
        "mine-in-default": (replace(everywhere, keyspace_id=DEFAULT_ID),),
        "mine-in-vip": (replace(everywhere, keyspace_id=vip),),
        "mine-but-in-vip": (
            everywhere,
            replace(everywhere, keyspace_id=vip, effect=Effect.DENY),
        ),
    }[user]


DOCUMENT = Path(__file__).parents[2] / "docs/security.md"


class Walk:
    """The servers, and what they serve: (address, path, whether it answers with a stream).
    ``keyspaces``: each with an open load in it that has no owner.
    """

    def __init__(
        self,
        servers: Servers,
        methods: list[tuple[str, bool]],
        keyspaces: dict[str, tuple[Keyspace, int]],
    ) -> None:
        self.servers = servers
        self.methods = dict(methods)
        self.keyspaces = keyspaces

    def addresses(self, path: str) -> list[str]:
        on_both = path.startswith(("/koinon.v1.TableService/GetTable", "/grpc."))
        if on_both:
            return [self.servers.coordinator, self.servers.node]
        on_node = path.startswith(
            tuple(
                f"/koinon.v1.{name}/"
                for name in (
                    "KeyValue",
                    "Bulk",
                    "Replication",
                    "Traffic",
                    "Feed",
                    "Cursors",
                    "Backup",
                )
            )
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
            vip = servers.create_keyspace("vip", 4)
            assert servers.process_of_node is not None
            default = servers.process_of_node.state.table().keyspaces.default
            keyspaces = {
                one.name: (one, servers.open_load(one.name, one.keyspace_id))
                for one in (default, vip)
            }
            users = [
                User(name=f"may-{action.name.lower()}", roles=(action.name.lower(),))
                for action in ACTIONS
            ]
            state = AccessState(
                version=1,
                roles=(
                    *(Role(name=u, grants=grants_of(u, vip.keyspace_id)) for u in HELD_IN),
                    *(
                        Role(
                            name=action.name.lower(),
                            grants=(Grant(effect=Effect.ALLOW, actions=(action,)),),
                        )
                        for action in ACTIONS
                    ),
                ),
                users=(
                    *users,
                    User(name="nothing"),
                    *(User(name=name, roles=(name,)) for name in HELD_IN),
                ),
            )
            servers.set_access(Access(state))
            yield Walk(servers, found, keyspaces)


METHODS = set(method_permissions.RULES) - method_permissions.STREAMS
"""Those of gRPC; test_peer_port has the streams."""


def may(rule: method_permissions.Rule, action: Action) -> bool:
    return rule.open or rule.any_user or action in rule.actions


def test_each_method_that_is_served_has_a_rule_and_each_rule_a_method(walk: Walk) -> None:
    assert set(walk.methods) == METHODS


def test_the_table_of_rules_is_printed_in_the_documents() -> None:
    printed = DOCUMENT.read_text(encoding="utf-8")
    for path, rule in method_permissions.RULES.items():
        assert table_row(path, rule) in printed


def table_row(path: str, rule: method_permissions.Rule) -> str:
    """Return the row of a method in docs/security.md."""
    service, _, method = path.rpartition(".")[2].partition("/")
    who = [f"{kind} itself" if rule.speaks_as else f"any {kind}" for kind in sorted(rule.servers)]
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


@pytest.mark.parametrize("path", sorted(METHODS))
def test_each_method_is_refused_to_all_but_those_of_its_rule(walk: Walk, path: str) -> None:
    rule = method_permissions.RULES[path]

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


SPEAKS_AS = sorted(p for p in METHODS if method_permissions.RULES[p].speaks_as)


@pytest.mark.parametrize("path", SPEAKS_AS)
def test_a_server_speaks_for_itself_alone(walk: Walk, path: str) -> None:
    kind = next(iter(method_permissions.RULES[path].servers))
    own = {Kind.NODE: "n1", Kind.COORDINATOR: "c1"}[kind]
    assert walk.answer(path, kind, own, _request(path, "other")) is Code.PERMISSION_DENIED


def _of_key(path: str, key: bytes, keyspace: Keyspace, load_id: int) -> bytes | None:
    """Return a request about this key of the keyspace, or all that begin so, or the load in it;
    None: the method has no keys.
    """
    first = keyspace.base
    hashed = partitioner(keyspace.partitioner, keyspace.partition_count).partitions_of([key])
    ids = [first + int(p) for p in hashed]
    named: dict[str, Any] = {"keyspace": keyspace.name}
    known: dict[str, Any] = {"keyspace_id": keyspace.keyspace_id}
    operation = kv_pb2.Operation(key=key, delete=kv_pb2.DeleteRecord())
    increment = kv_pb2.Update(increment=kv_pb2.Increment(by=1))
    made: dict[str, Any] = {
        "KeyValue/Get": kv_pb2.GetRequest(key=key, **named),
        "KeyValue/BatchGet": kv_pb2.BatchGetRequest(keys=[key], partition_ids=ids, **known),
        "KeyValue/Put": kv_pb2.PutRequest(key=key, **named),
        "KeyValue/Delete": kv_pb2.DeleteRequest(key=key, **named),
        "KeyValue/BatchWrite": kv_pb2.BatchWriteRequest(
            keys=[key], values=[b""], partition_ids=ids, **known
        ),
        "KeyValue/BatchUpdate": kv_pb2.BatchUpdateRequest(
            keys=[key], partition_ids=ids, updates=[increment], **known
        ),
        "KeyValue/CommitBatch": kv_pb2.CommitBatchRequest(
            partition_id=ids[0], operations=[operation], **known
        ),
        "KeyValue/Scan": kv_pb2.ScanRequest(partition_ids=[first], prefix=key, **known),
        "Bulk/ReadColumns": loads_pb2.ReadColumnsRequest(
            partition_ids=[first], prefix=key, **known
        ),
        "Bulk/Stage": loads_pb2.StageRequest(
            load_id=load_id,
            attempt=1,
            partition_ids=ids,
            numbers=[0],
            chunks=[chunk_of([(key, b"")])],
        ),
        "Loads/OpenLoad": loads_pb2.OpenLoadRequest(
            job_id=f"job {next(_jobs)}",
            mode=loads_pb2.LOAD_MODE_OVERWRITE,
            prefix=key,
            timeout_ms=60_000,
            **known,
        ),
    }
    request = made.get(path.rpartition(".")[2])
    return None if request is None else bytes(request.SerializeToString())


def _of_load(path: str, load_id: int) -> bytes:
    """Return a request about the load that changes nothing of it."""
    made: dict[str, Any] = {
        "Bulk/Prepare": loads_pb2.PrepareRequest(load_id=load_id, attempts=[1]),
        "Loads/TouchLoad": loads_pb2.TouchLoadRequest(load_id=load_id),
        "Loads/CommitLoad": loads_pb2.CommitLoadRequest(load_id=load_id),  # refused: no attempt
    }
    return bytes(made[path].SerializeToString())


WITHOUT_KEYS = {"Bulk/Prepare", *(f"Loads/{name}Load" for name in ("Touch", "Commit", "Abort"))}
WITHOUT_KEYS |= {"Loads/GetLoads", "Admin/GetStatus"}
WITHOUT_KEYS |= {f"Backup/{name}Cut" for name in ("Open", "Make", "Release", "Read")}
WITHOUT_KEYS |= {"Feed/Changes", *(f"Groups/{name}" for name in ("Attend", "Leave", "GetGroups"))}
WITHOUT_KEYS |= {f"Cursors/{name}" for name in ("Claim", "Commit", "CommitBatch", "Read")}
ABOUT_KEYS = sorted(p for p in METHODS if {*method_permissions.RULES[p].actions} & {*KEYS})


@pytest.mark.parametrize("path", ABOUT_KEYS)
def test_each_method_about_keys_is_refused_for_keys_of_others_and_in_other_keyspaces(
    walk: Walk, path: str
) -> None:
    for place, (keyspace, load_id) in walk.keyspaces.items():
        for user, held_in in HELD_IN.items():
            mine = _of_key(path, b"mine:1", keyspace, load_id)
            theirs = _of_key(path, b"theirs:1", keyspace, load_id)
            if mine is None or theirs is None:
                assert path.rpartition(".")[2] in WITHOUT_KEYS
                return
            answer = walk.answer(path, Kind.USER, user, mine)
            assert (answer not in REFUSALS) is (place in held_in), (user, place, answer)
            assert walk.answer(path, Kind.USER, user, theirs) is Code.PERMISSION_DENIED


def test_backup_needs_the_right_on_all_keys_of_all_its_keyspaces(walk: Walk) -> None:
    ids = [keyspace.keyspace_id for keyspace, _ in walk.keyspaces.values()]

    def opened(user: str, *keyspace_ids: int) -> Code:
        request = backup_pb2.OpenCutRequest(cut=next(_jobs) + 1, keyspace_ids=keyspace_ids)
        path = "/koinon.v1.Backup/OpenCut"
        return walk.answer(path, Kind.USER, user, request.SerializeToString())

    assert opened("may-backup", *ids) is Code.OK
    for user in HELD_IN:
        assert opened(user, *ids) is Code.PERMISSION_DENIED


def test_group_needs_the_right_on_all_keys_of_all_its_keyspaces(walk: Walk) -> None:
    ids = [keyspace.keyspace_id for keyspace, _ in walk.keyspaces.values()]

    def attended(user: str, *keyspace_ids: int) -> Code:
        request = groups_pb2.AttendGroupRequest(
            group="walk",
            member_id=f"{user} {next(_jobs)}",
            number=1,
            keyspace_ids=keyspace_ids,
            session_ms=30_000,
        )
        path = "/koinon.v1.Groups/Attend"
        return walk.answer(path, Kind.USER, user, request.SerializeToString())

    assert attended("may-feed", *ids) is Code.OK
    for user in HELD_IN:
        for keyspace_id in ids:
            assert attended(user, keyspace_id) is Code.PERMISSION_DENIED


@pytest.mark.parametrize("path", ["Bulk/Prepare", "Loads/TouchLoad", "Loads/CommitLoad"])
def test_load_is_refused_to_who_may_load_nothing_into_its_keyspace(walk: Walk, path: str) -> None:
    for place, (_, load_id) in walk.keyspaces.items():
        request = _of_load(path, load_id)
        for user, held_in in HELD_IN.items():
            answer = walk.answer(f"/koinon.v1.{path}", Kind.USER, user, request)
            assert (answer not in REFUSALS) is (place in held_in), (user, place, answer)


@pytest.mark.parametrize("place", ["default", "vip"])
def test_load_that_appends_is_opened_only_in_a_keyspace_that_is_granted(
    walk: Walk, place: str
) -> None:
    keyspace, _ = walk.keyspaces[place]
    coordinator = walk.servers.process_of_coordinator
    assert coordinator is not None
    for user, held_in in HELD_IN.items():
        job_id = f"{user} appends in {place}"
        request = loads_pb2.OpenLoadRequest(
            job_id=job_id,
            mode=loads_pb2.LOAD_MODE_APPEND,
            keyspace_id=keyspace.keyspace_id,
        ).SerializeToString()
        answer = walk.answer("/koinon.v1.Loads/OpenLoad", Kind.USER, user, request)
        assert (answer not in REFUSALS) is (place in held_in), (user, answer)
        is_open = any(load.job_id == job_id for load in coordinator.state.loads)
        assert is_open is (place in held_in), "what is refused has changed nothing"


def test_a_method_without_a_rule_is_refused(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/koinon.v1.TableService/GetTable"
    monkeypatch.delitem(method_permissions.RULES, path)
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
    rule = method_permissions.RULES[path]
    if not rule.speaks_as:
        return b""
    if Kind.COORDINATOR in rule.servers:
        return raft_pb2.RaftBatch(hello=raft_pb2.RaftHello(member_id=name)).SerializeToString()
    method = path.rpartition("/")[2]
    made: bytes = getattr(membership_pb2, f"{method}Request")(node_id=name).SerializeToString()
    return made
