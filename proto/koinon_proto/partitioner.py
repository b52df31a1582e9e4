"""The partition of a key. Every implementation here gives the same answer for a key.

``murmur2`` is Kafka's: 32-bit MurmurHash2 (Austin Appleby), seed 0x9747b28c, little-endian words,
then ``(hash & 0x7fffffff) mod count``. ``md5`` is ``|signed 128-bit big-endian digest| mod count``.
``crc16`` is Redis Cluster's: the key's hash slot (``slot_of``). Each partition has an equal
contiguous range of slots, ``slot * count // 16384``; the count is a power of two.

A router (``routers``) says which bytes of the key are hashed. It stands in the partitioner's name,
``murmur2(until:2f)``. Without one ``murmur2`` and ``md5`` hash the whole key, and ``crc16`` its
hash tag, as Redis does.

Each has a scalar form for one key and a vectorised form over columns: a list of ``bytes``, a data
buffer with offsets, or an Arrow array. The latter is ``key_columns``, which is imported with the
first column: a program that uses one key at a time never needs NumPy.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import md5
from typing import TYPE_CHECKING, Any, ClassVar, Final

from koinon_proto.contract.errors import ConfigurationError, PartitionerMismatchError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import SLOT_COUNT, partition_count_fault
from koinon_proto.fingerprint import fingerprint_of, fixed_keys
from koinon_proto.routers import TAG, WHOLE, KeyRouter, is_built_in, router

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_U32: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF

_SCALAR_ROWS_EQUAL: Final = 24
_SCALAR_ROWS_MIXED: Final = 80
"""Up to so many keys, of one length or of several, a Python loop beats the fixed cost of the NumPy
steps (measured: 33 and 107 microseconds against 1.3 a key)."""
_SCALAR_ROWS_ROUTED: Final = 32
"""The same for keys with a router."""
_SCALAR_ROWS_SLOTS: Final = 1_000
"""The same for slots, whose scalar form is mostly C (measured: 0.3 microseconds a key)."""
_SLOT_MASK: Final = SLOT_COUNT - 1

_WORDS: Final = [struct.Struct(f"<{words}I").unpack_from for words in range(17)]


def murmur2(key: bytes) -> int:
    """Return Kafka's murmur2 of ``key`` as an unsigned 32-bit number."""
    length = len(key)
    words = length >> 2
    h = (_SEED ^ length) & _U32
    unpack = _WORDS[words] if words < len(_WORDS) else struct.Struct(f"<{words}I").unpack_from
    for k in unpack(key):
        k = k * _M & _U32
        h = (h * _M ^ (k ^ k >> 24) * _M) & _U32
    tail = length & 3
    if tail:
        h = (h ^ int.from_bytes(key[-tail:], "little")) * _M & _U32
    h = (h ^ h >> 13) * _M & _U32
    return h ^ h >> 15


def slot_of(key: bytes) -> int:
    """Return the key's hash slot in Redis Cluster, 0 to 16,383.

    CRC16/XMODEM of the key, or of its hash tag: what is between the first ``{`` and the first ``}``
    after it, unless that is empty.
    """
    start = key.find(b"{") + 1
    if start:
        end = key.find(b"}", start)
        if end > start:
            key = key[start:end]
    return crc_hqx(key, 0) & _SLOT_MASK


