"""Both clients over real gRPC: operations, bad input, refusals and the table, closing."""

from __future__ import annotations

import asyncio
import copy
import pickle
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import koinon
from koinon_proto.contract.errors import (
    ResourceExhaustedError,
    StorageFullError,
    TableBehindError,
)
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import PARTITIONS, FakeCluster
from tests.client.kit.helpers import ALL, LEASE, keys_of
from tests.kit.waiting import wait_until

# --- operations ---------------------------------------------------------------------------------


def test_single_operations_round_trip(client: Any) -> None:
    assert client.get(b"k") is None
    assert client.get_entry(b"k") is None
    version = client.put(b"k", b"v")
    assert client.get(b"k") == b"v"
    assert client.get_entry(b"k") == (b"k", b"v", version, None)
    assert client.delete(b"k") is True
    assert client.delete(b"k") is False
    assert client.put(b"k", b"") > version
    assert client.get(b"k") == b""


def test_conditional_put_meets_another_version_raises_it(client: Any) -> None:
    version = client.put(b"k", b"1", if_version=0)
    assert client.put(b"k", b"2", if_version=version) > version
    with pytest.raises(koinon.ConditionFailedError) as caught:
        client.put(b"k", b"3", if_version=version)
    assert caught.value.expected_version == version
    with pytest.raises(koinon.ConditionFailedError):
        client.delete(b"k", if_version=1)
    assert client.get(b"k") == b"2"


def test_many_round_trip_over_several_batches(cluster: FakeCluster, connect: Connect) -> None:
    client = connect(cluster.seeds, timeout_ms=20_000, batch_rows=50)
    rows = {b"key%d" % i: b"v%d" % i for i in range(1_000)}
    result = client.put_many(rows, ttl_ms=77)
    assert (result.rows, result.applied, result.ok) == (1_000, 1_000, True)
    assert client.get_many([*rows, b"none"]) == [*rows.values(), None]
    entries = client.get_entries([b"key1", b"none"])
    assert entries[0].value == b"v1"
    assert entries[0].expires_at_ms == 77
    assert entries[1] is None
    deleted = client.delete_many([*rows, b"none"])
    assert (deleted.applied, deleted.absent) == (1_001, 1)
    assert client.get_many([]) == []
    assert client.put_many([]).rows == 0


def test_put_many_rows_have_times_to_live_of_their_own(
    cluster: FakeCluster, connect: Connect
) -> None:
    client = connect(cluster.seeds, timeout_ms=20_000, batch_rows=5)
    own = [(b"key%d" % i, b"v", i or None) for i in range(60)]
    assert client.put_many(own, ttl_ms=99).applied == 60
    expiries = [entry.expires_at_ms for entry in client.get_entries([key for key, _, _ in own])]
    assert expiries == [99, *range(1, 60)]
    assert client.put_many(iter([(b"a", b"v", 7), (b"a", b"w", None), (b"b", b"v", 8)])).ok
    a, b = client.get_entries([b"a", b"b"])
    assert (a.value, a.expires_at_ms, b.expires_at_ms) == (b"w", None, 8)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(b"k", b"v", 0)], "ttl_ms of row 0"),
        ([(b"k", b"v", None), (b"k", b"v", 1 << 60)], "ttl_ms of row 1"),
        ([(b"k", b"v", None), (b"k", b"v", "5")], "ttl_ms of row 1"),
        ([(b"k", b"v"), (b"l", b"v", 5)], "row 1 has 3 parts"),
        ([(b"k", b"v", 5, 6)], "row 0 is not a"),
    ],
)
def test_put_many_time_to_live_that_has_no_sense_is_refused(
    cluster: FakeCluster, client: Any, rows: Any, says: str
) -> None:
    with pytest.raises((TypeError, koinon.InvalidArgumentError), match=says):
        client.put_many(rows)
    assert not cluster.store


def test_put_many_if_absent_leaves_what_is_there_and_counts_it(
    cluster: FakeCluster, connect: Connect
) -> None:
    client = connect(cluster.seeds, timeout_ms=20_000, batch_rows=5)
    client.put_many({b"key%d" % i: b"old" for i in range(0, 60, 2)})
    new = [(b"key%d" % i, b"new") for i in range(60)]
    result = client.put_many([*new, (b"key2", b"newer")], if_absent=True)
    assert (result.rows, result.applied, result.present, result.ok) == (61, 30, 31, True)
    assert cluster.present_listed == 31
    values = client.get_many([key for key, _ in new])
    assert values == [b"old", b"new"] * 30


