"""Defects of keyspaces to plant, as those of ``mutants``."""

from __future__ import annotations

from typing import Any

from koinon_coordinator.core.cluster import state
from koinon_coordinator.core.cluster.commands import CreateKeyspace
from koinon_coordinator.leader import membership
from koinon_node.core.membership.assignment import Assignment
from koinon_node.partition.copy_drops import CopyDropper
from koinon_proto.contract.table import Table
from tests.simulation.planting import PLANTED, mutant, replace_method

_BEFORE = len(PLANTED)


@mutant
def leaves_rows_of_dropped_keyspaces() -> None:
    """The metadata goes, and what was written stays."""

    def make(_: Any) -> Any:
        async def finish(self: CopyDropper, partition_ids: Any) -> set[int]:
            await self._finish(partition_ids)
            return set(partition_ids)

        return finish

    replace_method(CopyDropper, "_step", make)


@mutant
def forgets_keyspaces_while_nodes_may_hold_them() -> None:
    """Nodes that are down are not waited for."""

    def make(has_erased: Any) -> Any:
        def or_is_down(self: membership.Members, number: Any, keyspace_id: int) -> bool:
            live = {record.info.number for record in self._term.state.live_nodes}
            return number not in live or has_erased(self, number, keyspace_id)

        return or_is_down

    replace_method(membership.Members, "has_erased", make)


@mutant
def serves_keyspaces_that_are_dropped() -> None:
    """Rows that name no primary any more are led on."""

    def make(on_table: Any) -> Any:
        def and_go_on(self: Assignment, table: Table) -> Any:
            led = dict(self._wanted)
            adoptions = on_table(self, table)
            self._wanted |= {p: epoch for p, epoch in led.items() if table.rows[p].unused}
            return adoptions

        return and_go_on

    replace_method(Assignment, "on_table", make)


@mutant
def gives_ids_of_keyspaces_again() -> None:
    """The id after the greatest that there is, where one that is gone had a greater."""

    def make(create: Any) -> Any:
        def again(data: Any, command: CreateKeyspace) -> Any:
            data.last_keyspace_id = max(k.keyspace_id for k in data.keyspaces.all)
            return create(data, command)

        return again

    state._APPLY[CreateKeyspace] = make(state._APPLY[CreateKeyspace])


NAMES = tuple(mutant.name for mutant in PLANTED[_BEFORE:])
LONG = NAMES[2:]
"""Those that only the long tests plant."""
