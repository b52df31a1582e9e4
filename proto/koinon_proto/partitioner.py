"""Which partition a key belongs to. Every implementation here gives the same answer for a key.

``murmur2`` is Kafka's: 32-bit MurmurHash2 (Austin Appleby), seed 0x9747b28c, little-endian words,
then ``(hash & 0x7fffffff) mod count``. ``md5`` is ``|signed 128-bit big-endian digest| mod count``.
``crc16`` is Redis Cluster's: the key's hash slot (``slot_of``). Each partition has an equal
contiguous range of slots, ``slot * count // 16384``; the count is a power of two.

Each has a scalar form for one key and a vectorised form over columns: a list of ``bytes``, a data
buffer with offsets, or an Arrow array. The latter is ``key_columns``, which is imported with the
first column: a program that uses one key at a time never needs NumPy.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from hashlib import md5
from typing import TYPE_CHECKING, Any, ClassVar, Final

from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import SLOT_COUNT, partition_count_fault

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
    """Maps keys to ``0 .. partition_count - 1``. Immutable; safe to share between threads."""

    name: ClassVar[str]

    def __init__(self, partition_count: int) -> None:
        fault = partition_count_fault(self.name, partition_count)
        if fault:
            raise ConfigurationError(reason=f"partition_count {partition_count}: {fault}")
        self.partition_count = partition_count

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


class Murmur2Partitioner(Partitioner):
    """Kafka's default partitioner for keyed records."""

    name = "murmur2"

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


class Md5Partitioner(Partitioner):
    """|signed 128-bit big-endian MD5 digest| mod count. Not for secrecy, only for spread."""

    name = "md5"

    def partition_of(self, key: bytes) -> int:
        digest = md5(key, usedforsecurity=False).digest()
        return abs(int.from_bytes(digest, "big", signed=True)) % self.partition_count

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


class Crc16Partitioner(Partitioner):
    """Redis Cluster's hash slots, an equal contiguous range of them a partition."""

    name = "crc16"

    def __init__(self, partition_count: int) -> None:
        super().__init__(partition_count)
        self._shift = (SLOT_COUNT // partition_count).bit_length() - 1

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


PARTITIONERS: Final[dict[str, Callable[[int], Partitioner]]] = {
    cls.name: cls for cls in (Murmur2Partitioner, Md5Partitioner, Crc16Partitioner)
}


def partitioner(name: str, partition_count: int) -> Partitioner:
    """Return the partitioner of this name.

    Raises:
        ConfigurationError: no such partitioner, or a count out of range.
    """
    make = PARTITIONERS.get(name)
    if make is None:
        raise ConfigurationError(
            reason=f"unknown partitioner {name!r}; known are {', '.join(sorted(PARTITIONERS))}"
        )
    return make(partition_count)
