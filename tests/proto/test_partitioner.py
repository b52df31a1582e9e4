"""Every implementation of a partitioner gives the same answer: golden vectors, and each other."""

from __future__ import annotations

from hashlib import md5

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError
from koinon_proto.key_columns import murmur2_of_buffers, slots_of_buffers
from koinon_proto.partitioner import PARTITIONERS, Partitioner, murmur2, partitioner, slot_of

GOLDEN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
MD5_OF_NINE = {b"Alice": 0, b"Bob": 1, b"Mary": 5, b"Philip": 2}
KEY_SLOTS = {
    b"": 0,
    b"123456789": 12739,
    b"somekey": 11058,
    b"{user1000}.following": 3443,
    b"{user1000}.followers": 3443,
    b"foo{}{bar}": 8363,
    b"foo{{bar}}zap": 4015,
    b"foo{bar}{zap}": 5061,
    b"{": 4092,
    b"}": 12090,
    b"{}": 15257,
    b"}{": 12793,
    b"}a{b}": 3300,
    b"a}b{c": 13587,
    b"a{b": 13340,
    b"a{b{c}d": 15725,
    b"{a}": 15495,
    b"{}a": 10875,
    b"{}{a}": 13650,
    b"a{}b{c}": 7353,
    b"{{}}": 4092,
    b"{{a}": 10276,
    b"{a}}": 15495,
    b"x{y}z{w}": 12222,
    b"}}}{{{": 16246,
    b"}{}{a}": 16013,
    b"{\x00}": 0,
    b"\x00": 0,
    b"\xff\xfe\xfd": 287,
    b"{\xff}\x00": 7920,
    b"a{b}c" * 40: 3300,
    b"z" * 255: 5800,
    b"z" * 256: 3566,
    b"{" + b"k" * 300 + b"}tail": 16002,
    b"cl\xc3\xa9{\xc3\xbc}": 9552,
    b"\r\n{\r\n}": 5910,
    b" { } ": 9314,
}
"""What Redis 7.0.15 answers to CLUSTER KEYSLOT."""
NAMES = sorted(PARTITIONERS)
HASHES = sorted(PARTITIONERS.keys() - {"crc16"})  # of any count


def buffers_of(keys: list[bytes], dtype: type = np.int64) -> tuple[np.ndarray, np.ndarray]:
    offsets: np.ndarray = np.cumsum([0, *map(len, keys)]).astype(dtype)
    return np.frombuffer(b"".join(keys), np.uint8), offsets


def hashes_of(keys: list[bytes]) -> np.ndarray:
    return murmur2_of_buffers(*buffers_of(keys))


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_murmur2_golden_vector_matches(key: bytes, expected: int) -> None:
    assert np.uint32(murmur2(key)).view(np.int32) == expected
    assert hashes_of([key]).view(np.int32)[0] == expected
    assert hashes_of([key] * 40).view(np.int32).tolist() == [expected] * 40


def test_murmur2_golden_vectors_in_one_column_match() -> None:
    assert hashes_of(list(GOLDEN)).view(np.int32).tolist() == list(GOLDEN.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("repeat", [1, 100])
def test_partitions_of_golden_keys_agree_in_every_form(name: str, repeat: int) -> None:
    keys = [*GOLDEN, *MD5_OF_NINE, *KEY_SLOTS] * repeat
    p = partitioner(name, 1000 if name in HASHES else 1024)
    expected = [p.partition_of(key) for key in keys]
    for found in every_form(p, keys):
        assert found.dtype == np.uint32
        assert found.tolist() == expected


def every_form(p: Partitioner, keys: list[bytes]) -> list[np.ndarray]:
    return [
        p.partitions_of(keys),
        p.partitions_of(tuple(keys)),
        p.partitions_of_buffers(*buffers_of(keys)),
        p.partitions_of_buffers(*buffers_of(keys, np.int32)),
        p.partitions_of_arrow(pa.array(keys, pa.binary())),
        p.partitions_of_arrow(pa.array(keys, pa.large_binary())),
        p.partitions_of_arrow(pa.chunked_array([keys[:1], keys[1:]], pa.binary())),
        p.partitions_of_arrow(pa.array([b"x" * 3, *keys, b"y"], pa.binary())[1:-1]),
    ]


@pytest.mark.parametrize(("key", "expected"), MD5_OF_NINE.items())
def test_md5_with_nine_partitions_reproduces_the_pattern(key: bytes, expected: int) -> None:
    p = partitioner("md5", 9)
    assert p.partition_of(key) == expected
    assert p.partitions_of([key] * 100).tolist() == [expected] * 100


KEY_LISTS = st.lists(st.binary(max_size=600) | st.binary(max_size=9), max_size=120)


@settings(max_examples=150, deadline=None)
@given(keys=KEY_LISTS, count=st.integers(1, 65_536), name=st.sampled_from(HASHES))
def test_vectorised_any_keys_equals_scalar(keys: list[bytes], count: int, name: str) -> None:
    p = partitioner(name, count)
    expected = [p.partition_of(key) for key in keys]
    assert p.partitions_of(keys).tolist() == expected
    assert p.partitions_of_buffers(*buffers_of(keys)).tolist() == expected
    assert max(expected, default=0) < count


TAGGED_KEYS = st.lists(st.sampled_from([b"{", b"}", b"{}", b"a", b"\x00", b"bc"]), max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(TAGGED_KEYS.map(b"".join) | st.binary(max_size=300), max_size=60),
    around=st.tuples(st.binary(max_size=9), st.binary(max_size=9)),
)
def test_slots_of_columns_any_braces_equal_scalar(
    keys: list[bytes], around: tuple[bytes, bytes]
) -> None:
    before, after = around
    offsets: np.ndarray = np.cumsum([len(before), *map(len, keys)]).astype(np.int64)
    data = np.frombuffer(before + b"".join(keys) + after, np.uint8)
    assert slots_of_buffers(data, offsets).tolist() == [slot_of(key) for key in keys]


@pytest.mark.parametrize(("key", "slot"), KEY_SLOTS.items())
def test_slot_of_is_that_of_redis(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_slots_of_a_column_are_those_of_redis() -> None:
    assert slots_of_buffers(*buffers_of(list(KEY_SLOTS))).tolist() == list(KEY_SLOTS.values())


@pytest.mark.parametrize("count", [1, 2, 1024, 16_384])
def test_crc16_partition_is_an_equal_range_of_slots(count: int) -> None:
    p = partitioner("crc16", count)
    expected = [slot * count // 16_384 for slot in KEY_SLOTS.values()]
    assert [p.partition_of(key) for key in KEY_SLOTS] == expected
    assert p.partitions_of_buffers(*buffers_of(list(KEY_SLOTS))).tolist() == expected


@pytest.mark.parametrize("count", [0, 3, 1000, 32_768])
def test_crc16_count_that_slots_cannot_be_divided_by_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match=str(count)):
        partitioner("crc16", count)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), length=st.integers(0, 600), rows=st.integers(1, 60))