def test_scan_returns_every_record_once_and_by_prefix(client: Any) -> None:
    rows = {b"k%03d" % i: b"v%d" % i for i in range(300)}
    client.put_many(rows)
    found = list(client.scan(page_rows=40))
    assert {entry.key: entry.value for entry in found} == rows
    assert len(found) == len(rows)
    assert {e.key for e in client.scan(prefix=b"k00")} == {b"k%03d" % i for i in range(10)}
    assert {e.value for e in client.scan(keys_only=True)} == {b""}


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_from_a_key_up_to_a_number_of_records(
    cluster: FakeCluster, client: Any, reverse: bool
) -> None:
    keys = [b"k%03d" % i for i in range(300)]
    client.put_many(dict.fromkeys(keys, b"v"))
    inside = [key for key in keys if (key <= b"k123" if reverse else key >= b"k123")]
    found = [e.key for e in client.scan(start=bytearray(b"k123"), reverse=reverse, page_rows=7)]
    assert sorted(found) == inside
    part_of = cluster.partitioner.partition_of
    for partition_id in set(map(part_of, found)):
        of_one = [key for key in found if part_of(key) == partition_id]
        assert of_one == sorted(of_one, reverse=reverse)
    few = [e.key for e in client.scan(start=b"k123", reverse=reverse, page_rows=7, limit=20)]
    assert few == found[:20]
    assert [e.key for e in client.scan(prefix=b"k12", start=b"k123", reverse=reverse, limit=9)]
    cluster.reset_counts()
    assert len(list(client.scan(limit=1))) == 1
    assert cluster.count("Scan") == 1  # and no page ahead


def test_scan_partitions_move_meanwhile_loses_and_doubles_nothing(
    cluster: FakeCluster, client: Any
) -> None:
    rows = {b"k%03d" % i: b"v" for i in range(300)}
    client.put_many(rows)

    async def move(method: str, _request: object) -> None:
        if method == "Scan" and cluster.table.table_version < 12:
            version = cluster.table.table_version
            cluster.move(range(version, PARTITIONS, 7), version % 2 + 1)

    for node in cluster.nodes:
        node.before = move
    assert sorted(entry.key for entry in client.scan(page_rows=20)) == sorted(rows)


def test_table_and_status_are_readable(cluster: FakeCluster, client: Any) -> None:
    table = client.table()
    if asyncio.iscoroutine(table):
        table = asyncio.run(table)
    assert table.cluster.cluster_id == "fake"
    assert client.cluster_status().is_leader


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.get("text"),
        lambda c: c.get([1]),
        lambda c: c.put(b"k", "text"),
        lambda c: c.put(b"k", None),
        lambda c: c.put(b"k", b"v", ttl_ms=1.5),
        lambda c: c.put(b"k", b"v", if_version="1"),
        lambda c: c.delete(7),
        lambda c: c.get_many([b"k", "text"]),
        lambda c: c.get_many(b"bytes"),
        lambda c: c.put_many([(b"k", "text")]),
        lambda c: c.delete_many([None]),
        lambda c: next(c.scan(prefix="text")),
        lambda c: next(c.scan(start="text")),
        lambda c: next(c.scan(limit=1.5)),
        lambda c: c.get(b"k", timeout_ms=0.5),
    ],
)
def test_wrong_type_is_a_type_error_and_sends_nothing(
    cluster: FakeCluster, client: Any, call: Callable[[Any], object]
) -> None:
    cluster.reset_counts()
    with pytest.raises(TypeError):
        call(client)
    assert all(not node.calls for node in cluster.nodes)


@pytest.mark.parametrize(
    ("call", "limit", "actual"),
    [
        (lambda c: c.get(b""), 500, 0),
        (lambda c: c.get(b"k" * 501), 500, 501),
        (lambda c: c.put(b"k", b"v" * ((1 << 20) + 1)), 1 << 20, (1 << 20) + 1),
        (lambda c: c.put(b"k", b"v", ttl_ms=0), 0, 0),
        (lambda c: c.put(b"k", b"v", if_version=-1), 0, 0),
        (lambda c: c.get_many([b"k", b""]), 500, 0),
        (lambda c: c.put_many([(b"k", b"v"), (b"k" * 600, b"v")]), 500, 600),
        (lambda c: c.delete_many([b"k" * 501]), 500, 501),
        (lambda c: next(c.scan(prefix=b"p" * 501)), 500, 501),
        (lambda c: c.get(b"k", timeout_ms=0), 0, 0),
    ],
)
def test_broken_limit_names_limit_and_size_and_sends_nothing(
    cluster: FakeCluster, client: Any, call: Callable[[Any], object], limit: int, actual: int
) -> None:
    cluster.reset_counts()
    with pytest.raises(koinon.InvalidArgumentError) as caught:
        call(client)
    assert (caught.value.limit, caught.value.actual) == (limit, actual)
    assert all(not node.calls for node in cluster.nodes)


