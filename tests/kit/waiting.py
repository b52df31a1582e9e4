"""Waiting for a condition, with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

TIMEOUT_S = 60.0  # of a condition; on a machine that does much else too
POLL_S = 0.002
BLOCKING_POLL_S = 0.01

T = TypeVar("T")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            await test()

    asyncio.run(bounded())


async def until(
    condition: Callable[[], T | None], what: str = "the condition", *, timeout_s: float = TIMEOUT_S
) -> T:
    """Return the first true thing that the condition says; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)
    return answer


def succeeds(attempt: Callable[[], object], attempts: int = 8) -> bool:
    """Tell whether one of some attempts says yes: for what is to happen within a time in which this
    machine, busy with other work, may let no process run. A real defect fails each time.
    """
    return any(attempt() for _ in range(attempts))


def wait_until(
    condition: Callable[[], T | None], what: str = "the condition", *, timeout_s: float = TIMEOUT_S
) -> T:
    """Wait as ``until`` does, in tests without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(BLOCKING_POLL_S)
    return answer
