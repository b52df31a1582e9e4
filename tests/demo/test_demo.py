"""The demo, with few rows, as a CI log sees it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from demo.programme import parse_arguments


@pytest.mark.parametrize("rows", ["0", "-1", "x"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_demo_with_no_number_of_rows_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, rows: str, by_variable: bool
) -> None:
    monkeypatch.setenv("KOINON_DEMO_ROWS", rows if by_variable else "")
    monkeypatch.setattr(sys, "argv", ["demo", *([] if by_variable else ["--rows", rows])])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_demo_with_few_rows_shows_every_act_and_ends_well() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "demo", "--rows", "5000"],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"5,000 rows, \d+ checks, all of them hold", ended.stdout)
    assert "kill -9" in ended.stdout
    assert "5,000 are, column by column, those of the file, 0 are not" in ended.stdout
    assert re.search(r"all 41,162 cells .* coefficient of variation 4\.1%", ended.stdout)
    assert "500 more changes: all that it missed" in ended.stdout
    assert "A and C have taken over what B had" in ended.stdout
    assert "6,300 events and riders of 6 cells" in ended.stdout
    assert "300 riders with the driver next to them" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert "Traceback" not in ended.stderr
