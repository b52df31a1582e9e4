"""The cluster at one moment and the changes since the first poll, as ``koinon top`` shows them.

``Observer`` asks the coordinators for status, moves and loads, and the nodes for their counters.
``Overview`` is pure: it accumulates observations with their times. A server that does not answer is
named; its last known state stays visible.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from koinon.core.closing import Closing
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus, count_by_primary
from koinon.operate.json_form import IF_KNOWN
from koinon.operate.judge.answers import (
    CoordinatorAnswer,
    PartitionCounts,
    coordinators_of,
    partition_counts,
)
from koinon.operate.judge.health import problems, summary
from koinon.operate.judge.heat import HotPartitionAnswer, RatesAnswer, hot_partition, rates_of
from koinon.operate.judge.hotspots import (
    MEASURES,
    Columns,
    FollowerLag,
    HotPartition,
    NodeCounters,
    RankBy,
    Rates,
    behind,
    hottest,
    rates,
)
from koinon.operate.judge.machines import used_share
from koinon.operate.judge.moves_progress import MovesTracker, Snapshot
from koinon.operate.judge.table_changes import node_changes, primaries_taken, primaries_text
from koinon.operate.loads_client import LoadView
from koinon.operate.plans import MovesView
from koinon.operate.traffic import Counters, TrafficClient
from koinon.operate.views import view
from koinon.operate.wording import by_name
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeInfo, NodeStatus, Table

HOT_MAX = 64
EVENTS_MAX = 50
_LOOKS_WITHOUT_MOVES = 4  # while nothing moves, moves are requested only in every so many polls


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The answers of one poll. ``moves`` and ``loads`` are None if there was no answer."""

    at: float  # by a monotonic clock
    unix_s: float
    status: ClusterStatus | None
    failure: str = ""  # why there is no status
    counters: Counters = field(default_factory=Counters)
    moves: MovesView | None = None
    loads: Sequence[LoadView] | None = None


