"""A bulk load is of the user that opened it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from koinon_proto.contract.access import Access, AccessState, Action, Effect, Grant, Role, User
from koinon_proto.contract.bulk_loads import owner_digest
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc
from tests.kit.waiting import wait_until
from tests.node.kit.staged_chunks import chunk_of
from tests.security.servers import Servers, serving
from tests.security.test_permissions import partitions

CALL_S = 60.0
ATTEMPT = 7
_jobs = itertools.count()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("owners")) as found:
        roles = {"loader": Action.LOAD, "operator": Action.OPERATE}
        state = AccessState(
            version=1,
            roles=(
                *(
                    Role(name=name, grants=(Grant(effect=Effect.ALLOW, actions=(action,)),))
                    for name, action in roles.items()
                ),
                Role(
                    name="narrow",
                    grants=(Grant(effect=Effect.ALLOW, actions=(Action.LOAD,), prefix=b"narrow:"),),
                ),
            ),
            users=(
                User(name="a", roles=("loader",)),
                User(name="b", roles=("loader",)),
                User(name="both", roles=("loader", "operator")),
                User(name="operator", roles=("operator",)),
                User(name="narrow", roles=("narrow",)),
            ),
        )
        found.set_access(Access(state))
        yield found


class As:
    """Calls as a user."""

    def __init__(self, servers: Servers, user: str) -> None:
        dialing = servers.identities.dialing(Kind.USER, user)
        self._channels = [
            dialing.channel(address, ANY_SERVER, ())
            for address in (servers.coordinator, servers.node)
        ]
        self._loads: Any = loads_pb2_grpc.LoadsStub(self._channels[0])
        self._bulk: Any = loads_pb2_grpc.BulkStub(self._channels[1])

    def open(self, job: str) -> int:
        request = loads_pb2.OpenLoadRequest(job_id=job, mode=loads_pb2.LOAD_MODE_APPEND)
        return int(self._loads.OpenLoad(request, timeout=CALL_S).load_id)

    def uses(self, load_id: int, what: str) -> grpc.StatusCode:
        """Return how that use of a load ends."""
        request: Any = {
            "touch": loads_pb2.TouchLoadRequest(load_id=load_id),
            "commit": loads_pb2.CommitLoadRequest(load_id=load_id, attempts=[ATTEMPT]),
            "abort": loads_pb2.AbortLoadRequest(load_id=load_id),
            "stage": loads_pb2.StageRequest(load_id=load_id, attempt=ATTEMPT),
            "prepare": loads_pb2.PrepareRequest(load_id=load_id, attempts=[ATTEMPT]),
        }[what]
        stub = self._bulk if what in ("stage", "prepare") else self._loads
        method = what.capitalize() + ("" if stub is self._bulk else "Load")
        try:
            getattr(stub, method)(request, timeout=CALL_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def stages(self, load_id: int, key: bytes) -> grpc.StatusCode:
        """Return how staging a row ends."""
        request = loads_pb2.StageRequest(
            load_id=load_id,
            attempt=ATTEMPT,
            partition_ids=partitions([key]),
            numbers=[0],
            chunks=[chunk_of([(key, b"v")])],
        )
        try:
            self._bulk.Stage(request, timeout=CALL_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def owner(self, load_id: int) -> str:
        reply = self._loads.GetLoads(loads_pb2.GetLoadsRequest(load_id=load_id), timeout=CALL_S)
        return str(reply.loads[0].owner)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@pytest.fixture
def users(servers: Servers) -> Iterator[dict[str, As]]:
    made = {name: As(servers, name) for name in ("a", "b", "both", "operator", "narrow", "root")}
    yield made
    for one in made.values():
        one.close()


def opened(servers: Servers, by: As) -> int:
    """Open a load, and wait until the node knows it."""
    load_id = by.open(f"job {next(_jobs)}")
    node = servers.process_of_node
    assert node is not None

    def knows() -> bool:
        table = node.state.served.table
        return table is not None and any(load.load_id == load_id for load in table.loads)

    wait_until(knows, "the node to know the load")
    return load_id


DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("what", ["touch", "stage", "prepare", "commit", "abort"])
def test_only_its_owner_and_operators_use_a_load(
    servers: Servers, users: dict[str, As], what: str
) -> None:
    load_id = opened(servers, users["a"])
    assert users["b"].owner(load_id) == "a"
    assert users["b"].uses(load_id, what) is DENIED
    allowed = {"commit", "abort"} & {what}  # by one of them only: then it has ended
    for name in ("both",) if allowed else ("both", "root", "a"):
        assert users[name].uses(load_id, what) is grpc.StatusCode.OK, name
    if allowed:
        for name in ("root", "a"):
            other = opened(servers, users["a"])
            assert users[name].uses(other, what) is grpc.StatusCode.OK, name


def test_who_may_not_load_the_keys_does_not_hear_whether_a_load_is_open(
    servers: Servers, users: dict[str, As]
) -> None:
    load_id, ended = opened(servers, users["a"]), 1
    for one in (load_id, ended):
        assert users["narrow"].stages(one, b"wide:1") is DENIED
    assert users["narrow"].stages(load_id, b"narrow:1") is DENIED  # it is another user's
    assert users["a"].stages(ended, b"wide:1") is grpc.StatusCode.FAILED_PRECONDITION
    assert users["a"].stages(load_id, b"wide:1") is grpc.StatusCode.OK


def test_operators_abort_loads_without_leave_to_load(
    servers: Servers, users: dict[str, As]
) -> None:
    load_id = opened(servers, users["a"])
    assert users["operator"].uses(load_id, "commit") is DENIED
    assert users["operator"].uses(load_id, "abort") is grpc.StatusCode.OK


def test_a_job_is_not_taken_up_by_another_user(servers: Servers, users: dict[str, As]) -> None:
    job = f"job {next(_jobs)}"
    load_id = users["a"].open(job)
    assert users["a"].open(job) == load_id
    with pytest.raises(grpc.RpcError) as raised:
        users["b"].open(job)
    assert raised.value.code() is DENIED


def test_loads_of_before_are_everybodys(servers: Servers, users: dict[str, As]) -> None:
    coordinator = servers.process_of_coordinator
    assert coordinator is not None
    load_id = opened(servers, users["a"])
    loads = coordinator.state.loads._active
    loads[load_id] = type(loads[load_id])(load_id=load_id, job_id="old", mode=loads[load_id].mode)
    assert users["b"].uses(load_id, "touch") is grpc.StatusCode.OK
    assert owner_digest(load_id, "") == b""
