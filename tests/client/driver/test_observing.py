"""Tests of the observer of a client: what it is told, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import koinon
from koinon import otel
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster


def seen_by(
    connect: Connect, cluster: FakeCluster, work: Callable[[Any], object], **options: Any
) -> list[koinon.Observation]:
    """Return what the observer is told of the work, which may fail."""
    told: list[koinon.Observation] = []
    client = connect(cluster.seeds, observer=told.append, **options)
    try:
        work(client)
    except koinon.KoinonError:
        client.close()
    return told


def test_observer_is_told_of_every_operation(cluster: FakeCluster, connect: Connect) -> None:
    def work(client: Any) -> None:
        client.put(b"k", b"v")
        client.get(b"k")
        client.get_entry(b"k")
        client.exists(b"k")
        client.increment(b"n")
        client.touch(b"k", None)
        client.get_or_put(b"k", b"v")
        client.put_many({b"k%d" % n: b"v" for n in range(7)})
        client.get_many([b"k", b"n"])
        client.get_entries([b"k"])
        client.delete_many([b"k", b"n"])
        client.delete(b"k")

    told = seen_by(connect, cluster, work, timeout_ms=20_000)
    assert [(one.operation, one.rows) for one in told] == [
        *(("put", 1), ("get", 1), ("get_entry", 1), ("exists", 1), ("increment", 1), ("touch", 1)),
        *(("get_or_put", 1), ("put_many", 7), ("get_many", 2), ("get_entries", 1)),
        *(("delete_many", 2), ("delete", 1)),
    ]
    assert {one.outcome for one in told} == {"ok"}
    assert all(0 < one.seconds < 60 for one in told)


def test_observer_is_told_of_each_page_of_a_scan(cluster: FakeCluster, connect: Connect) -> None:
    cluster.write(b"k", b"v", 0)
    told = seen_by(connect, cluster, lambda client: list(client.scan()), timeout_ms=20_000)
    assert {(one.operation, one.outcome) for one in told} == {("scan", "ok")}
    assert sum(one.rows for one in told) == 1


@pytest.mark.parametrize(
    ("work", "operation", "outcome", "rows"),
    [
        (lambda c: c.put(b"k", b"v", if_version=7), "put", "condition_failed", 1),
        (lambda c: c.get(b"k"), "get", "storage_full", 1),
        (lambda c: c.get_many([b"k", b"l"]), "get_many", "storage_full", 2),
        (lambda c: c.put_many({b"k": b"v"}), "put_many", "storage_full", 1),
    ],
)
def test_observer_is_told_how_an_operation_failed(
    cluster: FakeCluster,
    connect: Connect,
    work: Callable[[Any], object],
    operation: str,
    outcome: str,
    rows: int,
) -> None:
    if outcome == "storage_full":
        for node in cluster.nodes:
            node.refuse = lambda _: koinon.StorageFullError(node_id="n1", reason="for a test")
    (told,) = seen_by(connect, cluster, work, timeout_ms=20_000)
    assert (told.operation, told.outcome, told.rows) == (operation, outcome, rows)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("work", "operation", "rows"),
    [
        (lambda c: c.put(b"", b"v"), "put", 1),
        (lambda c: c.get(b"k", timeout_ms=0), "get", 1),
        (lambda c: c.get_many([b""]), "get_many", 0),
        (lambda c: c.put_many([(b"k", b"v")], ttl_ms=0), "put_many", 0),
        (lambda c: c.delete_many([b""]), "delete_many", 0),
        (lambda c: list(c.scan(page_rows=0)), "scan", 0),
        (lambda c: list(c.scan(page_rows=1 << 70)), "scan", 0),
    ],
)
def test_observer_is_told_of_calls_that_were_refused_before_anything_was_sent(
    cluster: FakeCluster,
    connect: Connect,
    work: Callable[[Any], object],
    operation: str,
    rows: int,
    closed: bool,
) -> None:
    told: list[koinon.Observation] = []
    client = connect(cluster.seeds, observer=told.append)
    if closed:
        client.close()
    expected = koinon.ClientClosedError if closed else koinon.InvalidArgumentError
    with pytest.raises(expected):
        work(client)
    (one,) = told
    outcome = "client_closed" if closed else "invalid_argument"
    assert (one.operation, one.outcome, one.rows) == (operation, outcome, rows)


def test_observer_that_raises_is_logged_once_and_fails_nothing(
    cluster: FakeCluster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(_: koinon.Observation) -> None:
        raise RuntimeError("a defect of the observer")

    client = connect(cluster.seeds, observer=defect, timeout_ms=20_000)
    client.put(b"k", b"v")
    assert client.get(b"k") == b"v"
    assert caplog.text.count("observer failed") == 1


def test_observer_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="observer must be callable, not int"):
        koinon.ClientOptions(observer=7)  # type: ignore[arg-type]
    with pytest.raises(koinon.ConfigurationError, match="observer is a function"):
        koinon.connect("koinon://a:1?observer=print")


def test_opentelemetry_has_durations_rows_and_errors(cluster: FakeCluster) -> None:
    reader = InMemoryMetricReader()
    observer = otel.observer(MeterProvider([reader]))
    with koinon.connect(cluster.seeds, observer=observer, timeout_ms=20_000) as client:
        client.put_many({b"k": b"v", b"l": b"w"})
        client.get(b"k")
        client.get(b"l")
        with pytest.raises(koinon.ConditionFailedError):
            client.put(b"k", b"v", if_version=7)
    data: Any = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    counts: Counter[tuple[Any, ...]] = Counter()
    for metric in metrics:
        for point in metric.data.data_points:
            assert point.attributes["db.system.name"] == "koinon"
            number = point.count if metric.unit == "s" else point.value
            error = point.attributes.get("error.type")
            counts[metric.name, point.attributes["db.operation.name"], error] += number
    assert counts == {
        ("db.client.operation.duration", "put_many", None): 1,
        ("db.client.operation.duration", "get", None): 2,
        ("db.client.operation.duration", "put", "condition_failed"): 1,
        ("koinon.client.rows", "put_many", None): 2,
        ("koinon.client.rows", "get", None): 2,
        ("koinon.client.rows", "put", "condition_failed"): 1,
    }
