"""Those who wait for news of the table go on once each, whatever they do when they go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from koinon.core.retry import RetryAfter
from koinon.core.routing import Router
from koinon.driver.table_refresh import TableRefresh
from tests.client.kit.tables import update

WAITERS = 3_000  # more than Python's stack is deep
LONG = RetryAfter(delay_s=60.0, refresh=False)


def no_link(address: str) -> Any:
    raise AssertionError(f"nothing is asked of {address}")


@contextmanager
def refresh() -> Iterator[tuple[TableRefresh, Router]]:
    router = Router()
    router.on_update(update())
    made = TableRefresh(["host1:1"], router, no_link)
    yield made, router
    made.close()


def news(router: Router) -> int:
    """Let partition 0 change; return the revision."""
    version = router.table_version + 1
    router.on_update(update({0: version % 3 + 1}, version=version, base=version - 1, epoch=version))
    return router.revision


def run(work: Callable[[TableRefresh, Router, Counter[int]], None]) -> Counter[int]:
    async def in_loop() -> Counter[int]:
        resumed: Counter[int] = Counter()
        with refresh() as (made, router):
            work(made, router, resumed)
        return resumed

    return asyncio.run(in_loop())


def test_waiters_that_wake_all_others_are_resumed_once_each() -> None:
    def work(made: TableRefresh, router: Router, resumed: Counter[int]) -> None:
        def resume(number: int) -> None:
            resumed.update([number])
            made.wake()

        for number in range(WAITERS):
            made.on_news(partial(resume, number), LONG, router.revision, [0])
        news(router)
        made.wake()

    assert run(work) == dict.fromkeys(range(WAITERS), 1)


def test_waiter_that_another_one_cancels_is_not_resumed() -> None:
    def work(made: TableRefresh, router: Router, resumed: Counter[int]) -> None:
        cancels: list[Callable[[], object]] = []

        def cancel() -> None:
            cancels[0]()

        made.on_news(cancel, LONG, router.revision, [0])
        cancels.append(made.on_news(lambda: resumed.update([1]), LONG, router.revision, [0]))
        news(router)
        made.wake()

    assert run(work) == {}


@pytest.mark.parametrize("again", [1, 4])
def test_waiter_that_waits_anew_and_has_news_goes_on_in_the_same_wake(again: int) -> None:
    def work(made: TableRefresh, router: Router, resumed: Counter[int]) -> None:
        def resume() -> None:
            resumed.update([0])
            if resumed[0] <= again:
                made.on_news(resume, LONG, router.revision, [0])
                news(router)
                made.wake()

        made.on_news(resume, LONG, router.revision, [0])
        news(router)
        made.wake()

    assert run(work) == {0: again + 1}
