"""The first acts of the demo: loading, reading, a coordinator that is killed and returns.

Each act is one function, which shows a behaviour and checks it.
"""

from __future__ import annotations

import hashlib
import statistics
import time

from demo.load import LeaderWatch, SingleWriter, write_all
from demo.play import RIDE_TIMEOUT_MS, Play, check_all_rows, wait
from koinon.operate.wording import count, duration_text
from koinon_proto.contract.errors import ConditionFailedError

LATENCY_SAMPLES = 500
TTL_MS = 1_500
ELECTION_TIMEOUT_S = 15.0
AFTER_ELECTION_S = 0.5


def load_and_kill_leader(play: Play) -> None:
    """Load all rows; half-way through, kill -9 the coordinators' leader."""
    stage, cluster = play.stage, play.cluster
    stage.act(f"{len(play.rows):,} cities go in, and half-way the coordinators' leader is killed")
    old = cluster.leader() or ""
    stage.check(bool(old), f"{old} leads the coordinators")
    began = time.monotonic()
    killed_at = 0.0
    rows_at_kill = 0
    watch: LeaderWatch | None = None
    with (
        SingleWriter(play.client, b"demo/a/", RIDE_TIMEOUT_MS) as single,
        stage.progress("loading", len(play.rows)) as advance,
    ):

        def on_progress(done: int) -> None:
            nonlocal killed_at, rows_at_kill, watch
            advance(done, f"{done / (time.monotonic() - began):,.0f} rows/s")
            if watch is None and done >= len(play.rows) // 2:
                cluster.kill(old)
                killed_at, rows_at_kill = time.monotonic(), done
                watch = LeaderWatch(cluster.coordinators, old, ELECTION_TIMEOUT_S)
                stage.event(f"kill -9 {old} after {done:,} rows")

        done, errors = write_all(play.client, list(play.rows.items()), on_progress)
        ended = time.monotonic()
        assert watch is not None
        watch.join()
        wait(AFTER_ELECTION_S)
    before = rows_at_kill / (killed_at - began)
    after = (done - rows_at_kill) / max(ended - killed_at, 1e-6)
    stage.say(f"rows/s before the kill {before:,.0f}, after it {after:,.0f}, every one durable")
    play.killed_coordinator = old
    stage.check(
        not errors and done == len(play.rows),
        f"all {done:,} rows acknowledged, {count(len(errors), 'error')}",
    )
    stage.check(
        bool(watch.new_leader),
        f"{watch.new_leader} leads after {duration_text(watch.seconds)}",
    )
    play.acknowledged |= single.acknowledged
    stage.check(
        not single.errors,
        f"{len(single.acknowledged):,} single writes went on beside it: {single.told}, "
        f"the slowest took {duration_text(single.slowest_s)}",
    )


def read_everything(play: Play) -> None:
    """Read every row back, by key and by scan."""
    stage = play.stage
    stage.act("Every row is read back and compared")
    rate = check_all_rows(play)
    stage.check(True, f"{len(play.rows):,} rows by key: all equal ({rate:,.0f} rows/s)")
    began = time.monotonic()
    found = {e.key: e.value for e in play.client.scan(prefix=b"city/", page_rows=5_000)}
    seconds = time.monotonic() - began
    stage.check(
        len(found) == len(play.rows) and _checksum(found) == _checksum(play.rows),
        f"{len(found):,} rows by scan: count and checksum {_checksum(found)[:12]} agree "
        f"({len(found) / seconds:,.0f} rows/s)",
    )


def single_records(play: Play) -> None:
    """Measure single gets; try a conditional write and a record that expires."""
    stage, client = play.stage, play.client
    stage.act("One record at a time")
    times = []
    for key in list(play.rows)[:LATENCY_SAMPLES]:
        began = time.perf_counter()
        client.get(key)
        times.append((time.perf_counter() - began) * 1000)
    p99 = sorted(times)[int(len(times) * 0.99)]
    stage.say(
        f"{count(len(times), 'get')}, one after the other: median "
        f"{statistics.median(times):.2f} ms, 99 % within {p99:.2f} ms"
    )
    first = client.put(b"demo/counter", b"1", if_version=0)
    second = client.put(b"demo/counter", b"2", if_version=first)
    try:
        client.put(b"demo/counter", b"overwritten?", if_version=first)
        refused = False
    except ConditionFailedError as error:
        refused = error.current_version == second
    stage.check(
        refused and client.get(b"demo/counter") == b"2",
        "a write on condition of an old version is refused, and the record stays",
    )
    client.put(b"demo/fleeting", b"soon gone", ttl_ms=TTL_MS)
    there = client.get(b"demo/fleeting") == b"soon gone"
    began = time.monotonic()
    while client.get(b"demo/fleeting") is not None and time.monotonic() - began < 10:
        wait(0.02)
    gone_after = time.monotonic() - began
    stage.check(
        there and client.get(b"demo/fleeting") is None,
        f"a record with ttl {duration_text(TTL_MS / 1000)} was there, "
        f"and gone {duration_text(gone_after)} later",
    )


def coordinator_returns(play: Play) -> None:
    """Start the killed coordinator again, and wait until it has caught up."""
    stage, cluster, name = play.stage, play.cluster, play.killed_coordinator
    stage.act(f"{name} comes back")
    began = time.monotonic()
    cluster.restart(name)
    cluster.wait_for(
        lambda s: s.is_leader and any(c.member_id == name and c.active for c in s.coordinators),
        timeout_s=30,
        what=f"{name} follows again",
    )
    stage.check(
        True,
        f"{name} follows the leader again, {duration_text(time.monotonic() - began)} "
        "after its start",
    )


def _checksum(rows: dict[bytes, bytes]) -> str:
    digest = hashlib.sha256()
    for key in sorted(rows):
        digest.update(key + b"\0" + rows[key] + b"\0")
    return digest.hexdigest()
