"""Commit groups as plain tuples, for the log and the writer process.

The writer process can read tuples without the modules that build groups, so it starts in a fraction
of a node's start time.
"""

from __future__ import annotations

from typing import Any

Writes = tuple[tuple[int, list[bytes], list[bytes | None]], ...]
"""(database, keys, values); a value of None deletes the key. Applied in order."""
CHAINED, LOOSE, BULK = 1, 2, 4
"""Flags: how a ticket depends on others, see commit_group.Ticket."""
TicketFrame = tuple[int, int, Writes]
"""(after, ties, writes)."""
GroupFrame = tuple[int, bool, list[TicketFrame]]
"""(number, whether it is urgent, tickets)."""
LARGE_BYTES = 16 * 1024
"""Values of this size or more are sent to the writer process behind their group's frame."""


def without_large(group: GroupFrame) -> tuple[GroupFrame, list[bytes]]:
    """Return the group with each large value replaced by its length, and the large values: they can
    be sent behind the frame without a copy.
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
    """Put the large values back into a group that was sent without them."""
    at = 0
    for _, _, writes in group[2]:
        for _, _, values in writes:
            places: list[Any] = values
            for place, value in enumerate(places):
                if type(value) is int:
                    places[place] = large[at : at + value]
                    at += value