def test_largest_key_and_value_pass(client: Any) -> None:
    key, value = b"k" * 500, b"v" * (1 << 20)
    client.put(key, value)
    assert client.get(key) == value


def test_bytes_of_any_kind_are_taken(client: Any) -> None:
    array, view = bytearray(b"array"), memoryview(b"-view-")[1:5]
    client.put(array, view)
    array[:] = b"other"  # what was given is the caller's again
    assert client.get(memoryview(b"array")) == b"view"
    assert client.get_or_put(view, bytearray(b"new")) == b"new"
    assert client.put_many([(array, view), (view, bytearray(b"v")), (b"k", b"v")]).ok
    assert client.get_many([bytearray(b"view"), b"other", view]) == [b"v", b"view", b"v"]
    assert client.delete_many(iter([bytearray(b"view"), b"other"])).ok
    assert not client.exists(view)


@pytest.mark.parametrize(
    "address", ["", " , ", "localhost", "host:port", "host:0", "host:²", ":7400", "a:1,b"]
)
def test_connect_bad_address_is_a_configuration_error(address: str) -> None:
    with pytest.raises(koinon.ConfigurationError):
        koinon.connect(address)


@pytest.mark.parametrize(
    "options", [{"timeout_ms": 0}, {"batch_rows": 0}, {"batch_bytes": 1 << 40}]
)
def test_connect_bad_option_is_a_configuration_error(options: dict[str, Any]) -> None:
    with pytest.raises(koinon.ConfigurationError):
        koinon.connect("127.0.0.1:1", **options)


# --- refusals and the table ---------------------------------------------------------------------


def test_refusals_seen_by_many_callers_cost_one_refresh() -> None:
    """Every refusal is in before anybody serves the new table, so one refresh is right for all."""
    callers = 50
    cluster = FakeCluster(nodes=4)
    *losers, owner = cluster.nodes
    keys = [key for node in losers for key in keys_of(cluster, node)]
    refused = callers * len(losers)
    all_sent, all_moved_on = asyncio.Event(), asyncio.Event()

    async def hold(method: str, _request: object) -> None:
        if method == "GetTable":
            await all_moved_on.wait()
        elif sum(node.calls.get("BatchGet", 0) for node in losers) == refused:
            all_sent.set()
        await all_sent.wait()
        if owner.calls.get("BatchGet") == refused:
            all_moved_on.set()

    async def many() -> None:
        async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
            await client.put_many([(key, b"v") for key in keys])
            cluster.move(ALL, owner.number)
            cluster.reset_counts()
            for node in cluster.nodes:
                node.before = hold
            found = await asyncio.gather(*[client.get_many(keys) for _ in range(callers)])
            assert found == [[b"v"] * len(keys)] * callers
            deadline = time.monotonic() + 60
            table = await client.table()
            while table.table_version < 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
                table = await client.table()
            assert table.table_version == 2

    try:
        asyncio.run(many())
    finally:
        cluster.close()
    for node in cluster.nodes:
        assert node.calls.get("GetTable", 0) <= 1, "one refresh asks a server once at most"
    for node in losers:
        assert node.calls["BatchGet"] == callers, "refused once, then straight to the owner"


def test_moved_partition_is_followed_though_no_server_has_the_new_table(
    cluster: FakeCluster, client: Any
) -> None:
    client.put(b"k", b"v")
    cluster.move(ALL, 2, tell=False)
    assert client.get(b"k") == b"v"
    assert client.get_many([b"k", b"other"]) == [b"v", None]


def test_batch_partly_refused_sends_only_the_refused_rows_again(
    cluster: FakeCluster, client: Any
) -> None:
    rows = {b"key%d" % i: b"v" for i in range(400)}
    moved = [p for p in ALL if p % 8 == 0]  # of node 1
    cluster.move(moved, 2)
    cluster.reset_counts()
    assert client.put_many(rows).applied == 400
    refused = sum(cluster.partitioner.partition_of(key) in moved for key in rows)
    assert sum(cluster.nodes[0].rows["BatchWrite"]) + sum(cluster.nodes[1].rows["BatchWrite"]) == (
        400 + refused
    )
    assert len(cluster.applied) == 400


