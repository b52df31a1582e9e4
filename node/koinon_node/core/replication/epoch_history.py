"""Compares the epoch histories of two copies of a partition: finds the sequence where they diverge.

A history names the epochs of a lineage, oldest first, each with the last sequence before it. One
primary led each epoch, and wrote each of its sequences once; so two lineages that have the same
epoch begin at the same sequence agree on all of it that both have, and on all that is before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from koinon_node.core.formats.records import EpochStart
from koinon_proto.contract.table import SEQUENCE_COUNTER_BITS, first_sequence


class Lineage(NamedTuple):
    """A copy's epoch history, and the sequence through which the copy is complete."""

    history: Sequence[EpochStart]
    complete_through: int

    def end_of(self, index: int) -> int:
        """Return the last sequence of the epoch at ``index`` that the copy holds."""
        following = self.history[index + 1 : index + 2]
        end = following[0].previous_sequence if following else self.complete_through
        return min(end, self.complete_through)


def common_point(mine: Lineage, theirs: Lineage) -> int:
    """Return the largest sequence through which both lineages surely agree; 0 if they share no
    epoch.
    """
    places = {entry: index for index, entry in enumerate(theirs.history)}
    for index in reversed(range(len(mine.history))):
        other = places.get(mine.history[index])
        if other is not None:
            return min(mine.end_of(index), theirs.end_of(other))
    return 0


def last_common(lineage: Lineage, sequence: int) -> int | None:
    """Return the largest sequence up to ``sequence`` through which this lineage has every write of
    any lineage that wrote ``sequence``. Return None if the history does not reach so far back.
    """
    epoch = sequence >> SEQUENCE_COUNTER_BITS
    for index in reversed(range(len(lineage.history))):
        if lineage.history[index].primary_epoch <= epoch:
            return min(sequence, lineage.end_of(index))
    return None


def cut(history: Sequence[EpochStart], sequence: int) -> tuple[EpochStart, ...]:
    """Return the history of a lineage that ends at ``sequence``."""
    return tuple(e for e in history if first_sequence(e.primary_epoch) <= sequence)