def test_vectorised_equal_lengths_equals_scalar(
    data: st.DataObject, length: int, rows: int
) -> None:
    block = data.draw(st.binary(min_size=length, max_size=length))
    keys = [bytes([i & 255]) + block[1:] if block else b"" for i in range(rows)]
    assert hashes_of(keys).tolist() == [murmur2(key) for key in keys]


@settings(max_examples=80, deadline=None)
@given(number=st.integers(1, 65_536), key=st.binary(max_size=40))
def test_md5_any_key_is_the_absolute_signed_digest(number: int, key: bytes) -> None:
    signed = int.from_bytes(md5(key).digest(), "big", signed=True)
    p = partitioner("md5", number)
    assert p.partition_of(key) == abs(signed) % number
    assert p.partitions_of([key] * 30).tolist() == [abs(signed) % number] * 30


@pytest.mark.parametrize("name", NAMES)
def test_partitions_of_nothing_is_empty(name: str) -> None:
    p = partitioner(name, 8)
    empty = np.empty(0, np.uint8)
    for found in (
        p.partitions_of([]),
        p.partitions_of_buffers(empty, np.zeros(1, np.int32)),
        p.partitions_of_buffers(empty, np.zeros(0, np.int32)),
        p.partitions_of_arrow(pa.array([], pa.binary())),
        p.partitions_of_arrow(pa.chunked_array([], pa.binary())),
        p.partitions_of_arrow(pa.array([b"a"], pa.binary())[1:]),
    ):
        assert found.tolist() == []
        assert found.dtype == np.uint32


@pytest.mark.parametrize("name", NAMES)
def test_partitions_of_blocks_beyond_one_agree(name: str) -> None:
    keys = [b"%d" % i for i in range(70_000)]
    p = partitioner(name, 1024)
    found = p.partitions_of(keys)
    picked = [0, 8_191, 8_192, 32_767, 32_768, 65_535, 65_536, 69_999]
    assert found[picked].tolist() == [p.partition_of(keys[i]) for i in picked]
    assert p.partitions_of_arrow(pa.array(keys, pa.binary())).tolist() == found.tolist()


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(3), pa.binary(), pa.large_binary()]
)
def test_partitions_of_arrow_every_type_and_slice_agrees(kind: pa.DataType) -> None:
    words = ["abc", "xyz", "k01", "k02", "k03"]
    array = pa.array(words, pa.string()).cast(pa.binary()).cast(kind)
    p = partitioner("murmur2", 1024)
    expected = [p.partition_of(word.encode()) for word in words]
    assert p.partitions_of_arrow(array).tolist() == expected
    assert p.partitions_of_arrow(array[1:4]).tolist() == expected[1:4]
    assert p.partitions_of_arrow(array.slice(2)).tolist() == expected[2:]


def test_partitions_of_arrow_null_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="null"):
        partitioner("murmur2", 8).partitions_of_arrow(pa.array([b"a", None], pa.binary()))


def test_partitions_of_arrow_other_type_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="int64"):
        partitioner("murmur2", 8).partitions_of_arrow(pa.array([1, 2]))


@pytest.mark.parametrize("offsets", [[0, 5], [-1, 2], [2, 1], [0, 3, 1]])
@pytest.mark.parametrize("name", NAMES)
def test_partitions_of_buffers_offsets_outside_the_data_are_refused(
    name: str, offsets: list[int]
) -> None:
    data = np.frombuffer(b"abcd", np.uint8)
    with pytest.raises(InvalidArgumentError):
        partitioner(name, 8).partitions_of_buffers(data, np.array(offsets, np.int64))


def test_partitioner_unknown_name_names_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"sha1.*crc16, md5, murmur2"):
        partitioner("sha1", 8)


@pytest.mark.parametrize("count", [0, -1, 65_537])
def test_partitioner_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match=str(count)):
        partitioner("murmur2", count)
