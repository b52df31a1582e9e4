"""The time that expiry is judged by, under a machine's clock that jumps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.core.wall_time import BELIEVED_AFTER_S, JUMP_MS, Change, WallTime
from koinon_node.state import WallClock
from tests.node.kit import held_writer
from tests.node.kit.held_writer import settle
from tests.node.kit.loads_bench import LoadsBench, with_loads

START_MS = 1_700_000_000_000.0
YEAR_MS = 365 * 86_400_000.0
SOON_S = BELIEVED_AFTER_S + 1


class Machine:
    """A machine's two clocks, and what is believed of them."""

    def __init__(self) -> None:
        self.boot_s = 50.0
        self.off_ms = 0.0
        self.clock = WallClock(
            lambda: int((START_MS + self.boot_s * 1000 + self.off_ms) * 1e6), lambda: self.boot_s
        )
        self.clock.now_ms()

    def behind_ms(self) -> float:
        """Return how far the believed time is behind the right one."""
        return START_MS + self.boot_s * 1000 - self.clock.now_ms()

    def jumps(self, off_ms: float) -> None:
        """Set the machine's clock, so far from the right time; it is looked at right then."""
        self.off_ms = off_ms
        self.clock.now_ms()

    def passes(self, seconds: float, *, looks: int = 20) -> None:
        for _ in range(looks):
            self.boot_s += seconds / looks
            self.clock.now_ms()


def test_jump_of_a_year_that_does_not_last_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was: expiry a year ahead for as long as the process lived."""
    machine = Machine()
    for off_ms in (YEAR_MS, -YEAR_MS):
        machine.jumps(off_ms)
        machine.passes(BELIEVED_AFTER_S - 10)
        assert abs(machine.behind_ms()) < 2
        machine.jumps(0)
        machine.passes(60)
        assert abs(machine.behind_ms()) < 2
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["is=doubted" in text for text in told] == [True, False] * 2
    assert ["is=taken_back" in text for text in told] == [False, True] * 2


@pytest.mark.parametrize("off_ms", [YEAR_MS, -YEAR_MS, 2.0 * JUMP_MS])
def test_jump_that_lasts_is_believed_and_taken_back_when_the_clock_is_set_right(
    off_ms: float,
) -> None:
    machine = Machine()
    machine.jumps(off_ms)
    machine.passes(SOON_S)
    assert abs(machine.behind_ms() + off_ms) < 2
    machine.jumps(0)
    machine.passes(BELIEVED_AFTER_S - 10)
    assert abs(machine.behind_ms() + off_ms) < 2
    machine.passes(20)
    assert abs(machine.behind_ms()) < 2


def test_clock_that_jumps_about_is_not_believed() -> None:
    machine = Machine()
    for n in range(40):
        machine.jumps(YEAR_MS + 3 * JUMP_MS * n)
        machine.passes(BELIEVED_AFTER_S / 4)
        assert abs(machine.behind_ms()) < 2


def test_small_error_is_made_good_gradually_and_time_never_stops_or_goes_back() -> None:
    machine = Machine()
    for off_ms in (5_000.0, -5_000.0):
        machine.jumps(off_ms)
        before = machine.clock.now_ms()
        for _ in range(4):
            machine.passes(1)
            now = machine.clock.now_ms()
            assert 499 <= now - before <= 1_501
            before = now
        machine.passes(20)
        assert abs(machine.behind_ms() + off_ms) < 2


@given(
    st.lists(
        st.tuples(
            st.floats(0, 2 * BELIEVED_AFTER_S),  # passes
            st.floats(-YEAR_MS, YEAR_MS) | st.floats(-2 * JUMP_MS, 2 * JUMP_MS),  # is off
            st.booleans(),  # held
            st.booleans(),  # told
        ),
        max_size=30,
    )
)
def test_time_goes_back_by_believed_steps_only_never_while_held_nor_before_what_was_told(
    steps: list[tuple[float, float, bool, bool]],
) -> None:
    time, boot_s = WallTime(), 0.0
    time.look(START_MS, boot_s, held=False)
    for passed_s, off_ms, held, told in steps:
        boot_s += passed_s
        before_ms = time.now_ms
        change = time.look(START_MS + boot_s * 1000 + off_ms, boot_s, held=held)
        gone_ms = time.now_ms - before_ms
        if held or change is not Change.BELIEVED:
            assert gone_ms >= passed_s * 500 - 1
        assert time.now_ms >= time.told_ms
        if told:
            time.told_ms = time.now_ms


# --- what a read has told ----------------------------------------------------------------------


READS: dict[str, Callable[[LoadsBench], Coroutine[Any, Any, Any]]] = {
    "get": lambda bench: bench.get(b"k"),
    "scan": lambda bench: bench.scan(0),
    "columns": lambda bench: bench.read_columns(0),
}
every_read = pytest.mark.parametrize("read", READS.values(), ids=READS.keys())


def with_machine(directory: Path, use: Callable[[LoadsBench, Machine], Awaitable[None]]) -> None:
    """Run ``use`` with a record that expires in half a year, and a clock that says it has."""
    machine = Machine()

    async def run(bench: LoadsBench) -> None:
        await bench.put(b"k", ttl_ms=int(YEAR_MS / 2))
        machine.jumps(YEAR_MS)
        machine.passes(SOON_S)
        await use(bench, machine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_writer, "SetClock", lambda: machine.clock)
        with_loads(directory, run)


def set_right(machine: Machine) -> None:
    machine.jumps(0)
    machine.passes(SOON_S)


def test_clock_set_right_brings_back_what_nobody_was_told_of(tmp_path: Path) -> None:
    async def use(bench: LoadsBench, machine: Machine) -> None:
        set_right(machine)
        assert (await bench.get(b"k")).values == [b"v"]

    with_machine(tmp_path, use)


@pytest.mark.parametrize("why", ["full", "too few replicas"])
@every_read
def test_clock_set_right_serves_nothing_that_was_told_as_expired_and_could_not_be_removed(
    tmp_path: Path, why: str, read: Callable[[LoadsBench], Coroutine[Any, Any, Any]]
) -> None:
    async def use(bench: LoadsBench, machine: Machine) -> None:
        if why == "full":
            bench.channel.failing = {0: "no room"}
        else:
            bench.state.too_few[0] = bench.state.any_too_few = True
        for _ in range(2):
            assert b"v" not in (await read(bench)).values
            set_right(machine)
            bench.channel.failing = {0: "no room"}
        assert machine.clock.telling == 0

    with_machine(tmp_path, use)


@every_read
def test_clock_does_not_go_back_under_a_read_that_waits_for_a_removal(
    tmp_path: Path, read: Callable[[LoadsBench], Coroutine[Any, Any, Any]]
) -> None:
    async def use(bench: LoadsBench, machine: Machine) -> None:
        bench.channel.held = True
        reading = asyncio.ensure_future(read(bench))
        await settle(reading)
        set_right(machine)
        assert machine.behind_ms() < -YEAR_MS / 2
        bench.channel.release()
        assert b"v" not in (await reading).values
        machine.passes(1)
        assert abs(machine.behind_ms()) < 2
        assert (await bench.get(b"k")).missing == [0]

    with_machine(tmp_path, use)
