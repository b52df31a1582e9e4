"""Tests of the overlay of the store: the last write of each key, layer by layer."""

from __future__ import annotations

import random

from koinon_node.core.formats.writer_frames import Writes
from koinon_node.core.writes.overlay import Overlay

ROW_BYTES = 10


def write(*rows: tuple[bytes, bytes | None], database: int = 0) -> list[Writes]:
    return [((database, [key for key, _ in rows], [value for _, value in rows]),)]


def test_last_write_of_a_key_wins_and_a_deletion_is_one() -> None:
    overlay = Overlay()
    assert not overlay
    overlay.add(1, write((b"a", b"1"), (b"b", b"1")), ROW_BYTES)
    overlay.add(2, write((b"a", b"2")), ROW_BYTES)
    overlay.close_layer()
    overlay.add(3, write((b"b", None), (b"c", b"3")), ROW_BYTES)
    assert overlay.find(0, [b"a", b"b", b"x"]) == {b"a": b"2", b"b": None}
    assert overlay.find(1, [b"a"]) == {}
    assert overlay.holds(0, (b"x", b"c"))
    assert not overlay.holds(0, iter([b"x"]))
    assert overlay.last == 3


def test_what_the_store_has_is_let_go_layer_by_layer() -> None:
    overlay = Overlay()
    overlay.add(1, write((b"a", b"1")), ROW_BYTES)
    overlay.add(2, write((b"b", b"2")), ROW_BYTES)
    overlay.close_layer()
    overlay.add(3, write((b"a", b"3")), ROW_BYTES)
    assert overlay.last_closed == 2
    overlay.drop_through(1)  # not all of the layer
    assert overlay.find(0, [b"a", b"b"]) == {b"a": b"3", b"b": b"2"}
    overlay.drop_through(2)
    assert overlay.find(0, [b"a", b"b"]) == {b"a": b"3"}
    assert (overlay.rows, overlay.size) == (1, ROW_BYTES)
    overlay.drop_through(3)  # the newest layer is not closed
    assert overlay.find(0, [b"a"]) == {b"a": b"3"}
    overlay.close_layer()
    overlay.drop_through(3)
    assert not overlay
    assert (overlay.rows, overlay.size, overlay.last) == (0, 0, 3)


def test_store_and_overlay_together_are_what_was_written() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        overlay, written = Overlay(), dict[bytes, bytes | None]()
        stored, closed = dict[bytes, bytes | None](), list[tuple[int, dict[bytes, bytes | None]]]()
        for position in range(1, 60):
            row = b"%d" % rng.randrange(12), rng.choice([None, b"%d" % position])
            overlay.add(position, write(row), ROW_BYTES)
            written.update([row])
            if rng.random() < 0.2:
                assert overlay.close_layer().last == position
                closed.append((position, dict(written)))
            if closed and rng.random() < 0.2:
                through, stored = closed.pop(0)
                overlay.drop_through(through)
            keys = [b"%d" % number for number in range(12)]
            assert {**stored, **overlay.find(0, keys)} == written
            assert bool(overlay) == (overlay.rows > 0)
