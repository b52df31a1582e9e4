"""Decides from the table and host commands which partitions this node leads, in which epochs.

Invariants:
- A partition is led only while the newest table row names this node as its primary, and only once
  this process has durably adopted the row's ``primary_epoch`` and the required replicas follow
  (rule 4). The driver reports when a partition is ready.
- An epoch that this store had already seen when the process opened it is never adopted again: a
  new process always gets a new epoch by registering, and its counters must not repeat.
- A fence or a new registration drops all primaries at once.

Pure: the driver carries out the returned adoptions and reports each by ``on_adopted``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from koinon_node.core.formats.records import U64Array
from koinon_node.core.quotas import Share, shares_of
from koinon_proto.contract.table import NO_NODE, NodeId, NodeNumber, PartitionStatus, Table


class HostCommand(NamedTuple):
    """ "You are the primary of this partition at these epochs"; also its acknowledgement."""

    partition_id: int
    primary_epoch: int
    partition_epoch: int


class Adoption(NamedTuple):
    """A partition to take over in ``primary_epoch``: persist the epoch, take over, then report
    back.
    """

    partition_id: int
    primary_epoch: int


@dataclass(frozen=True, kw_only=True)
class ServedPartitions:
    """The partitions to serve, published as a whole. ``epochs[p]`` is 0 where this node does not
    lead p.
    """

    table: Table | None = None
    node_number: NodeNumber = NO_NODE
    node_epoch: int = 0
    epochs: U64Array = field(default_factory=lambda: np.zeros(0, np.uint64))

    @cached_property
    def led(self) -> bytes:
        """One byte per partition: 1 where this node leads it."""
        led: bytes = (self.epochs != 0).tobytes()
        return led

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """This node's shares of the keyspaces with a limit of rows or bytes per second."""
        return shares_of(self.table.keyspaces, self.epochs) if self.table is not None else ()

    @property
    def table_version(self) -> int:
        return self.table.table_version if self.table else 0


class Assignment:
    """The partitions that this node leads or is taking over. ``seen``: the highest epochs in the
    store at the opening.
    """

    def __init__(self, node_id: NodeId, seen: Mapping[int, int]) -> None:
        self._node_id = node_id
        self._seen = dict(seen)
        self._node_epoch = 0
        self._table: Table | None = None
        self._wanted: dict[int, int] = {}  # partition -> epoch in the newest rows
        self._adopting: dict[int, int] = {}  # partition -> epoch being made durable
        self._adopted: dict[int, int] = {}  # partition -> durable epoch, ready to serve
        self._commands: dict[int, HostCommand] = {}  # by partition: not acknowledged yet
        self._refused: list[Adoption] = []  # epochs that are not above the store's

    @property
    def table(self) -> Table | None:
        return self._table

    def on_registered(self, node_epoch: int) -> None:
        """Begin a new epoch of this node: it leads nothing of the old one any more."""
        self.on_fenced()
        self._node_epoch = node_epoch

    def on_fenced(self) -> None:
        """Drop all primaries, until a newer row names this node again."""
        self._node_epoch = 0
        self._wanted.clear()
        self._commands.clear()
        for partition_id, epoch in (self._adopting | self._adopted).items():
            self._seen[partition_id] = max(epoch, self._seen.get(partition_id, 0))
        self._adopting.clear()
        self._adopted.clear()

    def on_table(self, table: Table) -> tuple[Adoption, ...]:
        """Apply the newest table; return the partitions to take over."""
        self._table = table
        me = table.by_id.get(self._node_id)
        if me is None or me.node_epoch != self._node_epoch or not self._node_epoch:
            # The table is older than this node's registration, or newer than its fence.
            self._wanted = {}
        else:
            self._wanted = {
                r.partition_id: r.primary_epoch for r in table.rows if r.primary == me.number
            }
        self._forget_adoptions()
        adoptions = []
        for partition_id, epoch in self._wanted.items():
            if epoch in (self._adopted.get(partition_id), self._adopting.get(partition_id)):
                continue
            floor = max(self._seen.get(partition_id, 0), self._adopted.get(partition_id, 0))
            if epoch <= floor:
                self._refused.append(Adoption(partition_id, epoch))
                continue
            self._adopting[partition_id] = epoch
            adoptions.append(Adoption(partition_id, epoch))
        return tuple(adoptions)

    def _forget_adoptions(self) -> None:
        """Drop takeovers that the rows no longer ask for: their epochs count as seen, and later
        reports of them are ignored.
        """
        gone = [p for p, epoch in self._adopting.items() if self._wanted.get(p) != epoch]
        for partition_id in gone:
            epoch = self._adopting.pop(partition_id)
            self._seen[partition_id] = max(epoch, self._seen.get(partition_id, 0))

    def on_adopted(self, adoptions: Iterable[Adoption]) -> None:
        """Note that these partitions are ready to be led, unless the rows have changed
        meanwhile.
        """
        assert self._table is not None
        for partition_id, epoch in adoptions:
            if self._adopting.get(partition_id) != epoch:
                continue
            del self._adopting[partition_id]
            self._adopted[partition_id] = epoch
            row = self._table.rows[partition_id]
            if row.status == PartitionStatus.ASSIGNED:  # acknowledge before a command arrives
                self.on_commands([HostCommand(partition_id, epoch, row.partition_epoch)])

    def on_commands(self, commands: Iterable[HostCommand]) -> None:
        """Remember the commands that the coordinator wants acknowledged."""
        for command in commands:
            known = self._commands.get(command.partition_id)
            if known is None or known[1:] <= command[1:]:
                self._commands[command.partition_id] = command

    def acknowledgements(self) -> tuple[HostCommand, ...]:
        """Return the commands that are carried out but not acknowledged yet."""
        return tuple(
            command
            for command in self._commands.values()
            if self._adopted.get(command.partition_id) == command.primary_epoch
            and self._wanted.get(command.partition_id) == command.primary_epoch
        )

    def on_acknowledged(self, acknowledged: Iterable[HostCommand]) -> None:
        """Forget acknowledged commands; a newer command for the same partition stays."""
        for command in acknowledged:
            if self._commands.get(command.partition_id) == command:
                del self._commands[command.partition_id]

    def take_refused(self) -> tuple[Adoption, ...]:
        """Return the rows refused since the last call because their epoch is not above the
        store's.
        """
        refused, self._refused = tuple(self._refused), []
        return refused

    def served(self) -> ServedPartitions:
        """Return the partitions that may be served now."""
        table = self._table
        if table is None:
            return ServedPartitions(node_epoch=self._node_epoch)
        epochs = np.zeros(len(table.rows), np.uint64)
        for partition_id, epoch in self._wanted.items():
            if self._adopted.get(partition_id) == epoch:
                epochs[partition_id] = epoch
        me = table.by_id.get(self._node_id)
        return ServedPartitions(
            table=table,
            node_number=me.number if me else NO_NODE,
            node_epoch=self._node_epoch,
            epochs=epochs,
        )
