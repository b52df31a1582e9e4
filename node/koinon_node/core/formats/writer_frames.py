"""Commit groups as plain tuples: the form in which the log and the writer process get them.

Tuples need none of the modules that make them, so the writer process starts in a fraction of the
time that a node takes.
"""

from __future__ import annotations

from typing import Any

Writes = tuple[tuple[int, list[bytes], list[bytes | None]], ...]
"""(database, keys, values), a value of None deletes. They are applied in order."""
CHAINED, LOOSE, BULK = 1, 2, 4
"""Bits of how a ticket is tied to others, see commit_group.Ticket."""
TicketFrame = tuple[int, int, Writes]
"""(after, ties, writes)."""
GroupFrame = tuple[int, bool, list[TicketFrame]]
"""(number, whether it is urgent, tickets)."""
LARGE_BYTES = 16 * 1024
"""A value that has as much or more goes to the writer process beside its group's frame."""


def without_large(group: GroupFrame) -> tuple[GroupFrame, list[bytes]]:
    """Return the group with the length of each large value in its place, and those values: who
    sends them beside the group does not copy them.
    """
    number, urgent, tickets = group
    large: list[bytes] = []

    def lengths(values: list[bytes | None]) -> list[Any]:
        if max(map(len, filter(None, values)), default=0) < LARGE_BYTES:
            return values
        kept: list[Any] = list(values)
        for place, value in enumerate(values):
            if value is not None and len(value) >= LARGE_BYTES:
                kept[place] = len(value)
                large.append(value)
        return kept

    sizes = [
        (after, ties, tuple((db, keys, lengths(values)) for db, keys, values in writes))
        for after, ties, writes in tickets
    ]
    return (number, urgent, sizes), large


def put_large(group: GroupFrame, large: memoryview) -> None:
    """Put the large values, one after the other, back into a group that came without them."""
    at = 0
    for _, _, writes in group[2]:
        for _, _, values in writes:
            places: list[Any] = values
            for place, value in enumerate(places):
                if type(value) is int:
                    places[place] = large[at : at + value]
                    at += value
