"""Rounds: what is due now and then is due together."""

from __future__ import annotations

import pytest

from koinon_proto.process.rounds import until_round_s


@pytest.mark.parametrize(
    ("now", "wait_s"),
    [
        (10.0, 0.2),
        (10.05, 0.15),
        (10.17, 0.03),
        (10.19, 0.21),  # too near: a timer that came early would have its round twice
        (10.2001, 0.1999),
    ],
)
def test_round_is_the_next_multiple_unless_that_is_too_near(now: float, wait_s: float) -> None:
    assert until_round_s(now, 0.2) == pytest.approx(wait_s)


def test_works_of_one_process_wake_it_together_whenever_each_began() -> None:
    began = (10.0, 10.013, 10.07, 10.149)
    rounds = {round(now + until_round_s(now, 0.2), 6) for now in began}
    assert rounds == {10.2}
    assert round(10.2 + until_round_s(10.2004, 1.0), 3) == 11.0, "those of a multiple come along"
