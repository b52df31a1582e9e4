"""The values of change feeds: changes, batches of changes, and a reader's positions."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from koinon_proto.contract.errors import InvalidArgumentError

_FORMAT: Final = "koinon-feed-1."
_TEXT_BYTES_MAX = 64 * 1024 * 1024  # the limit on the decompressed text of positions
_SEQUENCE_MAX = 2**64 - 1


class PartitionPosition(NamedTuple):
    """A reader's position in one partition: it has seen all changes through ``sequence``. In a
    backfill (``bound`` not 0) it has also seen the changes above ``sequence`` and through ``bound``
    of the keys through ``after_key``.
    """

    sequence: int = 0
    bound: int = 0
    after_key: bytes = b""


FROM_NOW = PartitionPosition(_SEQUENCE_MAX)
"""The position that stands for the partition's last sequence at the time its stream opens."""


@dataclass(frozen=True)
class FeedPositions:
    """A feed reader's position in each partition, in one keyspace of one cluster. ``str`` gives
    printable ASCII without spaces, which ``parse`` reads.
    """

    cluster_id: str
    keyspace_id: int
    partitions: Mapping[int, PartitionPosition]
    """A partition that is missing here begins with a snapshot."""

    def __str__(self) -> str:
        rows = [
            [p, place.sequence, place.bound, place.after_key.hex()]
            for p, place in sorted(self.partitions.items())
        ]
        content = json.dumps([self.cluster_id, self.keyspace_id, rows], separators=(",", ":"))
        packed = zlib.compress(content.encode("ascii"))
        return _FORMAT + base64.urlsafe_b64encode(packed).decode("ascii")

    def __hash__(self) -> int:
        return hash((self.cluster_id, self.keyspace_id, frozenset(self.partitions.items())))

    @classmethod
    def parse(cls, text: str) -> FeedPositions:
        """Parse the text that ``str`` gave.

        Raises:
            InvalidArgumentError: the text does not hold positions, or was cut off.
        """
        if not text.startswith(_FORMAT):
            raise _not_positions(f"it does not begin with {_FORMAT}")
        try:
            packed = base64.b64decode(text[len(_FORMAT) :].strip(), b"-_", validate=True)
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(packed, _TEXT_BYTES_MAX)
            if not unpacking.eof:
                raise _not_positions("it was cut off, or is too long")
            return cls._of(json.loads(content))
        except (ValueError, TypeError, binascii.Error, zlib.error, RecursionError) as error:
            raise _not_positions(str(error)) from None

    @classmethod
    def _of(cls, content: Any) -> FeedPositions:
        cluster_id, keyspace_id, rows = content
        if not isinstance(cluster_id, str):
            raise TypeError("the cluster id is not text")
        partitions = {
            _number(p): PartitionPosition(_number(sequence), _number(bound), bytes.fromhex(key))
            for p, sequence, bound, key in rows
        }
        return cls(cluster_id, _number(keyspace_id), MappingProxyType(partitions))

    def without(self, *partition_ids: int) -> FeedPositions:
        """Return the positions without these partitions, which then begin with a snapshot."""
        left = {p: place for p, place in self.partitions.items() if p not in partition_ids}
        return FeedPositions(self.cluster_id, self.keyspace_id, MappingProxyType(left))

    def reaches(self, other: FeedPositions) -> bool:
        """Return whether the reader has seen everything that it had seen at ``other``, or newer
        changes of the same keys: each partition of ``other`` has got at least as far.
        """
        nothing = PartitionPosition()
        return (self.cluster_id, self.keyspace_id) == (other.cluster_id, other.keyspace_id) and all(
            self.partitions.get(p, nothing) >= place for p, place in other.partitions.items()
        )


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _SEQUENCE_MAX:
        raise TypeError(f"{value!r} is not a number in range")
    return value


def _not_positions(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(field="since", reason=f"not the text of feed positions ({why})")


class Change(NamedTuple):
    """One change of a key. ``value`` is None if the key was deleted or has expired."""

    key: bytes
    value: bytes | None
    version: int
    expires_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBatch:
    """The next changes of a feed, as columns: entry i of each column belongs to change i. Iterating
    yields single changes. A batch may be empty: a feed yields a batch every second at least.
    """

    keys: Sequence[bytes]
    values: Sequence[bytes | None]
    """None for a key that was deleted or has expired; ``b""`` for all others with ``keys_only``."""
    versions: Sequence[int]
    expires_at_ms: Sequence[int | None]
    positions: FeedPositions
    """The positions after these changes: ``since`` of a later feed that is to continue here."""
    caught_up: bool
    """True once every partition has delivered all changes that were there when the feed began, and
    no partition is in a backfill again.
    """

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Change]:
        return map(Change, self.keys, self.values, self.versions, self.expires_at_ms)


class FeedPart(NamedTuple):
    """The rows of a batch that one partition has advanced by, from ``start`` to before ``end``, and
    its positions before and after them. A batch may have several parts of a partition.
    """

    partition_id: int
    start: int
    end: int
    before: PartitionPosition
    after: PartitionPosition

    @property
    def rows(self) -> int:
        return self.end - self.start


def closed_up(parts: Sequence[FeedPart]) -> list[FeedPart]:
    """Return the parts as they are once all rows between them are gone."""
    closed: list[FeedPart] = []
    for part in parts:
        start = closed[-1].end if closed else 0
        closed.append(part._replace(start=start, end=start + part.rows))
    return closed


for _shown in (Change, ChangeBatch, FeedPositions):
    _shown.__module__ = "koinon"
