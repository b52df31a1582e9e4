"""Defects to plant in real processes, each one rule left out; the nemesis must find them.

Those of the simulation (tests/simulation/mutants.py) are all here under their names: they replace
methods of the product, whatever runs it. Beside them stand some that matter most to clients.
"""

from __future__ import annotations

from typing import Any

from koinon.core.batching import Deferred
from koinon.core.exchange import Exchange
from koinon.driver.single_operations import SingleOperations
from koinon_node.core.formats import records
from koinon_node.core.membership.lease import Lease
from koinon_node.replication.page_reader import PageReader
from koinon_node.storage.store import Range
from tests.simulation.mutants import MUTANTS
from tests.simulation.planting import Mutant, replace_method

DEFECTS: dict[str, Mutant] = {mutant.name: mutant for mutant in MUTANTS}


def defect(name: str) -> Mutant:
    """Return the defect of that name; raises KeyError."""
    return DEFECTS[name]


def _add(name: str, plant: Any) -> None:
    DEFECTS[name] = Mutant(name, plant)


def _holds_its_lease_too_long() -> None:
    """A node serves for eight seconds after the last heartbeat that was acknowledged."""

    def make(renewed: Any) -> Any:
        def longer(self: Lease, node_epoch: int, sent_at: float, lease_s: float) -> Lease:
            lease: Lease = renewed(self, node_epoch, sent_at, 8 * lease_s)
            return lease

        return longer

    replace_method(Lease, "renewed", make)


def _forget_deletes_in_catch_up() -> None:
    """A follower pulls no tombstones: records that were deleted while it was away are still there
    when it leads.
    """

    def make(message: Any) -> Any:
        def without_tombstones(self: PageReader, page: Range) -> Any:
            rows = [row for row in page.rows if not records.decode_record(row[1]).tombstone]
            return message(self, page._replace(rows=rows))

        return without_tombstones

    replace_method(PageReader, "_message", make)


def _resumes_waiters_twice() -> None:
    """A write of a client that waited for news goes on twice, when it has any."""

    def make(resume: Any) -> Any:
        def twice(self: SingleOperations, parked: Deferred) -> None:
            resume(self, parked)
            routing = self.routing()
            for single in parked.singles:
                changed = routing.changed_since([single.partition_id], parked.revision)
                if single.write and changed and not single.done:
                    self._enqueue(single)

        return twice

    replace_method(SingleOperations, "_resume", make)
    replace_method(Exchange, "begin_attempt", lambda _: _begin_anyway)


def _begin_anyway(self: Exchange) -> bool:
    self.sent = True
    return not self.done


_add("resumes-waiters-twice", _resumes_waiters_twice)
_add("holds-its-lease-too-long", _holds_its_lease_too_long)
_add("forgets-deletes-in-catch-up", _forget_deletes_in_catch_up)

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "serves-without-a-lease": ("split",),
    "holds-its-lease-too-long": ("split",),
    "acknowledges-without-its-followers": ("split",),
    "resumes-waiters-twice": ("isolate", "kill"),
    "forgets-deletes-in-catch-up": ("isolate", "kill"),
    "elects-a-replica-that-is-not-in-sync": ("isolate", "kill"),
}
"""Kinds of faults that show a defect soonest; any schedule of all kinds may."""
