"""The bytes of the write-ahead log, and what a crash may leave of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.core.formats import log_format, log_recovery
from koinon_node.core.formats.log_format import HEAD_BYTES, Head
from koinon_node.core.formats.log_recovery import CorruptLogError
from koinon_node.core.formats.writer_frames import Writes

LIFE, BLOCK, SEGMENT_BYTES = 7, 512, 64 * 1024
KEYS, VALUES = st.binary(min_size=1, max_size=40), st.none() | st.binary(max_size=700)
WRITES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.tuples(KEYS, VALUES), max_size=5)), max_size=4
).map(
    lambda writes: tuple(
        (database, [key for key, _ in rows], [value for _, value in rows])
        for database, rows in writes
    )
)
TICKETS = st.lists(WRITES, min_size=1, max_size=3)


def flat(tickets: list[Writes]) -> list[tuple[int, list[bytes], list[bytes | None]]]:
    return [tuple(write) for writes in tickets for write in writes]  # type: ignore[misc]


def put(position: int) -> list[Writes]:
    return [((0, [b"key %d" % position], [b"value %d" % position * 40]),)]


class Segment:
    """One segment as a machine has it whose power may fail: what was synced, and what was not."""

    def __init__(self, life: int = LIFE, first: int = 1, before: bytes = b"") -> None:
        self.data = bytearray(before or SEGMENT_BYTES)
        self.unsynced: list[tuple[int, bytes, bytes]] = []
        self.life, self.position, self.synced, self.end = life, first - 1, first - 1, HEAD_BYTES
        self.write(log_format.encode_head(Head(life, first, SEGMENT_BYTES)), 0)

    def write(self, data: bytes | bytearray, offset: int) -> None:
        before = bytes(self.data[offset : offset + len(data)])
        self.unsynced.append((offset, before, bytes(data)))
        self.data[offset : offset + len(data)] = data

    def append(self, *, sync: bool = True, tickets: list[Writes] | None = None) -> int:
        """Append a record; return where it begins."""
        self.position += 1
        tickets = tickets or put(self.position)
        record = log_format.encode_record(tickets, self.life, self.position, self.synced)
        start = self.end
        self.write(record, start)
        self.end += len(record)
        if sync:
            self.unsynced, self.synced = [], self.position
        return start

    def fail_power(self, rng: random.Random) -> None:
        """Let power fail: of what was not synced some blocks are there, the others as before."""
        for offset, before, after in reversed(self.unsynced):
            at = offset
            while at < offset + len(after):
                until = min(at - at % BLOCK + BLOCK, offset + len(after))
                if rng.random() < 0.5:
                    self.data[at:until] = before[at - offset : until - offset]
                at = until


def replayed(*segments: Segment, after: int = 0, life: int = LIFE) -> list[int]:
    """Return the positions that are found, and check that each has what was written there."""
    found = []
    views = [memoryview(bytes(segment.data)) for segment in segments]
    for one in log_recovery.surviving_records(views, life, after):
        assert list(log_format.decode_body(one.body)) == flat(put(one.position))
        found.append(one.position)
    return found


@given(TICKETS)
def test_record_is_read_as_it_was_written(tickets: list[Writes]) -> None:
    record = memoryview(log_format.encode_record(tickets, LIFE, 3, 2))
    assert log_format.record_at(record, 0, LIFE) == (3, 2, len(record))
    body = record[log_format.RECORD_HEAD_BYTES :]
    assert list(log_format.decode_body(body)) == flat(tickets)


@given(TICKETS, st.data())
def test_record_with_any_bit_changed_is_none(tickets: list[Writes], data: st.DataObject) -> None:
    record = bytearray(log_format.encode_record(tickets, LIFE, 3, 2))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert log_format.record_at(memoryview(bytes(record)), 0, LIFE) is None


def test_record_of_another_life_or_cut_short_is_none() -> None:
    record = memoryview(log_format.encode_record(put(1), LIFE, 1, 0))
    assert log_format.record_at(record, 0, LIFE + 1) is None
    assert log_format.record_at(record[:-1], 0, LIFE) is None
    assert log_format.record_at(record, len(record), LIFE) is None


def test_head_is_read_as_it_was_written_and_a_damaged_one_is_none() -> None:
    block = log_format.encode_head(Head(3, 12, SEGMENT_BYTES))
    assert len(block) == HEAD_BYTES
    assert log_format.decode_head(block) == Head(3, 12, SEGMENT_BYTES)
    assert log_format.decode_head(block[:-1]) is None
    assert log_format.decode_head(bytes(HEAD_BYTES)) is None
    assert log_format.decode_head(block[:20] + b"\1" + block[21:]) is None


def test_replay_begins_after_what_the_store_has_and_ends_with_the_log() -> None:
    segment = Segment()
    for _ in range(9):
        segment.append()
    assert replayed(segment) == list(range(1, 10))
    assert replayed(segment, after=4) == [5, 6, 7, 8, 9]
    assert replayed(segment, after=9) == []
    assert replayed(segment, life=LIFE + 1) == []


def test_replay_goes_on_in_the_next_segment_and_passes_over_what_was_there_before() -> None:
    first = Segment()
    for _ in range(4):
        first.append()
    old = Segment(life=LIFE - 1)
    for _ in range(30):
        old.append()
    second = Segment(first=5, before=bytes(old.data))
    for _ in range(3):
        second.append()
    assert replayed(first, second) == [1, 2, 3, 4, 5, 6, 7]
    assert replayed(second, after=4) == [5, 6, 7]


@pytest.mark.parametrize("seed", range(300))
def test_power_failure_leaves_all_that_was_synced_and_nothing_in_part(seed: int) -> None:
    """A segment that was used before, several records without a sync, blocks lost in any order."""
    rng = random.Random(seed)
    old = Segment(life=LIFE - rng.randrange(2))
    for _ in range(rng.randrange(60)):
        old.append()
    segment = Segment(first=61, before=bytes(old.data))
    for _ in range(rng.randrange(20)):
        segment.append()
    for _ in range(rng.randrange(4)):
        segment.append(sync=False)
    segment.fail_power(rng)
    synced = list(range(61, segment.synced + 1))
    found = replayed(segment, after=60)
    assert found[: len(synced)] == synced
    assert found == list(range(61, 61 + len(found)))
    assert len(found) <= segment.position - 60


def test_record_that_was_durable_and_is_damaged_is_told_with_its_place() -> None:
    segment = Segment()
    starts = [segment.append() for _ in range(5)]
    segment.data[starts[2] + 50] ^= 1
    shown = "position 3 is bad, but position 4 shows that it was durable"
    with pytest.raises(CorruptLogError, match=shown) as e:
        replayed(segment)
    assert (e.value.segment, e.value.offset) == (0, starts[2])


def test_last_record_damaged_is_the_torn_tail() -> None:
    segment = Segment()
    starts = [segment.append() for _ in range(5)]
    segment.data[starts[4] + 50] ^= 1
    assert replayed(segment) == [1, 2, 3, 4]


def test_segment_that_is_missing_between_two_is_told() -> None:
    first, third = Segment(), Segment(first=9)
    for _ in range(4):
        first.append()
        third.append()
    with pytest.raises(CorruptLogError, match="position 5 is missing, the next segment begins"):
        replayed(first, third)
    with pytest.raises(CorruptLogError, match="5 is missing, the next segment begins with 9"):
        replayed(third, after=4)


def test_segment_whose_head_is_damaged_is_told_if_it_held_what_was_durable() -> None:
    first, second = Segment(), Segment(first=5)
    for _ in range(4):
        first.append()
    second.append()
    second.data[3] ^= 1
    assert replayed(first, second) == [1, 2, 3, 4]  # what the head and the record are of was torn
    second.append()
    with pytest.raises(CorruptLogError, match="position 5 is bad"):
        replayed(first, second)


def test_segment_that_is_shorter_than_it_was_made_is_told() -> None:
    segment = Segment()
    segment.append()
    del segment.data[-1:]
    with pytest.raises(CorruptLogError, match="it has 65535 bytes, and was made with 65536"):
        replayed(segment)


@pytest.mark.parametrize("seed", range(100))
def test_power_failure_in_a_chain_of_segments_leaves_all_that_was_synced(seed: int) -> None:
    """Segments are used again in the same life, as the store takes over what they hold."""
    rng = random.Random(seed)
    segments = [Segment(first=1)]
    spare: list[Segment] = []
    taken = synced = position = 0
    for _ in range(rng.randrange(2, 9)):
        current = segments[-1]
        for _ in range(rng.randrange(1, 9)):
            current.position = position
            current.synced = synced
            current.append()
            position = synced = position + 1
        taken = rng.randrange(taken, synced + 1)
        while len(segments) > 1 and segments[0].position <= taken:
            spare.append(segments.pop(0))
        used = spare.pop() if spare and rng.random() < 0.7 else None
        following = Segment(first=position + 1, before=bytes(used.data) if used else b"")
        segments.append(following)
    current = segments[-1]
    current.synced = synced
    for _ in range(rng.randrange(3)):
        current.append(sync=False)
    current.fail_power(rng)
    everything = [*segments, *spare]

    def place(segment: Segment) -> tuple[bool, int]:
        head = log_format.decode_head(bytes(segment.data[:HEAD_BYTES]))
        return (head is None, head.first_position if head else 0)

    found = replayed(*sorted(everything, key=place), after=taken)
    assert found[: synced - taken] == list(range(taken + 1, synced + 1))
    assert found == list(range(taken + 1, taken + 1 + len(found)))