class Observer(Closing):
    """Polls a cluster repeatedly. One thread at a time."""

    def __init__(self, admin: Admin, *, timeout_s: float) -> None:
        """``timeout_s``: the timeout of a node's answer; ``admin`` has its own."""
        self._admin = admin
        self._traffic = TrafficClient()
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="observer")
        self._table: Table | None = None  # of the last status
        self._led = False  # the coordinators that answered last
        self._looks_without = _LOOKS_WITHOUT_MOVES  # polls since moves were requested

    def close(self) -> None:
        self._traffic.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def look(self) -> Observation:
        """Ask all servers; return after the timeouts at the latest."""
        at, unix_s = time.monotonic(), time.time()
        early = self._counters() if self._table is not None else None
        moves = self._moves() if self._led and self._table is not None else None
        status, failure = None, ""
        try:
            status = self._admin.status()
        except KoinonError as error:
            failure = str(error)
        if status is not None and status.table is not None and status.table.bootstrapped:
            self._table = status.table
        loads = None
        self._led = status is not None and status.is_leader
        if not self._led:  # the status may be older than the moves
            moves, self._looks_without = None, _LOOKS_WITHOUT_MOVES
        elif self._table is not None:
            loads = self._loads(self._table)
        counters = early or (self._counters() if self._table is not None else None)
        return Observation(
            at=at,
            unix_s=unix_s,
            status=status,
            failure=failure,
            counters=counters.result() if counters is not None else Counters(),
            moves=moves,
            loads=loads,
        )

    def _counters(self) -> Future[Counters]:
        assert self._table is not None
        return self._threads.submit(self._traffic.counters, self._table, self._timeout_s)

    def _moves(self) -> MovesView | None:
        """Ask for the moves. If there were none, ask only at intervals, since each request costs
        the coordinators a status. Ask before the status, which shows the result of moves that are
        gone.
        """
        assert self._table is not None
        self._looks_without += 1
        moving = any(row.adding or row.removing for row in self._table.rows)
        if not moving and self._looks_without < _LOOKS_WITHOUT_MOVES:
            return None
        try:
            moves = self._admin.moves()
        except KoinonError:
            return None  # the status shows this
        self._looks_without = 0 if not moves.moves else _LOOKS_WITHOUT_MOVES
        return moves

    def _loads(self, table: Table) -> Sequence[LoadView] | None:
        """Ask for the loads if there can be any."""
        if not table.loads:
            return ()
        try:
            return [load for load in self._admin.loads() if not load.state.ended]
        except KoinonError:
            return None


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node as it is now. ``silent`` says why its figures do not count, '' if they do; ``lag``:
    how far its copies are behind their primaries, None if no primary streams to it.
    """

    info: NodeInfo
    primaries: int
    replicas: int
    rates: Columns | None
    used_bytes: int
    used_share: float
    lag: FollowerLag | None
    heard_ms_ago: int | None
    silent: str


@dataclass(frozen=True, kw_only=True)
class View:
    """The cluster at one moment. ``status`` is the last one received, ``failure`` says why there is
    no newer one. Rates are None until the second poll.
    """

    unix_s: float
    ok: bool
    summary: str
    status: ClusterStatus | None
    failure: str
    nodes: Sequence[NodeView]
    rates: Rates | None
    hottest: Sequence[HotPartition]
    moves: Snapshot | None
    loads: Sequence[LoadView]
    leader_changes: int
    primary_changes: int
    events: Sequence[tuple[float, str]]  # Unix time and text, the newest last

    @property
    def table(self) -> Table | None:
        return self.status.table if self.status is not None else None


class Overview:
    """Accumulates observations, in the order of their times."""

    def __init__(self) -> None:
        self._before: Observation | None = None  # the last observation
        self._status: ClusterStatus | None = None  # the last status received
        self._leader = ("", 0)  # id and term of the leader with the greatest term so far
        self._leader_changes = 0
        self._primary_changes = 0
        self._tracker = MovesTracker()
        self._moves: Snapshot | None = None  # None while nothing moves
        self._loads: Sequence[LoadView] = ()
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_MAX)
        self._now = 0.0  # Unix time of the observation that is being added

    def update(self, seen: Observation) -> View:
        """Add an observation; return the cluster's state after it."""
        if seen.status is not None:
            self._note_changes(seen.status, seen.unix_s)
            self._status = seen.status
        if seen.moves is not None:
            self._note_moves(seen.moves, seen.at, seen.status)
        if seen.loads is not None:
            self._loads = seen.loads
        status = self._status
        table = status.table if status is not None else None
        found = self._rates(seen, table)
        self._before = seen
        if seen.status is None:
            ok, line = False, f"Attention: {seen.failure}: start a majority of the coordinators"
        else:
            found_problems = problems(seen.status)
            ok, line = not found_problems, summary(seen.status, found_problems)
        return View(
            unix_s=seen.unix_s,
            ok=ok,
            summary=line,
            status=status,
            failure=seen.failure,
            nodes=_nodes(status, seen.counters, found) if status is not None else (),
            rates=found,
            hottest=hottest(found, RankBy.ALL, HOT_MAX) if found is not None else (),
            moves=self._moves,
            loads=self._loads,
            leader_changes=self._leader_changes,
            primary_changes=self._primary_changes,
            events=tuple(self._events),
        )

    def _rates(self, seen: Observation, table: Table | None) -> Rates | None:
        before = self._before
        if before is None or table is None:
            return None
        count = len(table.rows)
        return rates(
            _of_width(before.counters.nodes, count),
            _of_width(seen.counters.nodes, count),
            partitions=count,
            seconds=seen.at - before.at,
        )

    def _note_moves(self, moves: MovesView, at: float, status: ClusterStatus | None) -> None:
        if not moves.moves and (self._moves is None or self._moves.ended):
            self._tracker, self._moves = MovesTracker(), None  # later moves are counted from zero
            return
        table = status.table if status is not None else None
        if table is None:
            return
        held = {int(row.partition_id): row.replicas for row in table.rows}
        self._moves = self._tracker.update(moves, at, lambda: held)
        if self._moves.ended:
            done, back = self._moves.done, self._moves.turned_back
            text = f"{done:,} move{'' if done == 1 else 's'} done"
            self._note(text + (f", {back:,} turned back or dropped" if back else ""))

    def _note_changes(self, now: ClusterStatus, unix_s: float) -> None:
        self._now = unix_s
        if now.leader_id:
            leader = (now.leader_id, now.term)
            if self._leader[0] and now.term > self._leader[1]:
                self._leader_changes += 1
                self._note(f"{now.leader_id} leads the coordinators, in term {now.term}")
            self._leader = max(self._leader, leader, key=lambda known: known[1])
        before = self._status.table if self._status is not None else None
        if before is None or now.table is None or now.table is before:
            return
        if now.table.table_version < before.table_version:
            return
        for text in node_changes(before, now.table):
            self._note(text)
        if taken := primaries_taken(before, now.table):
            self._primary_changes += sum(taken.values())
            self._note(primaries_text(taken, now.table))

    def _note(self, text: str) -> None:
        self._events.append((self._now, text))


def _of_width(nodes: Mapping[int, NodeCounters], partitions: int) -> dict[int, NodeCounters]:
    """Return the counters with this number of partitions. A cluster's number never changes, but
    another cluster may have started at the same addresses.
    """
    return {n: c for n, c in nodes.items() if c.counts.shape == (MEASURES, partitions)}


