"""Staged rows and the limits of their keyspace: times to live, rows a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koinon_node.core.formats.chunk_keys import ChunkName
from koinon_proto.contract.columns import DELETED
from koinon_proto.contract.errors import InvalidArgumentError, QuotaExceededError
from koinon_proto.contract.keyspaces import KeyspaceList, default_keyspace
from koinon_proto.contract.table import Table
from tests.kit.waiting import until
from tests.node.kit.held_writer import table_of
from tests.node.kit.loads_bench import OPEN, LoadsBench, with_loads
from tests.node.kit.staged_chunks import LOAD, chunk_of

ROWS = [(b"a", b"1"), (b"b", b"2")]


def with_limits(**limits: Any) -> Table:
    """Return the table of an open load into ``default``, which has these limits."""
    table = table_of(loads=[OPEN])
    keyspace = replace(default_keyspace(table.cluster), **limits)
    return replace(table, keyspace_list=KeyspaceList(changed_at=1, keyspaces=(keyspace,)))


def test_rows_of_a_load_have_the_times_to_live_of_their_keyspace(tmp_path: Path) -> None:
    hour, day = 3_600_000, 24 * 3_600_000
    table = with_limits(default_ttl_ms=hour, max_ttl_ms=day)

    async def use(bench: LoadsBench) -> None:
        now_ms = bench.clock.ms
        ahead_ms = now_ms + day + 30_000  # by a clock that is half a minute ahead
        await bench.stage_chunks(
            {
                (0, 0): chunk_of([(b"a", b"1"), (b"d", b"4")]),
                (0, 1): chunk_of([(b"b", b"2")], expires_at_ms=now_ms + 5_000_000),
                (0, 2): chunk_of([(b"c", b"3")], expires_at_ms=ahead_ms),
            }
        )
        with pytest.raises(InvalidArgumentError, match="may live, in ms") as refused:
            await bench.stage([(b"e", b"5")], number=3, expires_at_ms=now_ms + day + 60_001)
        assert (refused.value.limit, refused.value.actual) == (day, day + 60_001)
        async with bench.loading():
            bench.merge(1)
            await until(lambda: bench.coordinators.merged() == {0})
        found = {key: record.expires_at_ms for key, record in bench.partition().records.items()}
        late = now_ms + hour
        assert found == {b"a": late, b"b": now_ms + 5_000_000, b"c": now_ms + day, b"d": late}

    with_loads(tmp_path, use, table=table)


def test_rows_with_expiries_of_their_own_have_the_times_to_live_of_their_keyspace(
    tmp_path: Path,
) -> None:
    hour, day = 3_600_000, 24 * 3_600_000
    table = with_limits(default_ttl_ms=hour, max_ttl_ms=day)

    async def use(bench: LoadsBench) -> None:
        now_ms = bench.clock.ms
        rows = [(b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (b"d", b"")]
        await bench.put(b"d", value=b"old", ttl_ms=hour)
        await bench.stage(rows, expiries=[0, now_ms + 5, now_ms + day + 30_000, DELETED])
        with pytest.raises(InvalidArgumentError, match="may live, in ms") as refused:
            await bench.stage(ROWS, number=1, expiries=[now_ms + 5, now_ms + day + 60_001])
        assert (refused.value.limit, refused.value.actual) == (day, day + 60_001)
        async with bench.loading():
            bench.merge(1)
            await until(lambda: bench.coordinators.merged() == {0})
        found = {key: record.expires_at_ms for key, record in bench.partition().records.items()}
        assert found == {b"a": now_ms + hour, b"b": now_ms + 5, b"c": now_ms + day}

    with_loads(tmp_path, use, table=table)


def test_rows_of_a_load_count_against_the_limits_of_their_keyspace_when_they_are_staged(
    tmp_path: Path,
) -> None:
    """One partition's chunk is let in whole; with a row a second, all else waits for long."""
    table = with_limits(max_rows_per_s=1)

    async def use(bench: LoadsBench) -> None:
        many = [(b"%06d" % n, b"") for n in range(5_000)]
        refusals = await bench.stage_chunks({(0, 0): chunk_of(many), (1, 1): chunk_of(ROWS)})
        assert list(refusals) == [1]
        error = refusals[1]
        assert isinstance(error, QuotaExceededError)
        assert (error.unit, error.limit) == ("rows", 1)
        assert error.retry_after_ms > 1_000_000
        assert list(await bench.stage_chunks({(0, 2): chunk_of(ROWS)})) == [0]
        assert set(bench.partition(0).chunks) == {ChunkName(LOAD, 1, 0)}
        assert bench.partition(1).chunks == {}

    with_loads(tmp_path, use, table=table)