@pytest.mark.parametrize(
    "error",
    [
        LEASE,
        TableBehindError(table_version=0, required_version=1),
        ResourceExhaustedError(resource="queue", limit=1),
    ],
)
def test_passing_refusal_is_retried_inside_the_deadline(
    cluster: FakeCluster, client: Any, error: koinon.KoinonError
) -> None:
    left = {"singles": 3, "many": 3}

    def refuse_for(name: str) -> Callable[[int], koinon.KoinonError | None]:
        def refuse(_partition_id: int) -> koinon.KoinonError | None:
            left[name] -= 1
            return error if left[name] >= 0 else None

        return refuse

    cluster.nodes[0].refuse = cluster.nodes[1].refuse = refuse_for("singles")
    assert client.put(b"k", b"v") > 0
    cluster.nodes[0].refuse = cluster.nodes[1].refuse = refuse_for("many")
    assert client.put_many({b"key%d" % i: b"v" for i in range(20)}).ok
    assert max(left.values()) < 0


def test_final_refusal_of_some_rows_is_reported_row_by_row(
    cluster: FakeCluster, client: Any
) -> None:
    full = StorageFullError(node_id="n1", reason="map")
    cluster.nodes[0].refuse = lambda p: full if p % 4 == 0 else None
    rows = [(b"key%d" % i, b"v") for i in range(200)]
    bad = [i for i, (k, _) in enumerate(rows) if cluster.partitioner.partition_of(k) % 4 == 0]
    result = client.put_many(rows)
    assert [failure.row for failure in result.refused] == bad
    assert result.applied == 200 - len(bad)
    with pytest.raises(koinon.StorageFullError):
        result.raise_for_errors()


def test_offline_partition_comes_back_inside_the_deadline(
    cluster: FakeCluster, client: Any
) -> None:
    cluster.move(ALL, 0)
    threading.Timer(0.3, lambda: cluster.move(ALL, 1)).start()
    assert client.put(b"k", b"v") > 0
    assert client.get_many([b"k"]) == [b"v"]


def test_offline_partition_at_the_deadline_is_unavailable_and_says_why(
    cluster: FakeCluster, client: Any
) -> None:
    cluster.move(ALL, 0)
    with pytest.raises(koinon.UnavailableError, match="offline"):
        client.get(b"k", timeout_ms=150)
    with pytest.raises(koinon.UnavailableError, match="offline"):
        client.get_many([b"k"], timeout_ms=150)
    with pytest.raises(koinon.UnavailableError, match="offline"):
        list(client.scan(timeout_ms=150))
    result = client.put_many({b"k": b"v"}, timeout_ms=150)
    assert type(result.refused[0].error) is koinon.UnavailableError


