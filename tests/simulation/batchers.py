"""Clients that commit atomic batches, and look whether anything ever shows a part of one.

Each batch writes one value into all keys of a group, which lie in one partition; no other client
writes these. So a read of a whole group finds one value and one version.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from koinon_node.core.writes.atomic_batch import Check, Step
from koinon_node.core.writes.updates import Put, Remove
from koinon_node.partition.batches import AtomicAnswer, AtomicBatch, ReadAnswer
from koinon_node.ports import PeerLostError
from koinon_node.state import partitioner_of
from koinon_proto.contract.errors import CheckFailedError, KoinonError
from koinon_proto.contract.keyspaces import DEFAULT, Keyspace
from koinon_proto.contract.table import Table, apply_update
from tests.checkers.history import History, Kind
from tests.simulation.clients import history_key
from tests.simulation.loop import Process
from tests.simulation.network import NOT_SENT, Network

CALL_TIMEOUT_S = 2.0
GROUPS, GROUP_KEYS = 3, 12
PREFIX = b"batch "
VALUE_BYTES = 400


class _Place(NamedTuple):
    """The place of a group of keys."""

    keyspace: Keyspace
    partition_id: int
    keys: list[bytes]
    address: str  # of the primary


class Batcher:
    """One caller: one thing at a time, over a table that may be old."""

    def __init__(
        self,
        name: str,
        process: Process,
        network: Network,
        coordinators: Sequence[str],
        history: History,
        rng: random.Random,
        stats: Counter[str],
        violated: Callable[[str], None],
        keyspace: str = DEFAULT,
    ) -> None:
        self._name = name
        self.keyspace = keyspace
        self._network = network
        self._coordinators = coordinators
        self._history = history
        self._rng = rng
        self._stats = stats
        self._violated = violated
        self._table: Table | None = None
        self._versions: dict[bytes, int] = {}  # by a group's first key, as the history has it
        self._written = 0
        self._stale = True
        self.process = process
        self.stopping = self.busy = False

    async def run(self, pause_s: float) -> None:
        """Go on until told to stop."""
        while not self.stopping:
            self.busy = False
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            self.busy = True
            if self._stale:
                await self._refresh()
            if self._table is not None:
                group = self._rng.randrange(GROUPS)
                if self._rng.random() < 0.5:
                    await self.look(group)
                else:
                    await self._commit(group)
        self.busy = False

    async def read_all(self) -> bool:
        """Look at all groups; return whether each was answered."""
        self._stale = True
        await self._refresh()
        return self._table is not None and all([await self.look(g) for g in range(GROUPS)])

    async def _refresh(self) -> None:
        version = self._table.table_version if self._table is not None else 0
        coordinator = self._rng.choice(self._coordinators)
        try:
            update = await self._network.call(
                self._name, coordinator, "table", version, timeout_s=0.5
            )
        except KoinonError:
            return
        if update is not None:
            self._table = apply_update(self._table, update)
        self._stale = False

    def _place(self, group: int) -> _Place | None:
        """Return where the group lies; None: the table knows of no primary, or of no keyspace."""
        assert self._table is not None
        keyspace = self._table.keyspaces.get(self.keyspace)
        if keyspace is None:
            self._stale = True
            return None
        known = partitioner_of(keyspace)
        wanted = known.partition_of(PREFIX + b"%d" % group)
        keys: list[bytes] = []
        number = 0
        while len(keys) < GROUP_KEYS:
            key = PREFIX + b"%d.%d" % (group, number)
            if known.partition_of(key) == wanted:
                keys.append(key)
            number += 1
        primary = self._table.primary_of(wanted)
        if primary is None:
            self._stale = True
            return None
        return _Place(keyspace, wanted, keys, primary.node_id)

    async def look(self, group: int) -> bool:
        """Read the group at once; all of it belongs to one batch."""
        place = self._place(group)
        if place is None:
            return False
        keyspace, partition_id, keys, address = place
        assert self._table is not None
        noted = history_key(keyspace, keys[0])
        self._rng.shuffle(keys)
        numbers = [
            self._history.invoke(self._name, Kind.GET, history_key(keyspace, key)) for key in keys
        ]
        ids = np.full(len(keys), partition_id, np.uint32)
        version = self._table.table_version
        try:
            answer: ReadAnswer = await self._network.call(
                self._name,
                address,
                "read",
                keys,
                ids,
                version,
                keyspace.keyspace_id,
                timeout_s=CALL_TIMEOUT_S,
            )
        except KoinonError:
            answer = ReadAnswer(refusals={partition_id: KoinonError()})
        if answer.refusals:
            self._stale = True
            for number in numbers:
                self._history.failed(number)
            return False
        found = [
            (0, None) if row in answer.missing else (answer.versions[row], answer.values[row])
            for row in range(len(keys))
        ]
        for number, (version, value) in zip(numbers, found, strict=True):
            self._history.ok(number, version=version, value=value)
        self._stats["batches read"] += 1
        if len(set(found)) != 1:
            self._violated(f"half of a batch: {dict(zip(keys, found, strict=True))}")
        self._versions[noted] = found[0][0]
        return True

    async def _commit(self, group: int) -> None:
        place = self._place(group)
        if place is None:
            return
        keyspace, partition_id, keys, address = place
        assert self._table is not None
        noted = history_key(keyspace, keys[0])
        rng, known = self._rng, self._versions.get(noted, 0)
        self._written += 1
        delete = rng.random() < 0.2
        value = f"{self._name}.{self._written} ".encode().ljust(VALUE_BYTES, b".")
        step: Step = Remove() if delete else Put(value)
        checked = rng.random() < 0.3
        checks: list[tuple[bytes, Step]] = [(keys[0], Check(known))] if checked else []
        steps = [*((key, step) for key in keys), *checks]
        kind = Kind.DELETE if delete else Kind.PUT
        numbers = [
            self._history.invoke(
                self._name,
                kind,
                history_key(keyspace, key),
                None if delete else value,
                condition=known if checks and key == keys[0] else None,
            )
            for key in keys
        ]
        batch = AtomicBatch(
            table_version=self._table.table_version,
            partition_id=partition_id,
            keys=[key for key, _ in steps],
            steps=[step for _, step in steps],
        )
        try:
            answer: AtomicAnswer = await self._network.call(
                self._name,
                address,
                "commit",
                batch,
                keyspace.keyspace_id,
                timeout_s=CALL_TIMEOUT_S,
            )
        except KoinonError as error:
            self._stale = not isinstance(error, CheckFailedError)
            self._stats[f"batch: {type(error).__name__}"] += 1
            self._failed(numbers, error)
            return
        self._stats["batches"] += 1
        for number, result in zip(numbers, answer.results, strict=False):
            self._history.ok(number, version=0 if result is False else answer.version)
        self._versions[noted] = 0 if delete else answer.version

    def _failed(self, numbers: Sequence[int], error: KoinonError) -> None:
        if isinstance(error, CheckFailedError):
            self._history.refused(numbers[0], current_version=error.current_version)
            numbers = numbers[1:]
        lost = isinstance(error, PeerLostError) and not error.reason.startswith(NOT_SENT)
        for number in numbers:
            if error.maybe_applied or lost:
                self._history.unknown(number)
            else:
                self._history.failed(number)
