"""Histograms and their text; the endpoint: what it answers and refuses; a loop that hangs."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from prometheus_client import Counter

from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process.measures import Family, Histogram, distribution, labelled, single
from koinon_proto.server.metrics_server import Metrics, MetricsEndpoint
from tests.kit.addresses import free_address
from tests.scraping import parsed, scrape


def text_of(*families: Family) -> str:
    return "".join(piece for family in families for piece in family.pieces())


@asynccontextmanager
async def serving(metrics: Metrics) -> AsyncIterator[str]:
    """An endpoint; yields its address."""
    address = free_address()
    endpoint = MetricsEndpoint(address)
    endpoint.start(metrics)
    try:
        yield address
    finally:
        await asyncio.to_thread(endpoint.close)


def test_histogram_counts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        histogram.observe(value)
    found = parsed(text_of(distribution("koinon_x", "About x.", histogram)))
    buckets = {dict(of)["le"]: value for of, value in found.samples["koinon_x_bucket"].items()}
    assert buckets == {"1": 2, "10": 4, "+Inf": 5}
    assert (found.sum("koinon_x_sum"), found.sum("koinon_x_count")) == (24, 5)


def test_label_values_with_quotes_and_lines_are_escaped() -> None:
    name = 'a"b\\c\nd'
    found = parsed(text_of(labelled("koinon_x", "gauge", "X.", ("node",), {(name,): 3})))
    assert found.sum("koinon_x", node=name) == 3


def test_large_family_is_whole_over_its_pieces() -> None:
    values: dict[tuple[str, ...], int] = {(str(n),): n for n in range(2_000)}
    family = labelled("koinon_x_total", "counter", "X.", ("partition",), values)
    assert len(list(family.pieces())) > 3
    found = parsed(text_of(family))
    assert len(found.samples["koinon_x_total"]) == 2_000
    assert found.sum("koinon_x_total", partition="1999") == 1999


async def test_endpoint_tells_sources_registry_and_the_process_as_they_are_now() -> None:
    metrics = Metrics("node")
    numbers = {"x": 1}
    metrics.add(lambda: [single("koinon_x", "gauge", "X.", numbers["x"])])
    metrics.add(lambda: [single("koinon_y", "gauge", "Y.", 7)], on_loop=False)
    Counter("koinon_z", "Z.", registry=metrics.registry).inc(3)

    async with serving(metrics) as address:
        assert (await asyncio.to_thread(scrape, address)).sum("koinon_x") == 1
        numbers["x"] = 2
        found = await asyncio.to_thread(scrape, address)
        assert (found.sum("koinon_x"), found.sum("koinon_y")) == (2, 7)
        assert found.sum("koinon_z_total") == 3
        assert found.sum("koinon_build_info", component="node") == 1
        assert found.sum("process_resident_memory_bytes") > 1_000_000
        assert "_created" not in found.text


async def test_endpoint_gzips_if_asked_and_knows_one_path() -> None:
    def ask(address: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()

    async with serving(Metrics("node")) as address:
        status, body = await asyncio.to_thread(
            ask, address, "/metrics", {"Accept-Encoding": "gzip"}
        )
        assert status == 200
        assert "koinon_build_info" in gzip.decompress(body).decode()
        status, body = await asyncio.to_thread(ask, address, "/", {})
        assert (status, body) == (404, b"metrics are at /metrics\n")


async def test_endpoint_tells_the_last_numbers_again_while_the_loop_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_s = "koinon_proto.server.metrics_server._LOOP_WAIT_S"
    monkeypatch.setattr(wait_s, 60.0)
    metrics = Metrics("node")
    numbers = {"x": 1}
    metrics.add(lambda: [single("koinon_x", "gauge", "X.", numbers["x"])])

    async with serving(metrics) as address:
        await asyncio.to_thread(scrape, address)
        numbers["x"] = 2
        with ThreadPoolExecutor(1) as thread, monkeypatch.context() as patch:
            patch.setattr(wait_s, 0.05)
            old = thread.submit(scrape, address).result(60)  # the loop stands still meanwhile
        assert old.sum("koinon_x") == 1
        assert (await asyncio.to_thread(scrape, address)).sum("koinon_x") == 2


async def test_idle_connections_do_not_keep_a_scrape_waiting() -> None:
    async with serving(Metrics("coordinator")) as address:
        host, _, port = address.rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(4)]
        try:
            assert (await asyncio.to_thread(scrape, address)).sum("koinon_build_info") == 1
        finally:
            for one in idle:
                one.close()


async def test_loop_lag_shows_a_blocked_loop() -> None:
    async with serving(Metrics("node")) as address:
        await asyncio.sleep(0.1)
        time.sleep(0.6)  # noqa: ASYNC251
        await asyncio.sleep(0.1)
        found = await asyncio.to_thread(scrape, address, 60.0)
        name = "koinon_event_loop_lag_seconds"
        assert found.sum(f"{name}_sum") > 0.2
        late = found.sum(f"{name}_count") - found.sum(f"{name}_bucket", le="0.2")
        assert late >= 1


def test_address_that_is_taken_is_refused_and_free_again_after_close() -> None:
    address = free_address()
    first = MetricsEndpoint(address)
    with pytest.raises(ConfigurationError, match=f"metrics-listen {address}: cannot be bound"):
        MetricsEndpoint(address)
    first.close()
    first.close()
    MetricsEndpoint(address).close()
    with pytest.raises(ConfigurationError, match="cannot be bound"):
        MetricsEndpoint("no-such-host.invalid:9400")
