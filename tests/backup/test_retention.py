"""Which backups stay."""

from __future__ import annotations

import pytest

from koinon.backup.retention import prune
from tests.backup.made_backups import found_of

DAY_S = 86_400
NOW_S = 100 * DAY_S + 3_600
"""An hour into a day."""


def id_of(number: int) -> str:
    return f"20261128T12{number:04d}Z-00000000"


@pytest.mark.parametrize(
    ("keep_last", "keep_daily", "kept"),
    [
        (1, 0, [7]),
        (3, 0, [5, 6, 7]),
        (0, 1, [7]),
        (0, 2, [6, 7]),
        (0, 4, [2, 4, 6, 7]),
        (2, 3, [4, 6, 7]),
        (100, 0, list(range(8))),
    ],
)
def test_newest_and_the_newest_of_each_day_stay(
    keep_last: int, keep_daily: int, kept: list[int]
) -> None:
    days = [93, 95, 95, 97, 97, 99, 99, 100]  # of backups, the oldest first
    found = [found_of(id_of(n), day * DAY_S + 60 * n) for n, day in enumerate(days)]
    pruning = prune(found, keep_last=keep_last, keep_daily=keep_daily, now_s=NOW_S)
    assert [one.backup_id for one, _ in pruning.kept] == [id_of(n) for n in kept]
    assert len(pruning.gone) == len(found) - len(kept)


def test_unfinished_backup_goes_once_nobody_works_on_it_and_a_damaged_one_stays() -> None:
    damaged = found_of(id_of(0), 1.0, fault="manifest.json was altered")
    given_up = found_of(id_of(1), NOW_S - DAY_S - 1, finished=False)
    at_work = found_of(id_of(2), NOW_S - DAY_S + 1, finished=False)
    pruning = prune([damaged, given_up, at_work], keep_last=1, keep_daily=0, now_s=NOW_S)
    assert pruning.gone == (given_up,)
    assert [one for one, _ in pruning.kept] == [damaged, at_work]
