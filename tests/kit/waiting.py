"""Waiting for a condition, with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

TIMEOUT_S = 60.0  # of a condition; on a machine that does much else too

T = TypeVar("T")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            await test()

    asyncio.run(bounded())


async def until(what: str, condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.005)


def until_true(what: str, condition: Callable[[], T]) -> T:
    """Return the first true thing that the condition says."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)
    return answer
