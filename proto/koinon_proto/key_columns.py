"""Hashes columns of keys: the vectorised half of ``partitioner``, which imports it with the first
column, as most programs that use one key at a time never need NumPy.

murmur2 works on words across keys: all keys of a block take their j-th word in one NumPy step. Keys
of one length need no sorting; otherwise a block is ordered by word count, longest first, so that
those which still have a j-th word are a prefix. Only the key's own bytes are read, never beyond
them. crc16 goes likewise, two bytes a step by a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import md5
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import SLOT_COUNT
from koinon_proto.router_columns import hash_tags

_SEED: Final = 0x9747B28C
_M: Final = np.uint32(0x5BD1E995)

_SLOT_MASK: Final = np.uint16(SLOT_COUNT - 1)
_CRC_POLYNOMIAL: Final = 0x1021

_EQUAL_BLOCK_ROWS: Final = 8_192
_MIXED_BLOCK_ROWS: Final = 32_768
_ROUTED_BLOCK_ROWS: Final = 16_384
_LIST_BLOCK_ROWS: Final = 65_536


def numbers(partition_ids: Sequence[int]) -> NDArray[np.uint32]:
    """Return a list of partitions as a column."""
    return np.array(partition_ids, np.uint32)


def joined(columns: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return the columns end to end."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns) if columns else np.empty(0, np.uint32)


# --- crc16 ---------------------------------------------------------------------------------------


def slots_of_buffers(
    data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
) -> NDArray[np.uint16]:
    """Return the slot of ``data[offsets[i]:offsets[i + 1]]`` for every i.

    Raises:
        InvalidArgumentError: the offsets descend, or reach outside ``data``.
    """
    check_buffers(data, offsets)
    rows = max(len(offsets) - 1, 0)
    out = np.empty(rows, np.uint16)
    for a in range(0, rows, _MIXED_BLOCK_ROWS):
        b = min(rows, a + _MIXED_BLOCK_ROWS)
        bounds = offsets[a : b + 1].astype(np.int64, copy=False)
        out[a:b] = crc16_of_spans(data, *hash_tags(data, bounds[:-1], bounds[1:]))
    out &= _SLOT_MASK
    return out


def crc16_of_spans(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint16]:
    """Return CRC16/XMODEM of ``data[starts[i]:ends[i]]`` for every i, longest first."""
    lengths = ends - starts
    order = None
    if int(lengths.min()) != int(lengths.max()):
        order = np.argsort(-lengths, kind="stable")
        starts, lengths = starts[order], lengths[order]
    crc_of_pair = _crc_of_pairs()
    crc = np.zeros(len(lengths), np.uint16)
    pairs = lengths >> 1
    if pairs[0]:
        pair_at = np.ndarray((data.size - 1,), ">u2", data, 0, (1,))  # at every byte, overlapping
        with_pair = len(pairs) - np.searchsorted(pairs[::-1], np.arange(int(pairs[0])), "right")
        for j, n in enumerate(with_pair.tolist()):  # the first n keys have a j-th pair of bytes
            crc[:n] = crc_of_pair[crc[:n] ^ pair_at[starts[:n] + 2 * j]]
    odd = np.flatnonzero(lengths & 1)
    if odd.size:
        before = crc[odd]
        byte = data[(starts + lengths)[odd] - 1]
        crc[odd] = (before << np.uint16(8)) ^ crc_of_pair[(before >> np.uint16(8)) ^ byte]
    if order is None:
        return crc
    out = np.empty_like(crc)
    out[order] = crc
    return out


@cache
def _crc_of_pairs() -> NDArray[np.uint16]:
    """Return the CRC of each pair of bytes (of a byte that follows a zero, in the first 256)."""
    crc = np.arange(1 << 16, dtype=np.uint16)
    for _ in range(16):
        carry = crc >> np.uint16(15)
        crc = (crc << np.uint16(1)) ^ (carry * np.uint16(_CRC_POLYNOMIAL))
    return crc


# --- murmur2 -------------------------------------------------------------------------------------


def murmur2_of_buffers(
    data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]
) -> NDArray[np.uint32]:
    """Return murmur2 of ``data[offsets[i]:offsets[i + 1]]`` for every i.

    Raises:
        InvalidArgumentError: the offsets descend, or reach outside ``data``.
    """
    check_buffers(data, offsets)
    rows = len(offsets) - 1
    out = np.empty(max(rows, 0), np.uint32)
    if rows <= 0:
        return out
    starts = offsets[:-1].astype(np.int64, copy=False)
    lengths: NDArray[np.int64] = np.diff(offsets).astype(np.int64, copy=False)
    length = int(lengths[0])
    if int(lengths.min()) == length == int(lengths.max()):
        for a in range(0, rows, _EQUAL_BLOCK_ROWS):
            b = min(rows, a + _EQUAL_BLOCK_ROWS)
            out[a:b] = _hash_equal(data, int(starts[a]), b - a, length, length)
        return out
    for a in range(0, rows, _MIXED_BLOCK_ROWS):
        b = min(rows, a + _MIXED_BLOCK_ROWS)
        out[a:b] = _hash_mixed(data, starts[a:b], lengths[a:b])
    return out


def murmur2_of_spans(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Return murmur2 of ``data[starts[i]:ends[i]]`` for every i, of a block of at least one."""
    lengths = ends - starts
    length = int(lengths[0])
    if int(lengths.min()) == length == int(lengths.max()):
        rows, begin = len(starts), int(starts[0])
        stride = int(starts[1]) - begin if rows > 1 else length
        steady = rows < 3 or bool((np.diff(starts) == stride).all())
        if steady and stride >= length:
            return _hash_equal(data, begin, rows, length, stride)
    return _hash_mixed(data, starts, lengths)