class Partitioner(ABC):
    """Maps keys to ``base .. base + partition_count - 1``. Immutable; safe to share between
    threads.
    """

    base: int = 0
    """The first partition of the keyspace."""
    hash_name: ClassVar[str]
    name: str
    """Hash and router, as they are replicated: ``murmur2``, ``murmur2(until:2f)``."""
    router: KeyRouter
    partition_count: int

    @property
    def partition_ids(self) -> range:
        """The partitions that keys are mapped to."""
        return range(self.base, self.base + self.partition_count)

    # --- of routing bytes ------------------------------------------------------------------

    @abstractmethod
    def hash_of(self, routing_bytes: bytes) -> int:
        """Return the hash of routing bytes, from which the partition follows; below 2**128."""

    @abstractmethod
    def partition_of_routing(self, routing_bytes: bytes) -> int:
        """Return the partition of all keys that have these routing bytes."""

    @abstractmethod
    def partitions_of_spans(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        """Return the partitions of the routing bytes ``data[starts[i]:ends[i]]``, at least one."""

    # --- of keys ---------------------------------------------------------------------------

    def routing_bytes(self, key: bytes) -> bytes:
        """Return the bytes of the key that are hashed: keys with equal routing bytes share a
        partition.
        """
        return self.router.routing_bytes(key)

    def partition_of_prefix(self, prefix: bytes) -> int | None:
        """Return the partition of every key with this prefix; None if they may lie in several."""
        routing_bytes = self.router.of_prefix(prefix)
        return None if routing_bytes is None else self.partition_of_routing(routing_bytes)

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of this process's answers, 32 bytes; some 10 ms, once a process."""
        return _fingerprint(self.hash_name, self.router)

    @abstractmethod
    def partition_of(self, key: bytes) -> int:
        """Return the partition of one key."""

    @abstractmethod
    def partitions_of(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        """Return the partition of every key."""

    @abstractmethod
    def partitions_of_buffers(
        self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
    ) -> NDArray[np.uint32]:
        """Return the partition of every key ``data[offsets[i]:offsets[i + 1]]``.

        ``data`` is contiguous uint8; ``offsets`` is int32 or int64, one entry more than keys.

        Raises:
            InvalidArgumentError: the offsets descend, or reach outside ``data``.
        """

    def partitions_of_arrow(self, array: Any) -> NDArray[np.uint32]:
        """Return the partition of every key of an Arrow (chunked) array, without copying it.

        Takes binary, large_binary, string, large_string and fixed-size binary, sliced or not.

        Raises:
            InvalidArgumentError: the array has nulls or another type.
        """
        from koinon_proto.key_columns import arrow_buffers, joined

        if hasattr(array, "chunks"):
            return joined([self.partitions_of_buffers(*arrow_buffers(c)) for c in array.chunks])
        return self.partitions_of_buffers(*arrow_buffers(array))


class _Hash(Partitioner):
    """A hash with the router that it has by itself, which is as fast as if there were none."""

    router: KeyRouter = WHOLE

    def __init__(self, partition_count: int) -> None:
        self.name = self.hash_name
        fault = partition_count_fault(self.name, partition_count)
        if fault:
            raise ConfigurationError(reason=f"partition_count {partition_count}: {fault}")
        self.partition_count = partition_count


class Murmur2Partitioner(_Hash):
    """Kafka's default partitioner for keyed records."""

    hash_name = "murmur2"

    def hash_of(self, routing_bytes: bytes) -> int:
        return murmur2(routing_bytes)

    def partition_of_routing(self, routing_bytes: bytes) -> int:
        return (murmur2(routing_bytes) & _POSITIVE) % self.partition_count

    def partitions_of_spans(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import murmur2_of_spans, reduce_positive

        return reduce_positive(murmur2_of_spans(data, starts, ends), self.partition_count)

    def partition_of(self, key: bytes) -> int:
        return (murmur2(key) & _POSITIVE) % self.partition_count

    def partitions_of(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import joined, joined_blocks, numbers

        rows = len(keys)
        if rows <= _SCALAR_ROWS_EQUAL or (
            rows <= _SCALAR_ROWS_MIXED and len(set(map(len, keys))) > 1
        ):
            count = self.partition_count
            return numbers([(murmur2(key) & _POSITIVE) % count for key in keys])
        return joined([self.partitions_of_buffers(*block) for block in joined_blocks(keys)])

    def partitions_of_buffers(
        self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import murmur2_of_buffers, reduce_positive

        return reduce_positive(murmur2_of_buffers(data, offsets), self.partition_count)


class Md5Partitioner(_Hash):
    """|signed 128-bit big-endian MD5 digest| mod count. Not for secrecy, only for spread."""

    hash_name = "md5"

    def hash_of(self, routing_bytes: bytes) -> int:
        digest = md5(routing_bytes, usedforsecurity=False).digest()
        return abs(int.from_bytes(digest, "big", signed=True))

    def partition_of_routing(self, routing_bytes: bytes) -> int:
        return self.hash_of(routing_bytes) % self.partition_count

    def partitions_of_spans(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import md5_of_spans, reduce_digests

        return reduce_digests(md5_of_spans(data, starts, ends), self.partition_count)

    def partition_of(self, key: bytes) -> int:
        return self.hash_of(key) % self.partition_count

    def partitions_of(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import numbers, reduce_digests

        if len(keys) <= _SCALAR_ROWS_EQUAL:
            return numbers([self.partition_of(key) for key in keys])
        digests = b"".join([md5(key, usedforsecurity=False).digest() for key in keys])
        return reduce_digests(digests, self.partition_count)

    def partitions_of_buffers(
        self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import md5_of_buffers, reduce_digests

        return reduce_digests(md5_of_buffers(data, offsets), self.partition_count)


class Crc16Partitioner(_Hash):
    """Redis Cluster's hash slots, an equal contiguous range of them a partition."""

    hash_name = "crc16"
    router = TAG

    def __init__(self, partition_count: int) -> None:
        super().__init__(partition_count)
        self._shift = (SLOT_COUNT // partition_count).bit_length() - 1

    def hash_of(self, routing_bytes: bytes) -> int:
        return crc_hqx(routing_bytes, 0) & _SLOT_MASK

    def partition_of_routing(self, routing_bytes: bytes) -> int:
        return (crc_hqx(routing_bytes, 0) & _SLOT_MASK) >> self._shift

    def partitions_of_spans(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import crc16_of_spans

        slots = crc16_of_spans(data, starts, ends).astype("uint32")
        slots &= slots.dtype.type(_SLOT_MASK)
        slots >>= slots.dtype.type(self._shift)
        return slots

    def partition_of(self, key: bytes) -> int:
        return slot_of(key) >> self._shift

    def partitions_of(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import joined, joined_blocks, numbers

        if len(keys) <= _SCALAR_ROWS_SLOTS:
            return numbers([slot_of(key) >> self._shift for key in keys])
        return joined([self.partitions_of_buffers(*block) for block in joined_blocks(keys)])

    def partitions_of_buffers(
        self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import slots_of_buffers

        slots = slots_of_buffers(data, offsets).astype("uint32")
        slots >>= slots.dtype.type(self._shift)
        return slots


class RoutedPartitioner(Partitioner):
    """A hash with a router that is not its own."""

    def __init__(self, hashing: Partitioner, chosen: KeyRouter) -> None:
        self.name = f"{hashing.hash_name}({chosen.text})"
        self.router = chosen
        self.partition_count = hashing.partition_count
        self._hashing = hashing
        self._routing_bytes = chosen.routing_bytes
        self._partition_of_routing = hashing.partition_of_routing

    @property
    def hash_name(self) -> str:  # type: ignore[override]
        return self._hashing.hash_name

    def hash_of(self, routing_bytes: bytes) -> int:
        return self._hashing.hash_of(routing_bytes)

    def partition_of_routing(self, routing_bytes: bytes) -> int:
        return self._partition_of_routing(routing_bytes)

    def partitions_of_spans(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        return self._hashing.partitions_of_spans(data, starts, ends)

    def partition_of(self, key: bytes) -> int:
        return self._partition_of_routing(self._routing_bytes(key))

    def partitions_of(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import joined, joined_blocks, numbers

        if len(keys) <= _SCALAR_ROWS_ROUTED:
            route, partition_of = self._routing_bytes, self._partition_of_routing
            return numbers([partition_of(route(key)) for key in keys])
        return joined([self.partitions_of_buffers(*block) for block in joined_blocks(keys)])

    def partitions_of_buffers(
        self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
    ) -> NDArray[np.uint32]:
        from koinon_proto.key_columns import blocks, check_buffers, joined

        check_buffers(data, offsets)
        spans, of_spans = self.router.spans, self._hashing.partitions_of_spans
        return joined([of_spans(*spans(data, *block)) for block in blocks(offsets)])


class KeyspacePartitioner(Partitioner):
    """Another partitioner, for a keyspace whose partitions do not begin with 0."""

    def __init__(self, inner: Partitioner, base: int) -> None:
        self.name = inner.name
        self.router = inner.router
        self.partition_count = inner.partition_count
        self.base = base
        self._inner = inner
        self._partition_of = inner.partition_of

    @property
    def hash_name(self) -> str:  # type: ignore[override]
        return self._inner.hash_name

    def hash_of(self, routing_bytes: bytes) -> int:
        return self._inner.hash_of(routing_bytes)

    def partition_of_routing(self, routing_bytes: bytes) -> int:
        return self.base + self._inner.partition_of_routing(routing_bytes)

    def partitions_of_spans(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        return self._shifted(self._inner.partitions_of_spans(data, starts, ends))

    def partition_of(self, key: bytes) -> int:
        return self.base + self._partition_of(key)

    def partitions_of(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        return self._shifted(self._inner.partitions_of(keys))

    def partitions_of_buffers(
        self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
    ) -> NDArray[np.uint32]:
        return self._shifted(self._inner.partitions_of_buffers(data, offsets))

    def _shifted(self, found: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Add ``base`` to a column of partitions, in place."""
        found += found.dtype.type(self.base)
        return found


PARTITIONERS: Final[dict[str, Callable[[int], Partitioner]]] = {
    cls.hash_name: cls for cls in (Murmur2Partitioner, Md5Partitioner, Crc16Partitioner)
}
"""By the names of the hashes; each can have a router."""


def partitioner(name: str, partition_count: int, base: int = 0) -> Partitioner:
    """Return the partitioner of this name, ``hash`` or ``hash(router)``, whose partitions begin
    with ``base``.

    Raises:
        ConfigurationError: no such partitioner or router, or a count out of range.
    """
    hash_name, opened, text = name.partition("(")
    make = PARTITIONERS.get(hash_name)
    if make is None or (opened and not text.endswith(")")):
        raise ConfigurationError(
            reason=f"unknown partitioner {name!r}; known are {', '.join(sorted(PARTITIONERS))}, "
            "with a router as in murmur2(until:2f)"
        )
    made = make(partition_count)
    if opened and (chosen := router(text[:-1])) is not made.router:
        made = RoutedPartitioner(made, chosen)
    return KeyspacePartitioner(made, base) if base else made


@lru_cache(maxsize=64)
def _fingerprint(hash_name: str, chosen: KeyRouter) -> bytes:
    hash_of = PARTITIONERS[hash_name](1).hash_of
    return fingerprint_of(chosen.routing_bytes, hash_of, chosen.examples)


def canonical_name(name: str, router_text: str = "") -> str:
    """Return a partitioner's name as it is replicated. ``router_text``: with this router.

    Raises:
        ConfigurationError: no such partitioner or router; or two routers that differ.
    """
    known = partitioner(name, 1)
    if not router_text:
        return known.name
    asked = partitioner(f"{known.hash_name}({router_text})", 1)
    if "(" in name and asked.name != known.name:
        raise ConfigurationError(
            reason=f"partitioner {name} has a router already: it cannot be {router_text} too"
        )
    return asked.name


def check_new(known: Partitioner) -> None:
    """Check that a fingerprint tells the router from another version of it, before the first
    cluster or keyspace is made with it. Those that were made before go on without.

    Raises:
        ConfigurationError: a router from elsewhere names no examples.
    """
    if not is_built_in(known.router) and not known.router.examples:
        raise ConfigurationError(
            reason=f"router {known.router.text!r} names no examples, so that another version of it "
            "might not be noticed: give its class `examples`, some keys that it treats as no other "
            'router does ("Choosing keys" in the documents has one)'
        )


def partitioner_of(keyspace: Keyspace) -> Partitioner:
    """Return the partitioner of a keyspace, once it is sure that it answers as the cluster's does.

    A cluster that was made by a build without fingerprints has none: names are all there is.

    Raises:
        ConfigurationError: this process does not know it.
        PartitionerMismatchError: it is known by that name, and answers otherwise.
    """
    return sure_partitioner(
        keyspace.partitioner,
        keyspace.partition_count,
        keyspace.partitioner_fingerprint,
        keyspace.base,
    )


@lru_cache(maxsize=256)
def sure_partitioner(
    name: str, partition_count: int, fingerprint: bytes, base: int = 0
) -> Partitioner:
    """Return the partitioner of this name, once it is sure that it has this fingerprint (empty: any
    will do). Raises as ``partitioner_of`` does.
    """
    own = partitioner(name, partition_count, base)
    if fingerprint and own.fingerprint != fingerprint:
        raise PartitionerMismatchError(
            cluster_partitioner=name,
            cluster_fingerprint=fingerprint.hex(),
            own_partitioner=own.name,
            own_fingerprint=own.fingerprint.hex(),
        )
    if not is_built_in(own.router):
        _check_forms(own)
    return own


def _check_forms(own: Partitioner) -> None:
    """Refuse a router from elsewhere whose forms contradict each other."""
    keys = [*fixed_keys(), *own.router.examples]
    by_columns = own.partitions_of(keys).tolist()
    for key, found in zip(keys, by_columns, strict=True):
        routing_bytes, of_prefix = own.routing_bytes(key), own.router.of_prefix(key)
        if own.partition_of_routing(routing_bytes) != found or (
            of_prefix is not None and of_prefix != routing_bytes
        ):
            raise ConfigurationError(
                reason=f"router {own.router.text!r} contradicts itself: of the key {key!r} "
                "routing_bytes, spans and of_prefix do not say the same"
            )
