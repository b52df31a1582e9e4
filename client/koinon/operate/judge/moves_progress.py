"""The progress of moves, from the coordinators' answers over time. Pure: time is an argument.

Coordinators do not count finished moves: a move that was there and is gone is done, unless it was
turned back or dropped, which the replicas of its partition show. Receiving nodes report their
bytes; a finished copy counts with its expected size, or if that is unknown, with the bytes
received. The remaining time is that of all moves, including queued ones; while the size of one is
unknown, so is the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from koinon.core.rate_window import RateWindow
from koinon.operate.plans import MovesView, MoveView, Plan, PlannedMove, Stage
from koinon.operate.replicas import PartitionSize

RATE_WINDOW_S = 6.0

Replicas = Mapping[int, tuple[int, ...]]
"""The node numbers of each partition's replicas, by partition."""


@dataclass(kw_only=True, slots=True)
class _Copy:
    """A replica that a move adds."""

    bytes: int = 0
    bytes_total: int = 0  # 0 while ``sized`` is False
    sized: bool = False  # its total size is known
    guessed: bool = False
    done: bool = False


@dataclass(kw_only=True)
class Share:
    """The progress of the copies that one node receives, or of all copies."""

    copies: int = 0
    copies_done: int = 0
    bytes: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The progress of the moves at one moment. ``bytes_per_second`` and ``seconds_left`` are None
    while unknown; ``guessed``: the size of a copy that is not finished may turn out different.
    """

    moves: int
    done: int
    turned_back: int
    running: int
    queued: int
    paused: bool
    whole: Share
    nodes: Mapping[int, Share]
    bytes_per_second: float | None
    seconds_left: float | None
    guessed: bool
    waits_for: Mapping[str, int]

    @property
    def ended(self) -> bool:
        return not self.running and not self.queued


@dataclass
class MovesTracker:
    """Follows moves from view to view. With a ``plan`` only its moves count, else all moves.

    ``sizes`` are the expected sizes of partitions, where known; the caller may add to it.
    """

    plan: Plan | None = None
    sizes: Mapping[int, PartitionSize] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Moves are identified by (plan id, partition id), their copies also by the receiving node.
        self._moves: dict[tuple[str, int], PlannedMove] = {}  # all moves that count
        self._open: set[tuple[str, int]] = set()  # queued or under way at the last view
        self._back: set[tuple[str, int]] = set()  # turned back or dropped
        self._copies: dict[tuple[str, int, int], _Copy] = {}
        self._before = 0  # moves that were done before the first view
        self._plans: dict[str, int] = {}  # the number of moves that each plan began with
        self._received = RateWindow(RATE_WINDOW_S)
        if self.plan is not None:
            for move in self.plan.moves:
                self._begin(self.plan.plan_id, move)

    def update(
        self, view: MovesView, now: float, replicas: Callable[[], Replicas] | None = None
    ) -> Snapshot:
        """Apply the leader's current view of the moves; return their progress.

        ``replicas`` is called once moves are gone, after ``view`` was requested, and returns the
        present replicas; if it raises, the same view may be applied again. Without it a queued move
        that was dropped counts as done.
        """
        ours = [m for m in view.moves if self.plan is None or m.plan_id == self.plan.plan_id]
        self._count_plans(ours)
        now_open = set()
        for move in ours:
            key = move.plan_id, move.move.partition_id
            now_open.add(key)
            if key not in self._moves:
                self._begin(move.plan_id, move.move)
            if move.cancelled:
                self._back.add(key)
            self._note(key, move)
        gone = self._open - now_open
        if gone and replicas is not None:
            self._back.update(self._not_made(gone, view, replicas()))
        for key in gone:
            self._finish(key)
        self._open = now_open
        return self._snapshot(view, ours, now)

    def _not_made(
        self, gone: Iterable[tuple[str, int]], view: MovesView, replicas: Replicas
    ) -> list[tuple[str, int]]:
        """Return moves that did not reach their targets. A later move of the partition has begun
        where the gone one ended.
        """
        later = {
            m.move.partition_id: m.move.target if m.cancelled else m.move.origin for m in view.moves
        }
        held = {**replicas, **later}
        return [key for key in gone if held.get(key[1]) != self._moves[key].target]

    def _count_plans(self, ours: list[MoveView]) -> None:
        """Count the moves of a plan that were done before the first view."""
        if self.plan is not None:
            return
        seen = Counter(move.plan_id for move in ours)
        for move in ours:
            if move.plan_id not in self._plans:
                self._plans[move.plan_id] = move.plan_moves
                self._before += max(0, move.plan_moves - seen[move.plan_id])

    def _begin(self, plan_id: str, move: PlannedMove) -> None:
        key = plan_id, move.partition_id
        self._moves[key] = move
        self._open.add(key)
        size = self.sizes.get(move.partition_id)
        for number in move.added:
            copy = self._copies[(*key, number)] = _Copy()
            if size is not None:
                copy.bytes_total, copy.sized, copy.guessed = size.bytes, True, size.guessed

    def _note(self, key: tuple[str, int], move: MoveView) -> None:
        for said in move.progress:
            copy = self._copies.get((*key, said.node_number))
            if copy is None:
                continue
            copy.bytes_total = max(copy.bytes_total, said.bytes_total, said.bytes)
            copy.bytes = max(copy.bytes, said.bytes)
            copy.sized = copy.sized or said.bytes_total > 0
            if said.stage is Stage.LIVE:
                copy.bytes, copy.sized, copy.guessed = copy.bytes_total, True, False

    def _finish(self, key: tuple[str, int]) -> None:
        for number in self._moves[key].added:
            copy = self._copies[(*key, number)]
            if key not in self._back:
                copy.bytes, copy.done = copy.bytes_total, True

    def _snapshot(self, view: MovesView, ours: list[MoveView], now: float) -> Snapshot:
        whole = Share()
        nodes: dict[int, Share] = {}
        for (_, _, number), copy in self._copies.items():
            for share in (whole, nodes.setdefault(number, Share())):
                share.copies += 1
                share.copies_done += copy.done
                share.bytes += min(copy.bytes, copy.bytes_total)
                share.bytes_total += copy.bytes_total
        rate = self._received.rate(whole.bytes, now)
        running = sum(move.running for move in ours)
        back = len(self._back - self._open)
        to_come = [
            self._copies[(*key, number)] for key in self._open for number in self._moves[key].added
        ]
        left = sum(max(0, copy.bytes_total - copy.bytes) for copy in to_come)
        known = not view.settings.paused and all(copy.sized for copy in to_come)
        return Snapshot(
            moves=len(self._moves) + self._before,
            done=len(self._moves) + self._before - len(self._open) - back,
            turned_back=back,
            running=running,
            queued=len(ours) - running,
            paused=view.settings.paused,
            whole=whole,
            nodes=nodes,
            bytes_per_second=rate,
            seconds_left=left / rate if rate and known else None,
            guessed=any(copy.guessed for copy in to_come),
            waits_for=Counter(move.waits_for for move in ours if move.running and move.waits_for),
        )