def _hash_equal(
    data: NDArray[np.uint8], start: int, rows: int, length: int, stride: int
) -> NDArray[np.uint32]:
    """Hash ``rows`` keys of one length; the first lies at ``start``, each other ``stride`` bytes
    behind the one before.
    """
    words, tail_bytes = length >> 2, length & 3
    h = np.full(rows, _SEED ^ length, np.uint32)
    if words:
        columns = np.ndarray((rows, words), "<u4", data, start, (stride, 4))
        for j in range(words):
            _mix_word(h, columns[:, j].astype(np.uint32))
    if tail_bytes:
        keys = np.ndarray((rows, length), np.uint8, data, start, (stride, 1))
        tail = np.zeros(rows, np.uint32)
        for j in range(tail_bytes):
            tail |= keys[:, 4 * words + j].astype(np.uint32) << np.uint32(8 * j)
        h ^= tail
        h *= _M
    return _finish(h)


def _hash_mixed(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Hash keys of any lengths, longest first, so that each step works on a prefix."""
    small = int(lengths.max()) <= 0xFFFF  # 16-bit keys are sorted by radix
    longest = (lengths.max() - lengths).astype(np.uint16 if small else np.int64)
    order = np.argsort(longest, kind="stable")
    starts, lengths = starts[order], lengths[order]
    words, tails = lengths >> 2, lengths & 3
    h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    if data.size >= 4:
        word_at = np.ndarray((data.size - 3,), "<u4", data, 0, (1,))  # at every byte, overlapping
        ends = len(words) - np.searchsorted(words[::-1], np.arange(int(words[0])), side="right")
        for j, n in enumerate(ends.tolist()):  # the first n keys have a j-th word
            _mix_word(h[:n], word_at[starts[:n] + 4 * j])
    with_tail = np.flatnonzero(tails)
    if with_tail.size:
        h[with_tail] = (h[with_tail] ^ _tails(data, starts, words, tails, with_tail)) * _M
    out = np.empty_like(h)
    out[order] = _finish(h)
    return out


def _tails(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    words: NDArray[np.int64],
    tails: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """Return the last one to three bytes of the keys at ``rows`` as little-endian numbers."""
    at, count = (starts + 4 * words)[rows], tails[rows]
    tail: NDArray[np.uint32] = data[at].astype(np.uint32)
    for j in (1, 2):
        longer = np.flatnonzero(count > j)
        tail[longer] |= data[at[longer] + j].astype(np.uint32) << np.uint32(8 * j)
    return tail


def _mix_word(h: NDArray[np.uint32], k: NDArray[np.uint32]) -> None:
    """Mix one word a key into ``h``; ``k`` is overwritten."""
    k *= _M
    k ^= k >> np.uint32(24)
    k *= _M
    h *= _M
    h ^= k


def _finish(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    h ^= h >> np.uint32(13)
    h *= _M
    h ^= h >> np.uint32(15)
    return h


def reduce_positive(hashes: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Return ``(hash & 0x7fffffff) mod count`` of each; the column is overwritten."""
    if count & (count - 1) == 0:  # a power of two; the sign bit is never in the mask
        hashes &= np.uint32(count - 1)
        return hashes
    hashes &= np.uint32(0x7FFFFFFF)
    hashes %= np.uint32(count)
    return hashes


# --- md5 -----------------------------------------------------------------------------------------


def md5_of_buffers(data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]) -> bytes:
    """Return the digests of ``data[offsets[i]:offsets[i + 1]]``, 16 bytes each, end to end.

    Raises:
        InvalidArgumentError: the offsets descend, or reach outside ``data``.
    """
    check_buffers(data, offsets)
    return _digests(data, pairwise(offsets.tolist()))