def _nodes(status: ClusterStatus, counters: Counters, found: Rates | None) -> list[NodeView]:
    table = status.table
    if table is None:
        return []
    primaries = count_by_primary(table)
    replicas = Counter(number for row in table.rows for number in row.replicas)
    lags = behind(counters.nodes)
    views = []
    for info in by_name(table.nodes.values()):
        number = info.number
        if info.status is NodeStatus.LEFT:
            continue
        session = status.session_of(number)
        live = session is not None and session.live
        views.append(
            NodeView(
                info=info,
                primaries=primaries[number],
                replicas=replicas[number],
                rates=found.nodes.get(number) if found is not None else None,
                used_bytes=session.used_bytes if session is not None and live else 0,
                used_share=used_share(session) if session is not None and live else 0.0,
                lag=lags.get(number),
                heard_ms_ago=session.heard_ms_ago if session is not None and live else None,
                silent=counters.silent.get(number, ""),
            )
        )
    return views


def total(nodes: Sequence[NodeView]) -> Columns:
    """Return the sum of all nodes' rates."""
    whole: Columns = sum(
        (node.rates for node in nodes if node.rates is not None), start=np.zeros(MEASURES)
    )
    return whole


# --- the answer ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TopNode:
    """One node at a moment; the rates are left out before the second poll."""

    id: str
    status: NodeStatus
    primaries: int
    replicas: int
    reads_per_second: float | None = field(default=None, metadata=IF_KNOWN)
    writes_per_second: float | None = field(default=None, metadata=IF_KNOWN)
    read_bytes_per_second: int | None = field(default=None, metadata=IF_KNOWN)
    written_bytes_per_second: int | None = field(default=None, metadata=IF_KNOWN)
    used_bytes: int
    used_share: float
    lag_records: int | None
    lag_ms: int | None
    heard_ms_ago: int | None
    silent: str | None


@dataclass(frozen=True, kw_only=True)
class TopMoves:
    """The progress of the moves at a moment."""

    running: int
    queued: int
    done: int
    turned_back: int
    paused: bool
    bytes: int
    bytes_total: int
    bytes_per_second: int | None
    seconds_left: float | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change between two polls."""

    at_ms: int
    what: str


@dataclass(frozen=True, kw_only=True)
class TopAnswer:
    """The cluster at a moment."""

    at_ms: int
    ok: bool
    summary: str
    total: RatesAnswer
    partitions: PartitionCounts
    nodes: list[TopNode]
    coordinators: list[CoordinatorAnswer]
    leader_id: str | None
    term: int
    leader_changes_seen: int
    primary_changes_seen: int
    moves: TopMoves | None
    loads: Sequence[LoadView]
    hottest: list[HotPartitionAnswer]
    events: list[Event]


def top_answer(seen: View, *, hottest_max: int, events_max: int) -> TopAnswer:
    """Return a view for programs."""
    status, table, moves = seen.status, seen.table, seen.moves
    return TopAnswer(
        at_ms=int(seen.unix_s * 1000),
        ok=seen.ok,
        summary=seen.summary,
        total=rates_of(total(seen.nodes)),
        partitions=partition_counts(table),
        nodes=[_top_node(node) for node in seen.nodes],
        coordinators=coordinators_of(status) if status is not None else [],
        leader_id=status.leader_id or None if status is not None and not seen.failure else None,
        term=status.term if status is not None else 0,
        leader_changes_seen=seen.leader_changes,
        primary_changes_seen=seen.primary_changes,
        moves=_top_moves(moves) if moves is not None else None,
        loads=seen.loads,
        hottest=[hot_partition(one, table) for one in seen.hottest[:hottest_max] if table],
        events=[Event(at_ms=int(at * 1000), what=what) for at, what in seen.events[-events_max:]],
    )


def _top_node(node: NodeView) -> TopNode:
    return view(
        TopNode,
        node,
        id=node.info.node_id,
        status=node.info.status,
        used_share=round(node.used_share, 4),
        lag_records=node.lag.records if node.lag else None,
        lag_ms=round(node.lag.oldest_s * 1000) if node.lag else None,
        silent=node.silent or None,
        **(dict.fromkeys(RATES) if node.rates is None else asdict(rates_of(node.rates))),
    )


RATES = tuple(rate.name for rate in fields(RatesAnswer))


def _top_moves(moves: Snapshot) -> TopMoves:
    rate, left = moves.bytes_per_second, moves.seconds_left
    return view(
        TopMoves,
        moves,
        bytes=moves.whole.bytes,
        bytes_total=moves.whole.bytes_total,
        bytes_per_second=None if rate is None else round(rate),
        seconds_left=None if left is None else round(left, 1),
    )
