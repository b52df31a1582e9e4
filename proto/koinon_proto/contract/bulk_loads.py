"""Enumerations and types of bulk loads that all processes share. ``v1/loads.proto`` has the
rules.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

LOAD_ATTEMPTS_MAX = 100_000
"""The most attempts that a load may be committed with: its tasks."""
LOAD_TIMEOUT_MS = 30 * 60 * 1000
"""A load that is not touched for so long is aborted, unless it was opened with another time."""
LOAD_TIMEOUT_MS_MIN = 10_000
LOAD_TIMEOUT_MS_MAX = 30 * 24 * 3600 * 1000
LOAD_NAME_CHARS_MAX = 128
"""Of a job's id and a streaming query's."""
LOAD_TEXT_CHARS_MAX = 200
"""Of a load's description and of the reason why it was aborted."""


def owner_digest(load_id: int, owner: str) -> bytes:
    """Return the digest that names a load's owner in the table: it can be checked against a known
    user, but does not reveal the user; b"" for a load without an owner.
    """
    return hashlib.sha256(f"{load_id} {owner}".encode()).digest()[:16] if owner else b""


class LoadMode(IntEnum):
    """The fate of the records that a load does not bring; numbers are those of the wire."""

    APPEND = 1
    OVERWRITE = 2


class LoadState(IntEnum):
    """The states of a load; numbers are those of the wire. ``MERGING``: committed; ``DONE``:
    committed and readable; ``UNKNOWN``: none of these.
    """

    UNKNOWN = 0
    OPEN = 1
    MERGING = 2
    DONE = 3
    ABORTED = 4

    @property
    def ended(self) -> bool:
        return self in (LoadState.DONE, LoadState.ABORTED)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A micro-batch of a streaming query: applied once, in the order of ``batch_id``."""

    query_id: str
    batch_id: int
