"""The acts of the demo about copies: a node is killed and returns, one joins, one leaves."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterable

import koinon.aio
from demo.load import SingleWriter
from demo.play import RIDE_TIMEOUT_MS, Play, check_acknowledged, check_all_rows, wait
from koinon.cli.console.reply import show
from koinon.cli.operate.status import status_blocks
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus, count_by_primary
from koinon.operate.judge.answers import status_answer
from koinon.operate.judge.health import is_short
from koinon.operate.judge.moves_progress import MovesTracker, Snapshot
from koinon.operate.plans import PlanKind, PlanRequest
from koinon.operate.replicas import Replicas
from koinon.operate.verify import Verdict, verify
from koinon.operate.wording import bytes_text, count, duration_text
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeStatus, Table
from koinon_proto.partitioner import partitioner

ADMIN_TIMEOUT_MS = 30_000
FAILOVER_S_MAX = 10.0
CATCH_UP_S = 60.0
MOVES_S = 120.0
POLL_S = 0.1


def node_dies(play: Play) -> None:
    """kill -9 a storage node under writes; other nodes serve its partitions, then it returns."""
    stage, cluster, name = play.stage, play.cluster, play.cluster.node_names[1]
    stage.act("A storage node is killed while it is being written to")
    table = play.client.table()
    number = table.by_id[name].number  # type: ignore[index]
    led = {row.partition_id for row in table.rows if row.primary == number}
    sample = dict(list(play.rows.items())[:1000])
    with SingleWriter(play.client, b"demo/b/", RIDE_TIMEOUT_MS) as single:
        wait(0.3)
        probe = Probe(cluster.coordinators, table)
        cluster.kill(name)
        probe.start()
        stage.event(f"kill -9 {name}, which leads {len(led)} of {len(table.rows):,} partitions")
        found = play.client.get_many(list(sample), timeout_ms=RIDE_TIMEOUT_MS)
        read_s = time.monotonic() - probe.began
        probe.join()
        wait(0.3)
    play.acknowledged |= single.acknowledged | probe.acknowledged
    stage.check(
        found == list(sample.values()),
        f"1,000 cities were read meanwhile: all there, {duration_text(read_s)} after the kill",
    )
    taken_over = [probe.seconds[p] for p in led]
    others = [probe.seconds[p] for p in probe.seconds if p not in led]
    stage.check(
        not probe.errors and max(taken_over) < FAILOVER_S_MAX,
        f"its {len(led)} partitions took writes again {duration_text(min(taken_over))} to "
        f"{duration_text(max(taken_over))} after the kill, half of them within "
        f"{duration_text(statistics.median(taken_over))}; "
        f"the others' slowest write took {duration_text(max(others))}",
    )
    unknown = sum(error.maybe_applied for error in single.errors)
    stage.check(
        unknown == len(single.errors) <= 1,
        f"{len(single.acknowledged):,} single writes were acknowledged, "
        f"{unknown} in flight at the kill ended as unknown, 0 failed",
    )
    check_acknowledged(play)
    rate = check_all_rows(play)
    stage.check(
        True,
        f"every one of them is there, and each of the {len(play.rows):,} cities "
        f"({rate:,.0f} rows/s from two nodes)",
    )


def node_returns(play: Play) -> None:
    """Start the killed node again; it copies the missed writes from the others."""
    stage, cluster, name = play.stage, play.cluster, play.cluster.node_names[1]
    stage.act(f"{name} comes back, and catches up with what it missed")
    began = time.monotonic()
    with SingleWriter(play.client, b"demo/c/", RIDE_TIMEOUT_MS) as single:
        cluster.restart(name)
        cluster.wait_for(all_in_sync, timeout_s=CATCH_UP_S, what="every copy is in sync")
        seconds = time.monotonic() - began
    play.acknowledged |= single.acknowledged
    stage.check(
        not single.errors,
        f"all its copies are in sync again {duration_text(seconds)} after its start; "
        f"{len(single.acknowledged):,} writes went on beside it, {single.told}",
    )
    with Admin(cluster.coordinators, timeout_ms=ADMIN_TIMEOUT_MS) as admin:
        wanted = admin.restore_primaries()
        cluster.wait_for(_preferred_lead, timeout_s=CATCH_UP_S, what="preferred primaries lead")
    stage.check(True, f"{count(wanted, 'partition')} handed back to their preferred primaries")


def node_joins(play: Play) -> None:
    """Add a fourth node, and move its share to it by a rebalance, under writes."""
    stage, cluster = play.stage, play.cluster
    stage.act("A fourth node joins, and takes its share while writes go on")
    name = cluster.add_node()
    status = cluster.wait_ready()
    table = status.table
    assert table is not None
    number = table.by_id[name].number  # type: ignore[index]
    stage.check(
        not any(number in row.replicas for row in table.rows), f"{name} is there, and holds nothing"
    )
    snapshot, seconds = _carry_out(play, PlanRequest(kind=PlanKind.REBALANCE), b"demo/d/")
    table = cluster.status().table
    assert table is not None
    held = sum(number in row.replicas for row in table.rows)
    stage.check(
        snapshot.done == snapshot.moves and held > 0,
        f"{count(snapshot.done, 'move')} in {duration_text(seconds)}: {name} holds {held} replicas "
        f"and leads {count_by_primary(table)[number]} partitions",
    )


def node_leaves(play: Play) -> None:
    """Drain a node and remove it."""
    stage, cluster, name = play.stage, play.cluster, play.cluster.node_names[0]
    stage.act(f"{name} is drained, and leaves")
    request = PlanRequest(kind=PlanKind.DRAIN, node_id=name)
    snapshot, seconds = _carry_out(play, request, b"demo/e/")
    stage.check(
        snapshot.done == snapshot.moves,
        f"{name} is empty after {count(snapshot.done, 'move')}, {duration_text(seconds)}",
    )
    with Admin(cluster.coordinators, timeout_ms=ADMIN_TIMEOUT_MS) as admin:
        admin.set_node_status(name, NodeStatus.LEFT)
    cluster.remove_node(name)
    nodes = {n.node_id for n in play.client.table().nodes.values()}
    stage.check(name in nodes, f"{name} has left the cluster, and its process is stopped")


def everything_is_there(play: Play) -> None:
    """Compare all copies, and read back every acknowledged write."""
    stage, cluster = play.stage, play.cluster
    stage.act("Every copy is compared with its primary, and every acknowledged write read back")
    began = time.monotonic()

    def table_now() -> Table:
        table = cluster.status().table
        assert table is not None
        return table

    with Replicas() as replicas, stage.progress("comparing", len(table_now().rows)) as advance:
        partition_ids = range(len(table_now().rows))
        report = verify(table_now, replicas, partition_ids, on_progress=advance, pause=_pause)
    same = report.of(Verdict.IDENTICAL)
    copies = sum(len(found.copies) for found in same)
    unlike = [found.reasons for found in report.partitions.values() if found not in same]
    stage.check(
        len(same) == len(partition_ids),
        f"{len(same):,} partitions, {copies:,} copies: identical, record by record "
        f"({duration_text(time.monotonic() - began)}) {unlike[:3] or ''}".rstrip(),
    )
    check_acknowledged(play)
    rate = check_all_rows(play)
    stage.check(
        True,
        f"all {len(play.acknowledged):,} acknowledged single writes are there, and all "
        f"{len(play.rows):,} cities ({rate:,.0f} rows/s)",
    )


def show_state(play: Play) -> None:
    """Print the cluster as 'koinon admin status' shows it."""
    play.stage.act("The cluster, as 'koinon admin status' shows it")
    play.stage.console.print()
    status = play.cluster.wait_ready()
    show(*status_blocks(status, status_answer(status)))
    play.stage.console.print()
    play.stage.check(status.ready, "every partition online")


# --- helpers -------------------------------------------------------------------------------------


def _carry_out(play: Play, request: PlanRequest, prefix: bytes) -> tuple[Snapshot, float]:
    """Make a plan, execute it and follow its moves, while single writes go on."""
    stage, cluster = play.stage, play.cluster
    with Admin(cluster.coordinators, timeout_ms=ADMIN_TIMEOUT_MS) as admin, Replicas() as replicas:
        plan = admin.plan(request)
        sizes = replicas.sizes(admin.status(), [move.partition_id for move in plan.moves])
        total = sum(len(m.added) * sizes[m.partition_id].bytes for m in plan.moves)
        stage.say(f"The plan: {count(len(plan.moves), 'move')}, {bytes_text(total)} to copy.")
        began = time.monotonic()
        with SingleWriter(play.client, prefix, RIDE_TIMEOUT_MS) as single:
            admin.execute(request, plan.plan_id)
            if request.kind is PlanKind.DRAIN:
                admin.set_node_status(request.node_id, NodeStatus.DRAINING)
            tracker = MovesTracker(plan=plan, sizes=sizes)
            with stage.progress("moving", len(plan.moves)) as advance:
                while True:
                    snapshot = tracker.update(admin.moves(), time.monotonic())
                    copied = bytes_text(snapshot.whole.bytes)
                    if snapshot.bytes_per_second is not None:
                        copied += f", {bytes_text(snapshot.bytes_per_second)}/s"
                    advance(snapshot.done, copied)
                    if snapshot.ended or time.monotonic() - began > MOVES_S:
                        break
                    wait(POLL_S)
            seconds = time.monotonic() - began
    play.acknowledged |= single.acknowledged
    stage.check(
        not single.errors,
        f"{len(single.acknowledged):,} single writes went on meanwhile: {single.told}, "
        f"the slowest took {duration_text(single.slowest_s)}",
    )
    return snapshot, seconds


def all_in_sync(status: ClusterStatus) -> bool:
    return status.ready and status.table is not None and not any(map(is_short, status.table.rows))


def _preferred_lead(status: ClusterStatus) -> bool:
    return status.ready and all(
        row.primary == row.replicas[0] for row in (status.table.rows if status.table else ())
    )


def _pause() -> None:
    wait(0.1)


class Probe:
    """Writes one record to each partition, concurrently, and records the duration of each."""

    def __init__(self, coordinators: str, table: Table) -> None:
        self.began = 0.0
        self.seconds: dict[int, float] = {}
        self.acknowledged: dict[bytes, bytes] = {}
        self.errors: list[KoinonError] = []
        self._keys = _one_key_each(table)
        self._coordinators = coordinators
        self._connected = threading.Event()
        self._go = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="probe")
        self._thread.start()
        self._connected.wait()

    def start(self) -> None:
        self.began = time.monotonic()
        self._go.set()

    def join(self) -> None:
        self._thread.join()

    async def _run(self) -> None:
        try:
            async with await koinon.aio.connect(
                self._coordinators, timeout_ms=RIDE_TIMEOUT_MS, retry_unknown=True
            ) as client:
                await client.get_many(self._keys.values())
                self._connected.set()
                await asyncio.to_thread(self._go.wait)
                await asyncio.gather(*(self._put(client, p, key) for p, key in self._keys.items()))
        finally:
            self._connected.set()

    async def _put(self, client: koinon.AsyncClient, partition_id: int, key: bytes) -> None:
        value = b"written to partition %d" % partition_id
        try:
            await client.put(key, value)
        except KoinonError as error:
            self.errors.append(error)
            return
        self.seconds[partition_id] = time.monotonic() - self.began
        self.acknowledged[key] = value


def _one_key_each(table: Table) -> dict[int, bytes]:
    """Return a key of each partition."""
    chosen = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    found: dict[int, bytes] = {}
    for key in _keys():
        found.setdefault(chosen.partition_of(key), key)
        if len(found) == table.cluster.partition_count:
            break
    return found


def _keys() -> Iterable[bytes]:
    number = 0
    while True:
        number += 1
        yield b"demo/probe/%d" % number
