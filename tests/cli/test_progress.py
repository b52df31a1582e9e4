"""Progress without a terminal: a line now and then."""

from __future__ import annotations

import pytest

from demo.stage import Stage
from koinon.cli.console import progress_bar
from koinon.cli.console.progress_bar import LINE_EVERY_S, line_at_intervals


def test_line_is_said_every_five_seconds_not_at_every_look() -> None:
    now, said = 100.0, list[str]()
    draw = line_at_intervals(lambda done: f"{done} done", say=said.append, clock=lambda: now)
    for look in range(200):  # ten in a second
        now = 100.0 + look / 10
        draw(look)
    assert said == ["50 done", "100 done", "150 done"]


def test_line_that_does_not_change_is_said_once() -> None:
    now, said = 0.0, list[str]()
    draw = line_at_intervals(lambda text: text, at_once=True, say=said.append, clock=lambda: now)
    for text in ("0 of 9 starting", "0 of 9 starting", "", "0 of 9 staging", "0 of 9 staging"):
        draw(text)
        now += LINE_EVERY_S
    assert said == ["0 of 9 starting", "0 of 9 staging"]


def test_demo_without_a_terminal_says_each_line_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 0.0)
    with Stage().progress("ingesting", 1_500_000) as advance:
        for done, remark in (0, "starting"), (0, "starting"), (0, "staging"), (500_000, "staging"):
            advance(done, remark)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "ingesting: 0 of 1,500,000  starting",
        "ingesting: 0 of 1,500,000  staging",
        "ingesting: 500,000 of 1,500,000  staging",
    ]
