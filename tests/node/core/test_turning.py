"""Tests of when the event loop counts as standing still."""

from __future__ import annotations

from koinon_node.core.membership.lease import LoopWatchdog


def looks(watch: LoopWatchdog, answers: int, begin: float, end: float, step: float = 0.2) -> float:
    """Look every ``step`` seconds from ``begin`` to ``end``; return what the last look says."""
    silent_s, now = 0.0, begin
    while now <= end:
        silent_s = watch.silent_s(answers, now)
        now += step
    return silent_s


def test_loop_that_answers_is_never_silent() -> None:
    watch = LoopWatchdog(100.0)
    assert max(watch.silent_s(n, 100.0 + 0.2 * n) for n in range(1, 50)) == 0.0


def test_loop_that_does_not_answer_is_silent_for_as_long() -> None:
    watch = LoopWatchdog(100.0)
    watch.silent_s(1, 100.0)
    assert 2.7 < looks(watch, 1, 100.2, 103.0) < 3.1
    assert watch.silent_s(2, 103.2) == 0.0  # it turns again


def test_pause_of_the_whole_process_is_not_the_loops_silence() -> None:
    watch = LoopWatchdog(100.0)
    watch.silent_s(1, 100.0)
    assert watch.silent_s(1, 400.0) <= 0.5
