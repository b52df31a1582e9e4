"""Commit groups as plain tuples: the form in which the log and the writer process get them.

Tuples need none of the modules that make them, so the writer process starts in a fraction of the
time that a node takes.
"""

from __future__ import annotations

Writes = tuple[tuple[int, list[bytes], list[bytes | None]], ...]
"""(database, keys, values), a value of None deletes. They are applied in order."""
CHAINED, LOOSE, BULK = 1, 2, 4
"""Bits of how a ticket is tied to others, see commit_group.Ticket."""
TicketFrame = tuple[int, int, Writes]
"""(after, ties, writes)."""
GroupFrame = tuple[int, bool, list[TicketFrame]]
"""(number, whether it is urgent, tickets)."""