def md5_of_spans(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> bytes:
    """Return the digests of ``data[starts[i]:ends[i]]``, 16 bytes each, end to end."""
    return _digests(data, zip(starts.tolist(), ends.tolist(), strict=True))


def _digests(data: NDArray[np.uint8], spans: Iterable[tuple[int, int]]) -> bytes:
    view = np.ascontiguousarray(data).data
    return b"".join([md5(view[a:b], usedforsecurity=False).digest() for a, b in spans])


def reduce_digests(digests: bytes, count: int) -> NDArray[np.uint32]:
    """Reduce the absolute values of signed 16-byte digests modulo ``count``, word by word (Horner),
    in 64 bits.
    """
    words = np.frombuffer(digests, ">u4").reshape(-1, 4).astype(np.uint64)
    divisor = np.uint64(count)
    rest = np.zeros(len(words), np.uint64)
    for j in range(4):
        rest = ((rest << np.uint64(32)) | words[:, j]) % divisor
    # A digest u with the sign bit stands for u - 2**128: its absolute value is 2**128 - u.
    wrap = np.uint64(pow(2, 128, count)) + divisor
    negative = words[:, 0] >= 1 << 31
    return np.where(negative, (wrap - rest) % divisor, rest).astype(np.uint32)


# --- columns -------------------------------------------------------------------------------------


def check_buffers(data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]) -> None:
    """Refuse offsets that descend, or that reach outside ``data``."""
    if len(offsets) < 2:
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 0 or last > data.size or bool((offsets[1:] < offsets[:-1]).any()):
        raise InvalidArgumentError(
            field="offsets",
            reason="must ascend inside the data",
            limit=data.size,
            actual=max(last, 0),
        )


def blocks(
    offsets: NDArray[np.integer[Any]],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield where keys start and end, a bounded block of keys at a time."""
    for a in range(0, len(offsets) - 1, _ROUTED_BLOCK_ROWS):
        bounds = offsets[a : a + _ROUTED_BLOCK_ROWS + 1].astype(np.int64, copy=False)
        yield bounds[:-1], bounds[1:]


def joined_blocks(
    keys: Sequence[bytes],
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Join lists of keys into data and offsets, a bounded block at a time."""
    for a in range(0, len(keys), _LIST_BLOCK_ROWS):
        block = keys if len(keys) <= _LIST_BLOCK_ROWS else keys[a : a + _LIST_BLOCK_ROWS]
        offsets = np.zeros(len(block) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, block), np.int64, len(block)), out=offsets[1:])
        yield np.frombuffer(b"".join(block), np.uint8), offsets


def arrow_buffers(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.integer[Any]]]:
    """Return data and offsets of one Arrow array as views."""
    kind, rows, start = str(array.type), len(array), int(array.offset)
    if array.null_count:
        raise InvalidArgumentError(
            field="keys", reason="a key cannot be null", limit=0, actual=int(array.null_count)
        )
    buffers = array.buffers()
    data = _bytes_of(buffers[-1])
    if kind.startswith("fixed_size_binary"):
        width = int(array.type.byte_width)
        return data, np.arange(start, start + rows + 1, dtype=np.int64) * width
    if kind not in {"binary", "string", "large_binary", "large_string"}:
        raise InvalidArgumentError(
            field="keys", reason=f"a column of type {kind} holds no keys; cast it to binary"
        )
    if rows == 0:
        return data, np.zeros(1, np.int64)
    width_type: type[np.integer[Any]] = np.int64 if kind.startswith("large") else np.int32
    offsets: NDArray[np.integer[Any]] = np.frombuffer(buffers[1], width_type, start + rows + 1)
    return data, offsets[start:]


def _bytes_of(buffer: Any) -> NDArray[np.uint8]:
    if buffer is None or not len(buffer):
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)
