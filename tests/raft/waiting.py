"""Running asyncio tests with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

TIMEOUT_S = 20.0


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
