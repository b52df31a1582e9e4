"""The keys of the shards of one counter or set: derived from its key, and placed in different
partitions.

A number is inserted behind the routing bytes of the key, which stays readable: ``shop#003/visits``
with ``until:2f``, ``{u#003}x`` with ``tag``, ``visits#003`` with ``whole``. If the routing bytes
are no part of the key, or the insertion does not change them (``first``, ``h3``), the number goes
in front (``003#visits``). The choice does not depend on the number of shards, so this number may
rise, but never fall.
"""

from __future__ import annotations

from typing import Final

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES
from koinon_proto.partitioner import Partitioner

SHARDS_MAX: Final = 256
_NUMBER_BYTES: Final = len(b"#000")


def shards_of(key: bytes, count: int, known: Partitioner) -> list[bytes]:
    """Return the keys of the shards.

    Raises:
        InvalidArgumentError: the count or the key is out of bounds, or no number changes the
            routing bytes.
    """
    if not 1 <= count <= SHARDS_MAX:
        raise InvalidArgumentError(
            field="shards", reason="must be 1 to 256", limit=SHARDS_MAX, actual=count
        )
    longest = MAX_KEY_BYTES - _NUMBER_BYTES
    if len(key) > longest:
        raise InvalidArgumentError(
            field="key",
            reason="too long for a number beside it",
            limit=longest,
            actual=len(key),
        )
    behind = known.routing_bytes(key)
    head, found, tail = key.partition(behind) if behind else (b"", b"", key)
    for made in (
        [b"%b%b#%03d%b" % (head, found, number, tail) for number in range(SHARDS_MAX)],
        [b"%03d#%b" % (number, key) for number in range(SHARDS_MAX)],
    ):
        if len(set(map(known.routing_bytes, made))) == SHARDS_MAX:
            return made[:count]
    raise InvalidArgumentError(
        field="key", reason=f"the router {known.router.text} does not tell numbered keys apart"
    )


def shard_of(member: bytes, count: int, known: Partitioner) -> int:
    """Return the shard of a member of a set; it depends only on the member and on ``count``."""
    return known.hash_of(member) % count
