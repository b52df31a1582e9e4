"""Under which ids operations reach servers, and what errors say of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import koinon
from koinon.driver.request_ids import RequestId, naming, operation
from koinon.operate.admin import Admin
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import InternalError, KoinonError, StorageFullError
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import LEASE, ONLY_GRPC, keys_of
from tests.kit.waiting import wait_until

Seen = list[tuple[str, str, int]]
OWN = re.compile(r"[0-9a-f]{8}-[0-9a-f]+")


@pytest.fixture
def seen(cluster: FakeCluster, client: Any) -> Iterator[Seen]:
    """(method, id, call) of what arrives anywhere, in turn; refreshes of the table left out."""
    found: Seen = []

    async def note(method: str, _request: Any) -> None:
        fields = request_ids.log_fields()
        if method != "GetTable":
            found.append((method, str(fields["request_id"]), int(fields["call"])))

    for node in cluster.nodes:
        node.before = note
    yield found
    for node in cluster.nodes:
        node.before = None


def ids(seen: Seen) -> set[str]:
    return {request_id for _, request_id, _ in seen}


def test_single_operations_have_ids_of_their_own(client: Any, seen: Seen) -> None:
    client.put(b"a", b"1")
    client.get(b"a")
    assert [(method, call) for method, _, call in seen] == [("BatchWrite", 1), ("BatchGet", 1)]
    assert len(ids(seen)) == 2
    assert all(OWN.fullmatch(request_id) for request_id in ids(seen))


def test_retry_keeps_the_id_and_counts_calls(cluster: FakeCluster, client: Any, seen: Seen) -> None:
    refusals = iter([LEASE, LEASE])
    for node in cluster.nodes:
        node.refuse = lambda _partition: next(refusals, None)
    client.put(b"a", b"1")
    calls = [call for _, _, call in seen]
    assert len(calls) == 3
    assert calls[0] == 1
    assert calls == sorted(set(calls))  # between them the table was asked for, under the same id
    assert len(ids(seen)) == 1


@pytest.mark.parametrize("method", ["BatchWrite", "BatchGet", "Scan"])
def test_operation_over_many_rows_has_one_id_for_all_its_calls(
    cluster: FakeCluster, connect: Connect, client: Any, seen: Seen, method: str
) -> None:
    small = connect(cluster.seeds, timeout_ms=20_000, batch_rows=50)
    items = {b"key%d" % i: b"v" for i in range(400)}
    cluster.store = {key: (value, 1, 0) for key, value in items.items()}
    if method == "BatchWrite":
        small.put_many(items)
    elif method == "BatchGet":
        small.get_many(list(items))
    else:
        assert len(list(small.scan(page_rows=50))) == 400
    assert {name for name, _, _ in seen} == {method}
    assert len(ids(seen)) == 1
    assert sorted(call for _, _, call in seen) == list(range(1, len(seen) + 1))
    assert len(seen) >= 8


def test_id_of_the_application_names_all_operations_inside(client: Any, seen: Seen) -> None:
    with koinon.request_id("order-4711") as used:
        client.put(b"a", b"1")
        client.put_many({b"b": b"2"})
        client.get_many([b"a"])
        list(client.scan())
    client.get(b"a")
    assert used == "order-4711"
    *inside, after = seen
    assert ids(inside) == {"order-4711"}
    assert [call for _, _, call in inside] == list(range(1, len(inside) + 1))
    assert OWN.fullmatch(after[1])


def test_id_of_the_application_is_made_fit_for_logs(client: Any, seen: Seen) -> None:
    with koinon.request_id("or\nder " + "x" * 100) as used:
        client.get(b"a")
    assert ids(seen) == {used} == {"or?der?" + "x" * 57}
    with koinon.request_id() as made:
        client.get(b"a")
    assert seen[-1][1] == made
    assert OWN.fullmatch(made)
    with pytest.raises(TypeError, match="str"), koinon.request_id(b"x"):  # type: ignore[arg-type]
        pass


@ONLY_GRPC
async def test_operations_that_ride_together_go_under_the_first_id_that_is_given(
    cluster: FakeCluster,
) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 4)
    arrived: Seen = []

    async def note(method: str, request: Any) -> None:
        fields = request_ids.log_fields()
        arrived.append((method, str(fields["request_id"]), len(request.keys)))

    async def get(client: koinon.AsyncClient, key: bytes, name: str) -> None:
        if name:
            with koinon.request_id(name):
                await client.get(key)
        else:
            await client.get(key)

    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        await client.get(keys[0])
        cluster.nodes[0].before = note
        named = zip(keys, ["", "first", "", "second"], strict=True)
        await asyncio.gather(*[get(client, key, name) for key, name in named])
        await client.get(keys[0])
    together, alone = arrived
    assert together == ("BatchGet", "first", 4)
    assert OWN.fullmatch(alone[1])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "raised", "told"),
    [
        (InternalError(reason="boom"), koinon.UnknownFateError, True),
        (StorageFullError(node_id="n1", reason="full"), StorageFullError, False),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_error_has_the_id_that_servers_have_seen(
    cluster: FakeCluster,
    client: Any,
    seen: Seen,
    refusal: KoinonError,
    raised: type[KoinonError],
    told: bool,
    many: bool,
) -> None:
    for node in cluster.nodes:
        node.refuse = lambda _partition: refusal
    if many:
        result = client.put_many({b"a": b"1", b"b": b"2"})
        errors = [failure.error for failure in (*result.refused, *result.unknown)]
    else:
        with pytest.raises(raised) as caught:
            client.put(b"a", b"1")
        errors = [caught.value]
    assert {type(error) for error in errors} == {raised}
    assert {error.request_id for error in errors} == ids(seen)
    assert len(ids(seen)) == 1
    assert all((f"[request {error.request_id}]" in str(error)) is told for error in errors)
    assert all(str(error).count("[request ") <= 1 for error in errors)


def test_deadline_that_passes_names_the_request(
    cluster: FakeCluster, client: Any, seen: Seen
) -> None:
    client.get(b"a")
    for node in cluster.nodes:
        node.refuse = lambda _partition: LEASE
    before: set[str] = set()  # of these a last attempt may arrive late
    for ask, what in ((client.get, b"a"), (client.get_many, [b"a"])):
        seen.clear()
        with pytest.raises(koinon.UnavailableError) as caught:
            ask(what, timeout_ms=500)
        assert {caught.value.request_id} == ids(seen) - before
        before = {caught.value.request_id}
        assert str(caught.value).endswith(f" [request {caught.value.request_id}]")


def test_scan_that_fails_names_the_request(cluster: FakeCluster, client: Any, seen: Seen) -> None:
    for node in cluster.nodes:
        node.refuse = lambda _partition: InternalError(reason="boom")
    with pytest.raises(InternalError) as caught:
        list(client.scan())
    assert {caught.value.request_id} == ids(seen)


def test_error_of_what_was_asked_before_anything_was_sent_has_no_id(client: Any) -> None:
    with pytest.raises(koinon.InvalidArgumentError) as caught:
        client.get(b"")
    assert caught.value.request_id == ""


# --- coordinators ---------------------------------------------------------------------------------


def test_operators_calls_carry_ids_and_their_errors_name_them(
    cluster: FakeCluster, client: Any, seen: Seen
) -> None:
    with Admin(cluster.seeds, timeout_ms=20_000) as admin:
        with koinon.request_id("nightly"):
            assert admin.status().is_leader
        with pytest.raises(KoinonError) as caught:
            admin.transfer_leadership()  # the fake knows no such call
    assert "nightly" in ids(seen)
    assert caught.value.request_id in ids(seen)  # it was asked first who leads


def test_table_is_fetched_under_the_id_of_who_needs_it(cluster: FakeCluster, client: Any) -> None:
    arrived: list[tuple[str, Any]] = []

    async def note(method: str, _request: Any) -> None:
        arrived.append((method, request_ids.log_fields().get("request_id")))

    for node in cluster.nodes:
        node.before = note
    refusals = iter([LEASE])
    for node in cluster.nodes:
        node.refuse = lambda _partition: next(refusals, None)
    with koinon.request_id("moved"):
        client.get(b"a")
    wait_until(lambda: ("GetTable", "moved") in arrived)
    assert {name for _, name in arrived} == {"moved"}


def test_operation_inside_another_goes_under_its_id() -> None:
    with operation() as outer, operation() as inner:
        assert inner is outer
    with operation(RequestId("given")) as own:
        assert own.text == "given"


@pytest.mark.parametrize("asked", ["unary", "stream"])
@pytest.mark.parametrize("answered", ["unary", "stream"])
def test_blocking_call_of_every_kind_carries_its_id_and_the_token(
    asked: str, answered: str
) -> None:
    kind = f"{asked}_{answered}"

    def told(_request: Any, context: grpc.ServicerContext) -> Any:
        found = dict(context.invocation_metadata())
        words = f"{found.get(request_ids.KEY)!s} {found.get('authorization')!s}".encode()
        return words if answered == "unary" else iter([words])

    handler = getattr(grpc, f"{kind}_rpc_method_handler")(told)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("any", {"Ask": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as plain, operation(RequestId("mine")):
            call = getattr(naming(plain, (("authorization", "token"),)), kind)("/any/Ask")
            answer = call(b"" if asked == "unary" else iter([b""]), timeout=30)
            assert (answer if answered == "unary" else next(answer)) == b"mine/1 token"
    finally:
        server.stop(None).wait()
