"""The layout of a record and of its entry in the expiry index (records.py describes all stored
bytes). Plain Python, without NumPy: the writer process imports only this part.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence

FLAG_EXPIRES = 1
FLAG_TOMBSTONE = 2
HEADER_BYTES = 9
HEADER_WITH_EXPIRY_BYTES = 17
FLAGS_AT = 8

_U64 = struct.Struct(">Q")
_flags_of = operator.itemgetter(FLAGS_AT)
key_of_entry = operator.itemgetter(slice(8, None))
"""Returns the data key in an entry of the expiry index."""


def expiry_keys_of(keys: Sequence[bytes], rows: Sequence[bytes]) -> list[bytes]:
    """Return the expiry-index entries of these encoded records: of records that expire, and of
    tombstones.
    """
    flags = set(map(_flags_of, rows))
    if not any(flag & FLAG_EXPIRES for flag in flags):
        return []
    return [
        row[HEADER_BYTES:HEADER_WITH_EXPIRY_BYTES] + key
        for key, row in zip(keys, rows, strict=True)
        if row[FLAGS_AT] & FLAG_EXPIRES
    ]


def expiry_key(expires_at_ms: int, data_key: bytes) -> bytes:
    return _U64.pack(expires_at_ms) + data_key


def split_expiry_key(key: bytes) -> tuple[int, bytes]:
    """Return (expires_at_ms, data key)."""
    return int.from_bytes(key[:8], "big"), key[8:]
