"""Jobs that load in bulk: some commit, some abort, some are gone; and what must come of each.

A loader has keys of its own, under its prefix, and runs one load after another. What those keys
hold follows from the loads that were committed, in their order, and from nothing else: ``model``.
Keys that all loaders write have what the load that was committed last has left: ``common``. Now
and then a load also writes keys that clients use; that is part of their history, as a write
whose fate is unknown until the load is known to be aborted.

A chunk is sent again, to whoever leads its partition by then, until it is staged, and now and then
carried out twice. What has been staged is there when it is looked for, or the seed fails.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from koinon_coordinator.core.cluster.commands import CommitLoad
from koinon_coordinator.core.decide.load_requests import LoadWish
from koinon_node.bulk_load.stager import Prepared, StageBatch
from koinon_proto.contract import columns
from koinon_proto.contract.bulk_loads import LoadMode, LoadState
from koinon_proto.contract.cluster_errors import (
    LoadClosedError,
    LoadIncompleteError,
    NotLeaderError,
)
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import PartitionId, Table, apply_update
from koinon_proto.partitioner import partitioner
from tests.checkers.history import History, Kind
from tests.simulation.loop import Process
from tests.simulation.network import Network

CALL_TIMEOUT_S = 2.0
PATIENCE_S = 8.0  # with one step of a load; then the job is given up
TIMEOUT_MS = 10_000
KEYS = 40
COMMON_KEYS = [b"common %d" % n for n in range(8)]
CHUNK_ROWS_MAX = 5
POLL_S = 0.1

Row = tuple[bytes, bytes, int]  # key, value (b"": the row deletes its key), order
_DELETES_EVERY = 6  # of the orders, so that no row draws more than it did


class GivenUpError(Exception):
    """A step did not come about in time."""


class Loader:
    """One job after another, each over a table that may be old."""

    def __init__(
        self,
        name: str,
        process: Process,
        network: Network,
        coordinators: Sequence[str],
        history: History,
        shared_keys: Sequence[bytes],
        rng: random.Random,
        stats: Counter[str],
        fail: Callable[[str], None],
    ) -> None:
        self.name = name
        self._network = network
        self._coordinators = list(coordinators)
        self._history = history
        self._shared_keys = shared_keys
        self._rng = rng
        self._stats = stats
        self._fail = fail
        self._table: Table | None = None
        self._leader = coordinators[0]
        self._jobs = 0
        self.prefix = f"{name}/".encode()
        self._keys = [self.prefix + b"%02d" % n for n in range(KEYS)]
        self.model: dict[bytes, bytes] = {}
        self.common: list[tuple[int, dict[bytes, bytes]]] = []  # (committed at, rows)
        self.process = process
        self.stopping = self.busy = False

    async def run(self, pause_s: float) -> None:
        """Go on until told to stop."""
        while not self.stopping:
            self.busy = False
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            if not self.stopping:
                self.busy = True
                await self._job()
        self.busy = False

    async def _job(self) -> None:
        rng = self._rng
        self._jobs += 1
        wish = LoadWish(
            job_id=f"{self.name} {self._jobs}",
            mode=int(rng.choice([LoadMode.APPEND, LoadMode.APPEND, LoadMode.OVERWRITE])),
            prefix=b"",
            timeout_ms=TIMEOUT_MS,
        )
        overwrite = wish.mode == LoadMode.OVERWRITE
        if overwrite:
            wish = LoadWish(
                job_id=wish.job_id, mode=wish.mode, prefix=self.prefix, timeout_ms=TIMEOUT_MS
            )
        try:
            opened = await self._ask("open", wish, "")
        except GivenUpError:
            return  # it may be open: then it is aborted in time
        load_id = opened.load_id
        tasks = [self._rows(overwrite) for _ in range(rng.randrange(0 if overwrite else 1, 4))]
        attempts = [rng.getrandbits(62) + 1 for _ in tasks]
        shared: list[int] = []
        try:
            rows_of: Counter[int] = Counter()
            for rows, attempt in zip(tasks, attempts, strict=True):
                if rng.random() < 0.3:  # one that fails, or is slower than its twin
                    await self._stage(load_id, rng.getrandbits(62) + 1, rows, rng.random())
                rows_of += await self._stage(load_id, attempt, rows)
                await self._ask("touch", load_id, "")
            await self._prepare(load_id, attempts, rows_of)
            fate = rng.random()
            if fate < 0.15:
                await self._ask("abort", load_id, "a whim", "")
            elif fate < 0.2:
                self._stats["loads left alone"] += 1
            else:
                shared = self._invoke(tasks)
                command = CommitLoad(
                    load_id=load_id,
                    attempts=tuple(attempts),
                    partition_ids=tuple(PartitionId(p) for p in sorted(rows_of)),
                )
                await self._ask("commit", command, "")
        except GivenUpError:
            self._stats["loads given up"] += 1
        except LoadClosedError:
            self._stats["loads closed meanwhile"] += 1
        await self._ended(load_id, tasks, overwrite, shared)

    def _rows(self, overwrite: bool) -> list[Row]:
        """Return a task's rows. The orders of one load's rows are distinct."""
        rng = self._rng
        chosen = rng.sample(self._keys, rng.randrange(1, KEYS // 2))
        if not overwrite:
            chosen += rng.sample(COMMON_KEYS, rng.randrange(len(COMMON_KEYS)))
            if rng.random() < 0.3:
                chosen.append(rng.choice(self._shared_keys))
        rows = [(key, self._value(), rng.getrandbits(60)) for key in sorted(chosen)]
        return [
            (key, value if order % _DELETES_EVERY or key in self._shared_keys else b"", order)
            for key, value, order in rows
        ]

    def _value(self) -> bytes:
        self._stats["rows of loads"] += 1
        return f"{self.name}.{self._jobs}.{self._stats['rows of loads']}".encode()

    def _invoke(self, tasks: Sequence[list[Row]]) -> list[int]:
        """Note the writes of clients' keys; only the winner of each key can ever be seen."""
        winners = _winners(tasks)
        return [
            self._history.invoke(f"{self.name} {key!r}", Kind.PUT, key, value)
            for key, value in winners.items()
            if key in self._shared_keys
        ]

    async def _ended(
        self, load_id: int, tasks: Sequence[list[Row]], overwrite: bool, shared: Sequence[int]
    ) -> None:
        """Wait until the load has ended, and take what has come of it."""
        while True:
            try:
                (view,) = await self._ask("views", load_id, "")
            except GivenUpError:
                continue
            if view.load.state.ended:
                break
            await asyncio.sleep(POLL_S)
        done = view.load.state is LoadState.DONE
        self._stats["loads done" if done else "loads aborted"] += 1
        for number in shared:
            if done:
                self._history.unknown(number)
            else:
                self._history.failed(number)
        if done:
            if overwrite:
                self.model.clear()
            rows = _winners(tasks)
            own = {key: value for key, value in rows.items() if key.startswith(self.prefix)}
            apply_rows(self.model, own)
            common = {key: value for key, value in rows.items() if key in COMMON_KEYS}
            self.common.append((view.load.committed_at, common))

    # --- calls -------------------------------------------------------------------------------

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Ask the coordinators' leader until it answers."""
        deadline = self._now() + PATIENCE_S
        while self._now() < deadline:
            try:
                return await self._network.call(
                    self.name,
                    self._leader,
                    "loads",
                    method,
                    *arguments,
                    timeout_s=CALL_TIMEOUT_S,
                    may_double=True,
                )
            except LoadClosedError:
                raise
            except NotLeaderError as error:
                self._leader = error.leader_address or self._rng.choice(self._coordinators)
            except KoinonError as error:
                self._stats[f"loads: {method}: {type(error).__name__}"] += 1
                self._leader = self._rng.choice(self._coordinators)
            await asyncio.sleep(self._rng.uniform(0.01, 0.1))
        raise GivenUpError

    async def _refresh(self) -> None:
        version = self._table.table_version if self._table is not None else 0
        try:
            update = await self._network.call(
                self.name, self._rng.choice(self._coordinators), "table", version, timeout_s=0.5
            )
        except KoinonError:
            return
        if update is not None:
            self._table = apply_update(self._table, update)

    async def _stage(
        self, load_id: int, attempt: int, rows: list[Row], part: float = 1.0
    ) -> Counter[int]:
        """Stage the rows (or about that part of them); return how many there are by partition."""
        while self._table is None:
            await self._refresh()
        cluster = self._table.cluster
        known = partitioner(cluster.partitioner, cluster.partition_count)
        by_partition: defaultdict[int, list[Row]] = defaultdict(list)
        for row in rows:
            by_partition[known.partition_of(row[0])].append(row)
        number = 0
        for p, mine in by_partition.items():
            at = 0
            while at < len(mine) and self._rng.random() <= part:
                size = self._rng.randint(1, CHUNK_ROWS_MAX)
                await self._send(load_id, attempt, p, number, mine[at : at + size])
                at, number = at + size, number + 1
        return Counter({p: len(mine) for p, mine in by_partition.items()})

    async def _send(
        self, load_id: int, attempt: int, partition_id: int, number: int, rows: list[Row]
    ) -> None:
        chunk = columns.pack(
            np.array([len(key) for key, _, _ in rows], np.uint32),
            b"".join(key for key, _, _ in rows),
            np.array([len(value) for _, value, _ in rows], np.uint32),
            b"".join(value for _, value, _ in rows),
            orders=np.array([order for _, _, order in rows], np.uint64),
            expiries=_expiries(rows),
        )

        def request(table: Table) -> StageBatch:
            return StageBatch(
                table_version=table.table_version,
                load_id=load_id,
                attempt=attempt,
                partition_ids=np.array([partition_id], np.uint32),
                numbers=[number],
                chunks=[chunk],
                gathered=columns.gather([chunk]),
            )

        await self._at_primary(partition_id, "stage", lambda table: (request(table),), bool)

    async def _prepare(self, load_id: int, attempts: Sequence[int], rows_of: Counter[int]) -> None:
        for p, rows in rows_of.items():

            def request(
                table: Table, p: int = p, rows: int = rows
            ) -> tuple[int, frozenset[int], dict[int, int], int]:
                return load_id, frozenset(attempts), {p: rows}, table.table_version

            def refused(prepared: Prepared) -> bool:
                for error in prepared.refusals.values():
                    if isinstance(error, LoadIncompleteError):
                        self._fail(f"{self.name}: what was staged is not there: {error}")
                return bool(prepared.refusals)

            await self._at_primary(p, "prepare", request, refused)

    async def _at_primary(
        self,
        partition_id: int,
        service: str,
        request: Callable[[Table], tuple[Any, ...]],
        refused: Callable[[Any], bool],
    ) -> None:
        """Call the partition's primary until it has not refused."""
        deadline = self._now() + PATIENCE_S
        while self._now() < deadline:
            assert self._table is not None
            primary = self._table.primary_of(partition_id)
            if primary is not None:
                try:
                    answer = await self._network.call(
                        self.name,
                        primary.node_id,
                        service,
                        *request(self._table),
                        timeout_s=CALL_TIMEOUT_S,
                        may_double=True,
                    )
                    if not refused(answer):
                        return
                except LoadClosedError:
                    raise
                except KoinonError as error:
                    self._stats[f"{service}: {type(error).__name__}"] += 1
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            await self._refresh()
        raise GivenUpError

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _expiries(rows: Sequence[Row]) -> columns.U64Array | None:
    if all(value for _, value, _ in rows):
        return None
    return np.array([0 if value else columns.DELETED for _, value, _ in rows], np.uint64)


def apply_rows(model: dict[bytes, bytes], rows: dict[bytes, bytes]) -> None:
    """Have the model hold what a load's rows leave."""
    for key, value in rows.items():
        if value:
            model[key] = value
        else:
            model.pop(key, None)


def _winners(tasks: Sequence[list[Row]]) -> dict[bytes, bytes]:
    """Return the value that stays of each key: the one with the greatest order."""
    best: dict[bytes, tuple[int, bytes]] = {}
    for key, value, order in (row for rows in tasks for row in rows):
        if key not in best or order > best[key][0]:
            best[key] = (order, value)
    return {key: value for key, (_, value) in best.items()}