def test_scan_that_every_node_refuses_ends_at_its_deadline(
    cluster: FakeCluster, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(node: Any, partition_id: int) -> koinon.KoinonError:
        return koinon.LeaseExpiredError(node_id=f"n{node.number}")

    monkeypatch.setattr(cluster, "refusal", refuse)
    with pytest.raises(koinon.UnavailableError):
        list(client.scan(timeout_ms=300))


def test_connect_waits_for_the_bootstrap(cluster: FakeCluster, connect: Connect) -> None:
    table, cluster.served_table = cluster.served_table, None
    with pytest.raises(koinon.ClusterNotReadyError):
        connect(cluster.seeds, timeout_ms=1_000)

    def bootstrap() -> None:
        cluster.served_table = table

    threading.Timer(0.2, bootstrap).start()
    assert connect(cluster.seeds).get(b"k") is None


@pytest.mark.parametrize(
    ("addresses", "kind", "text"),
    [
        ("127.0.0.1:9", koinon.NobodyListensError, r"127\.0\.0\.1:9: connection refused"),
        (
            "nowhere.invalid:7400",
            koinon.UnknownHostError,
            r"nowhere\.invalid:7400: unknown host",
        ),
        (
            "nowhere.invalid:7400,[::1]:9",
            koinon.NobodyListensError,
            r"unknown host.*; \[::1\]:9: conn",
        ),
        ("a..b:7400", koinon.UnknownHostError, r"a\.\.b:7400: unknown host"),
        (f"{'a' * 64}:7400", koinon.UnknownHostError, "unknown host"),
    ],
)
def test_connect_where_nobody_can_be_fails_at_once_and_says_why(
    connect: Connect, addresses: str, kind: type[koinon.KoinonError], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        connect(addresses, timeout_ms=10_000_000)  # longer than a test may take
    assert isinstance(caught.value, koinon.UnavailableError)


def test_connect_while_no_name_can_be_looked_up_goes_on_to_the_deadline(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(koinon.UnavailableError, match="Temporary failure") as caught:
        connect("nowhere.invalid:7400", timeout_ms=2_000)
    assert type(caught.value) is koinon.UnavailableError


def test_connect_to_what_never_answers_says_so_when_the_time_is_over(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(koinon.UnavailableError) as caught:
            connect(address, timeout_ms=200)
        assert str(caught.value).startswith(f"not served within 200 ms: no answer from {address}")
        with pytest.raises(koinon.UnavailableError, match=f"{address}: no gRPC server answers"):
            connect(address, timeout_ms=3_000)
    assert type(caught.value) is koinon.UnavailableError


def test_connect_one_seed_dead_uses_the_other(cluster: FakeCluster, connect: Connect) -> None:
    assert connect(f"127.0.0.1:9,{cluster.nodes[0].address}").get(b"k") is None


def test_another_cluster_behind_a_known_address_is_refused(
    cluster: FakeCluster, connect: Connect
) -> None:
    client = connect(cluster.nodes[0].address)
    cluster.served_table = cluster._first_table(PARTITIONS, "another")
    cluster.nodes[0].refuse = cluster.nodes[1].refuse = lambda _p: LEASE
    with pytest.raises(koinon.UnavailableError):
        client.get(b"k", timeout_ms=300)
    with pytest.raises(koinon.UnavailableError):
        connect("127.0.0.1:9", timeout_ms=100)


# --- closing, threads, forks --------------------------------------------------------------------


def test_closed_client_refuses_and_closes_again(client: Any) -> None:
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.get(b"k"),
        lambda: client.put(b"k", b"v"),
        lambda: client.get_many([b"k"]),
        lambda: client.put_many({b"k": b"v"}),
        lambda: list(client.scan()),
        lambda: client.table(),
        lambda: client.cluster_status(),
    ]
    for call in calls:
        with pytest.raises(koinon.ClientClosedError, match="closed") as caught:
            call()
        assert not caught.value.retriable


def _closed_under_way(error: BaseException) -> bool:
    return isinstance(error, koinon.UnknownFateError) and "closed while rows" in str(error)


def test_close_ends_calls_under_way(cluster: FakeCluster) -> None:
    gate = cluster.gate()

    async def hold(method: str, request: object) -> None:
        if method != "GetTable":
            await gate(method, request)

    for node in cluster.nodes:
        node.before = hold
    client = koinon.connect(cluster.seeds, timeout_ms=20_000)
    with ThreadPoolExecutor(4) as pool:
        put = pool.submit(client.put, b"k", b"v")
        get = pool.submit(client.get, b"k")
        many = pool.submit(client.get_many, [b"k"])
        load = pool.submit(client.put_many, {b"k": b"v"})
        wait_until(lambda: cluster.count("BatchWrite") + cluster.count("BatchGet") == 4)
        began = time.monotonic()
        client.close()
        with pytest.raises(koinon.UnknownFateError):
            put.result(60)
        for reading in (get, many):
            with pytest.raises(koinon.ClientClosedError):
                reading.result(60)
        # The thread had asked for the rows' end, or was about to when the loop stopped.
        told = load.exception(60)
        assert len(load.result().unknown) == 1 if told is None else _closed_under_way(told)
        assert time.monotonic() - began < 15
    gate.open()


def test_many_threads_share_a_client(cluster: FakeCluster) -> None:
    with koinon.connect(cluster.seeds, timeout_ms=20_000) as client, ThreadPoolExecutor(32) as pool:

        def work(n: int) -> bool:
            keys = [b"t%d-%d" % (n, i) for i in range(20)]
            for key in keys:
                client.put(key, key)
            return [client.get(key) for key in keys] == client.get_many(keys) == keys

        assert all(pool.map(work, range(32)))


def test_package_names_what_it_exports() -> None:
    assert koinon.__version__
    for name in koinon.__all__:
        if name != "LocalCluster":
            assert getattr(koinon, name) is not None
    with pytest.raises(AttributeError):
        koinon.nothing  # noqa: B018


# --- copies, and threads that are none ------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_client_cannot_be_copied_and_goes_on(client: Any, make: Callable[[Any], Any]) -> None:
    real = getattr(client, "wrapped", client)
    with pytest.raises(TypeError, match=f"a {type(real).__name__} cannot be pickled or copied"):
        make(real)
    client.put(b"k", b"v")
    assert client.get(b"k") == b"v"


def test_threads_that_gevent_has_patched_are_refused(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched: Any = types.ModuleType("gevent.monkey")
    patched.is_module_patched = lambda name: name == "threading"
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    with pytest.raises(koinon.ConfigurationError, match="gevent has patched threads"):
        koinon.connect(cluster.seeds)
