"""Some seconds of bytes from callers that have shown nothing; ``make fuzz`` has an hour of them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from tests.fuzz.strangers import running

SECONDS = 8
ATTACKS_MIN = 30
OPERATIONS_MIN = 20


def test_strangers_reach_no_handler_and_harm_nobody(tmp_path: Path) -> None:
    with running(tmp_path) as strangers:
        end = time.monotonic() + SECONDS
        for number in itertools.count():
            strangers.attack(number)
            has_run = strangers.beside.operations > OPERATIONS_MIN and number > ATTACKS_MIN
            if time.monotonic() > end and has_run:
                break
        strangers.check()
        strangers.check_memory()
