"""Clients that write, read, delete and compare a few keys, and note what they were told.

One goes on in a keyspace of its name, whichever that is by then: what it notes of keys of one that
is not ``default`` begins with the keyspace's id, so that each is judged by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from koinon_node.partition.batches import ReadAnswer, WriteAnswer, WriteBatch
from koinon_node.ports import PeerLostError
from koinon_node.state import partitioner_of
from koinon_proto.contract.errors import ConditionFailedError, KoinonError
from koinon_proto.contract.keyspaces import DEFAULT, DEFAULT_ID, Keyspace
from koinon_proto.contract.table import Table, apply_update
from tests.checkers.history import History, Kind
from tests.simulation.loop import Process
from tests.simulation.network import NOT_SENT, Network

CALL_TIMEOUT_S = 2.0
BATCH_ROWS_MAX = 6
BACKOFF_S_MAX = 0.1  # after a call that brought nothing


def history_key(keyspace: Keyspace, key: bytes) -> bytes:
    """Return what a history calls a key of the keyspace."""
    return key if keyspace.keyspace_id == DEFAULT_ID else b"%d:" % keyspace.keyspace_id + key


class Client:
    """One caller: one thing at a time, over a table that may be old."""

    def __init__(
        self,
        name: str,
        process: Process,
        network: Network,
        coordinators: Sequence[str],
        history: History,
        keys: Sequence[bytes],
        rng: random.Random,
        stats: Counter[str],
        keyspace: str = DEFAULT,
    ) -> None:
        self._name = name
        self.keyspace = keyspace
        self._network = network
        self._coordinators = coordinators
        self._history = history
        self.keys = keys
        self._rng = rng
        self._stats = stats
        self._table: Table | None = None
        self._versions: dict[bytes, int] = {}
        self._written = 0
        self._stale = True
        self.process = process
        self.stopping = self.busy = False

    async def run(self, pause_s: float) -> None:
        """Go on until told to stop."""
        while not self.stopping:
            self.busy = False
            backoff_s = self._rng.uniform(0.0, BACKOFF_S_MAX) if self._stale else 0.0
            await asyncio.sleep(self._rng.expovariate(1 / pause_s) + backoff_s)
            self.busy = True
            if self._stale or self._rng.random() < 0.02:
                await self._refresh()
            if self._table is not None:
                await self._one()
        self.busy = False

    async def _refresh(self) -> None:
        version = self._table.table_version if self._table is not None else 0
        try:
            update = await self._network.call(
                self._name, self._rng.choice(self._coordinators), "table", version, timeout_s=0.5
            )
        except KoinonError:
            return
        if update is not None:
            self._table = apply_update(self._table, update)
        self._stale = False

    def _known(self) -> Keyspace | None:
        """The keyspace, as the table has it; where it has none, that is to be asked for again."""
        assert self._table is not None
        found = self._table.keyspaces.get(self.keyspace)
        self._stale |= found is None
        return found

    async def _one(self) -> None:
        rng, keyspace = self._rng, self._known()
        if keyspace is None:
            return
        key = self.keys[min(rng.randrange(len(self.keys)), rng.randrange(len(self.keys)))]
        fate = rng.random()
        if fate < 0.4:
            await self._read(keyspace, key)
        elif fate < 0.5:
            await self._write(keyspace, [(key, Kind.DELETE, None)])
        elif fate < 0.6:
            known = self._versions.get(history_key(keyspace, key), 0)
            await self._write(keyspace, [(key, Kind.PUT, rng.choice([known, known, 0]))])
        elif fate < 0.7:
            known = self._versions.get(history_key(keyspace, key), 0)
            row = (key, Kind.DELETE, known) if known else (key, Kind.PUT, 0)
            await self._write(keyspace, [row])
        else:
            rows = rng.choice([1, 1, 1, BATCH_ROWS_MAX])
            chosen = {key, *rng.choices(self.keys, k=rows - 1)}
            await self._write(keyspace, [(k, Kind.PUT, None) for k in sorted(chosen)])

    async def read_now(self, key: bytes) -> bool:
        """Read once, with the newest table that can be had; return whether it was answered."""
        self._stale = True
        await self._refresh()
        keyspace = self._known() if self._table is not None else None
        return keyspace is not None and await self._read(keyspace, key)

    def _address(self, partition_id: int) -> str:
        assert self._table is not None
        primary = self._table.primary_of(partition_id)
        return primary.node_id if primary is not None else ""

    # --- reads -------------------------------------------------------------------------------

    async def _read(self, keyspace: Keyspace, key: bytes) -> bool:
        partitions = partitioner_of(keyspace).partitions_of([key])
        address = self._address(int(partitions[0]))
        if not address:
            self._stale = True
            return False
        assert self._table is not None
        noted = history_key(keyspace, key)
        number = self._history.invoke(self._name, Kind.GET, noted)
        try:
            answer: ReadAnswer = await self._network.call(
                self._name,
                address,
                "read",
                [key],
                partitions.astype(np.uint32),
                self._table.table_version,
                keyspace.keyspace_id,
                timeout_s=CALL_TIMEOUT_S,
            )
        except KoinonError as error:
            self._stale = True
            self._history.failed(number)
            self._stats[f"read: {type(error).__name__}"] += 1
            return False
        if answer.refusals:
            self._stale = True
            self._history.failed(number)
            self._count_refusals("read", answer.refusals)
            return False
        found = not answer.missing
        version = answer.versions[0] if found else 0
        value = answer.values[0] if found else None
        self._history.ok(number, version=version, value=value)
        self._versions[noted] = version
        self._stats["reads"] += 1
        return True

    # --- writes ------------------------------------------------------------------------------

    async def _write(self, keyspace: Keyspace, rows: list[tuple[bytes, Kind, int | None]]) -> None:
        """Write all rows of the first one's node in one call."""
        known = partitioner_of(keyspace)
        partitions = known.partitions_of([key for key, _, _ in rows]).astype(np.uint32)
        addresses = [self._address(int(p)) for p in partitions]
        address = addresses[0]
        if not address:
            self._stale = True
            return
        mine = [index for index, other in enumerate(addresses) if other == address]
        rows, partitions = [rows[index] for index in mine], partitions[mine]
        values = [self._value() if kind is Kind.PUT else None for _, kind, _ in rows]
        assert self._table is not None
        batch = WriteBatch(
            table_version=self._table.table_version,
            keys=[key for key, _, _ in rows],
            values=[value or b"" for value in values],
            partition_ids=partitions,
            deletes=frozenset(i for i, (_, kind, _) in enumerate(rows) if kind is Kind.DELETE),
            conditions={i: c for i, (_, _, c) in enumerate(rows) if c is not None},
        )
        numbers = [
            self._history.invoke(
                self._name, kind, history_key(keyspace, key), value, condition=condition
            )
            for (key, kind, condition), value in zip(rows, values, strict=True)
        ]
        try:
            answer: WriteAnswer = await self._network.call(
                self._name,
                address,
                "write",
                batch,
                keyspace.keyspace_id,
                timeout_s=CALL_TIMEOUT_S,
            )
        except KoinonError as error:
            self._stale = True
            for number in numbers:
                self._fail(number, error)
            return
        self._note(keyspace, batch, numbers, answer)

    def _note(
        self, keyspace: Keyspace, batch: WriteBatch, numbers: list[int], answer: WriteAnswer
    ) -> None:
        if answer.refusals:
            self._stale = True
            self._count_refusals("write", answer.refusals)
        for row, number in enumerate(numbers):
            if int(batch.partition_ids[row]) in answer.refusals:
                self._history.failed(number)
            elif row in answer.row_errors:
                self._fail(number, answer.row_errors[row])
            elif row in answer.absent:
                self._history.ok(number, version=0)
            else:
                self._stats["writes"] += 1
                version = int(answer.versions[row])
                self._history.ok(number, version=version)
                noted = history_key(keyspace, batch.keys[row])
                self._versions[noted] = 0 if row in batch.deletes else version

    def _fail(self, number: int, error: KoinonError) -> None:
        self._stats[f"write: {type(error).__name__}"] += 1
        if isinstance(error, ConditionFailedError):
            self._history.refused(number, current_version=error.current_version)
        elif error.maybe_applied or (
            isinstance(error, PeerLostError) and not error.reason.startswith(NOT_SENT)
        ):
            self._history.unknown(number)
        else:
            self._history.failed(number)

    def _count_refusals(self, what: str, refusals: dict[int, KoinonError]) -> None:
        for error in refusals.values():
            self._stats[f"{what}: {type(error).__name__}"] += 1

    def _value(self) -> bytes:
        self._written += 1
        return f"{self._name}.{self._written}".encode()
