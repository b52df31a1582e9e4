"""Counters and sets that are spread over several partitions: for data that is written so often that
one partition would be a hotspot, and read only as a sum or a union.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from os.path import commonprefix
from typing import Any, Final, TypeVar

from koinon.core import limits
from koinon.core.shards import shard_of, shards_of
from koinon.driver.client_api import awaitable
from koinon.types import BytesLike, WriteResult
from koinon_proto.contract.errors import InvalidArgumentError, NotANumberError

T = TypeVar("T")

_SEPARATOR: Final = b"/"


class Shards:
    """A counter, a set, or both, spread over shards. A program may use more shards than earlier
    programs, never fewer: it would not see the rest.

    ``keys`` are the shards' keys, which are the counter's records. A member of a set is a record of
    its own, whose key is a shard's key, a slash and the member. For a given number of shards a
    member is always in the same shard, and it counts once wherever it is.
    """

    def __init__(self, client: Any, key: BytesLike, count: int) -> None:
        self._client = client
        self._known = client._target.partitioner
        self.keys = shards_of(limits.check_key(key), count, self._known)

    def _by_chance(self) -> bytes:
        return random.choice(self.keys)

    @staticmethod
    def _checked(member: BytesLike) -> bytes:
        checked = limits.check_key_part("member", member)
        if not checked:
            raise InvalidArgumentError(field="member", reason="is empty")
        return checked

    def _key_of(self, member: BytesLike) -> bytes:
        checked = self._checked(member)
        return self.keys[shard_of(checked, len(self.keys), self._known)] + _SEPARATOR + checked

    def _everywhere(self, member: BytesLike) -> list[bytes]:
        """Return all keys that the member may have: it may have been added when there were fewer
        shards.
        """
        checked = self._checked(member)
        return [key + _SEPARATOR + checked for key in self.keys]

    def _prefixes(self) -> list[bytes]:
        """Return the prefixes to scan for members: one for each shard if a shard's prefix lies in
        one partition; else their common prefix, since each scan would read all partitions.
        """
        prefixes = [key + _SEPARATOR for key in self.keys]
        common = commonprefix(prefixes) or b""  # noqa: RUF071 (byte by byte is what it is for)
        apart = self._known.partition_of_prefix(prefixes[0]) is not None
        return prefixes if apart or not common else [common]

    def _members(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the members among keys, some of which may not belong to the set."""
        shards, at = set(self.keys), len(self.keys[0])  # all shards' keys have the same length
        behind = at + len(_SEPARATOR)
        return {key[behind:] for key in keys if key[:at] in shards and key[at:behind] == _SEPARATOR}


def _sum(values: Iterable[bytes | None]) -> int:
    try:
        return sum(int(value) for value in values if value is not None)
    except ValueError:
        raise NotANumberError(expected="an integer of 64 bits") from None


class Sharded(Shards):
    """Shards of the blocking client; see :class:`Shards`. Errors are those of the operations it
    consists of: ``increment``, ``get_many``, ``put``, ``delete_many``, ``scan``.
    """

    def _then(self, work: Any, use: Callable[[Any], T]) -> T:
        """Return ``use`` applied to the result of the client's work."""
        return use(work)

    def _keys_in(self, scans: Iterator[Any]) -> Any:
        """Return the keys of all the scans' records."""
        return [entry.key for entry in chain.from_iterable(scans)]

    def increment(self, by: int = 1, *, ttl_ms: int | None = None) -> None:
        """Add to the counter, in a random shard."""
        return self._then(self._client.increment(self._by_chance(), by, ttl_ms=ttl_ms), _nothing)

    def total(self) -> int:
        """Return the counter's sum. It includes everything added before the call, and perhaps a
        part of what is added during it.
        """
        return self._then(self._client.get_many(self.keys), _sum)

    def add(self, member: BytesLike, *, ttl_ms: int | None = None) -> None:
        """Add a member to the set; it expires after ``ttl_ms`` milliseconds."""
        return self._then(self._client.put(self._key_of(member), b"", ttl_ms=ttl_ms), _nothing)

    def discard(self, member: BytesLike) -> None:
        """Remove a member from the set, if it is there."""
        work = self._client.delete_many(self._everywhere(member))
        return self._then(work, WriteResult.raise_for_errors)

    def members(self) -> set[bytes]:
        """Return the members, read shard by shard; like ``scan``, this is no snapshot."""
        scans = (self._client.scan(prefix=p, keys_only=True) for p in self._prefixes())
        return self._then(self._keys_in(scans), self._members)


class AsyncSharded(Shards):
    """Shards of the asyncio client; see :class:`Sharded`."""

    async def _then(self, work: Any, use: Callable[[Any], T]) -> T:
        return use(await work)

    async def _keys_in(self, scans: Iterator[Any]) -> list[bytes]:
        return [entry.key for scan in scans async for entry in scan]

    increment = awaitable(Sharded.increment)
    total = awaitable(Sharded.total)
    add = awaitable(Sharded.add)
    discard = awaitable(Sharded.discard)
    members = awaitable(Sharded.members)


def _nothing(_: object) -> None:
    """Return None, whatever the result of the work."""
