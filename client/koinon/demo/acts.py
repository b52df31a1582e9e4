"""The acts of the demo, one function each. Each shows something, and checks what it shows."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from dataclasses import dataclass

from koinon.cli.admin import print_status
from koinon.cli.output import count, duration_text
from koinon.client import Client
from koinon.demo.load import LeaderWatch, SingleWriter, write_all
from koinon.demo.stage import Stage
from koinon.local import LocalCluster
from koinon_proto.errors import ConditionFailedError

READ_BATCH = 5_000
LATENCY_SAMPLES = 500
TTL_MS = 1_500
RIDE_TIMEOUT_MS = 30_000
ELECTION_TIMEOUT_S = 15.0
AFTER_ELECTION_S = 0.5
NODE_DOWN_S = 1.0


@dataclass(kw_only=True)
class Play:
    """What the acts share."""

    stage: Stage
    cluster: LocalCluster
    client: Client
    rows: dict[bytes, bytes]
    killed_coordinator: str = ""


def load_and_kill_leader(play: Play) -> None:
    """Load everything; half-way through, kill -9 the coordinators' leader."""
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
        _wait(AFTER_ELECTION_S)
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
    stage.check(
        not single.errors,
        f"{len(single.acknowledged):,} single writes went on beside it: no error, "
        f"the slowest took {duration_text(single.slowest_s)}",
    )


def read_everything(play: Play) -> None:
    """Read every row back, by key and by scan."""
    stage = play.stage
    stage.act("Every row is read back and compared")
    rate = _check_all_rows(play)
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
    """Single gets, a conditional write, a record that expires."""
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
        _wait(0.02)
    gone_after = time.monotonic() - began
    stage.check(
        there and client.get(b"demo/fleeting") is None,
        f"a record with ttl {duration_text(TTL_MS / 1000)} was there, "
        f"and gone {duration_text(gone_after)} later",
    )


def coordinator_returns(play: Play) -> None:
    """The killed coordinator starts again and catches up."""
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


def node_dies(play: Play) -> None:
    """kill -9 a storage node under writes, read its partitions meanwhile, start it again."""
    stage, cluster, name = play.stage, play.cluster, play.cluster.node_names[1]
    stage.act("A storage node is killed while it is being written to")
    table = play.client.table()
    number = table.by_id[name].number  # type: ignore[index]
    led = sum(row.primary == number for row in table.rows)
    version = table.table_version
    answers: dict[bytes, bytes | None] = {}
    sample = dict(list(play.rows.items())[:1000])

    def read_meanwhile() -> None:
        found = play.client.get_many(list(sample), timeout_ms=RIDE_TIMEOUT_MS)
        answers.update(zip(sample, found, strict=True))

    with SingleWriter(play.client, b"demo/b/", RIDE_TIMEOUT_MS) as single:
        _wait(0.5)
        cluster.kill(name)
        killed_at = time.monotonic()
        stage.event(f"kill -9 {name}, which leads {led} of {len(table.rows):,} partitions")
        reader = threading.Thread(target=read_meanwhile)
        reader.start()
        _wait(NODE_DOWN_S)
        cluster.restart(name)
        reader.join()
        waited = time.monotonic() - killed_at
        status = cluster.wait_ready()
        _wait(0.5)
    stage.say(
        f"{name} was started again after {duration_text(NODE_DOWN_S)}; "
        "with one copy of each partition, its keys wait for it"
    )
    stage.check(
        answers == sample,
        f"reads of its keys were held and retried, and answered {duration_text(waited)} "
        "after the kill",
    )
    unknown = sum(error.maybe_applied for error in single.errors)
    stage.check(
        unknown == len(single.errors) <= 1,
        f"{len(single.acknowledged):,} single writes were acknowledged, "
        f"{unknown} in flight at the kill ended as unknown, 0 failed",
    )
    found = play.client.get_many(list(single.acknowledged))
    stage.check(
        found == list(single.acknowledged.values()), "each acknowledged one of them is there"
    )
    rate = _check_all_rows(play)
    stage.check(True, f"so is each of the {len(play.rows):,} cities ({rate:,.0f} rows/s read back)")
    assert status.table is not None
    stage.check(
        status.table.cluster.cluster_id == table.cluster.cluster_id
        and status.table.table_version > version,
        f"the same cluster, its table went from version {version} to {status.table.table_version}",
    )


def show_state(play: Play) -> None:
    """The cluster as 'koinon admin status' shows it."""
    play.stage.act("The cluster, as 'koinon admin status' shows it")
    play.stage.console.print()
    status = play.cluster.wait_ready()
    print_status(status)
    play.stage.console.print()
    live = status.sessions and all(s.live for s in status.sessions)
    play.stage.check(status.ready and bool(live), "every partition online, every node alive")


def _check_all_rows(play: Play) -> float:
    """Compare every row with its source; return the rows per second."""
    keys = list(play.rows)
    began = time.monotonic()
    with play.stage.progress("reading", len(keys)) as advance:
        for start in range(0, len(keys), READ_BATCH):
            batch = keys[start : start + READ_BATCH]
            values = play.client.get_many(batch, timeout_ms=RIDE_TIMEOUT_MS)
            for key, value in zip(batch, values, strict=True):
                if value != play.rows[key]:
                    play.stage.check(False, f"{key.decode()} reads back as it was written")
            advance(start + len(batch))
    return len(keys) / (time.monotonic() - began)


def _checksum(rows: dict[bytes, bytes]) -> str:
    digest = hashlib.sha256()
    for key in sorted(rows):
        digest.update(key + b"\0" + rows[key] + b"\0")
    return digest.hexdigest()


def _wait(seconds: float) -> None:
    """Let the background of an act go on for a moment."""
    threading.Event().wait(seconds)
