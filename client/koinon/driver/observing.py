"""Tells a client's observer of operations that have ended, and of calls that ended before there was
one: bad arguments, a client that is closed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from koinon.types import Observation, Observer
from koinon_proto.contract.errors import KoinonError

log = logging.getLogger(__name__)

OK = "ok"
_TOLD = "_koinon_told"  # a mark on errors of which the observer has heard
_CALLS = {
    **dict.fromkeys(("get", "get_entry", "put", "delete", "exists"), 1),
    **dict.fromkeys(("increment", "touch", "get_or_put"), 1),
    **dict.fromkeys(("get_many", "get_entries", "put_many", "delete_many"), 0),
}
"""A client's methods, and the rows that are told of a call which ended before they were counted."""


class Observing:
    """One client's observer, or none. From any thread."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._failed = False  # it has raised before
        self.now = time.perf_counter

    @contextmanager
    def operation(self, name: str, rows: int = 0, began: float | None = None) -> Iterator[Ending]:
        """Observe what is done inside. It may say more of how it ended. ``began`` says when, by
        ``now``, if that was before.
        """
        ending = Ending(rows)
        if self._observer is None:
            yield ending
            return
        began = self.now() if began is None else began
        try:
            yield ending
        except BaseException as error:
            ending.outcome = outcome_of(error)
            setattr(error, _TOLD, True)
            raise
        finally:
            if not ending.goes_on:
                seconds = self.now() - began
                self._tell(Observation(name, ending.outcome, seconds, ending.rows))

    @contextmanager
    def call(self, name: str, rows: int = 0) -> Iterator[None]:
        """Report a call that fails, unless an operation inside it has been reported already."""
        if self._observer is None:
            yield
            return
        began = self.now()
        try:
            yield
        except BaseException as error:
            if not hasattr(error, _TOLD):
                seconds = self.now() - began
                self._tell(Observation(name, outcome_of(error), seconds, rows))
            raise

    def watch(self, client: object) -> None:
        """Let the observer hear of every call of the client's methods that fails."""
        for name, rows in _CALLS.items():
            setattr(client, name, self._watched(getattr(client, name), name, rows))

    def _watched(self, method: Callable[..., Any], name: str, rows: int) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.call(name, rows):
                return method(*args, **kwargs)

        @functools.wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with self.call(name, rows):
                return await method(*args, **kwargs)

        return call_async if inspect.iscoroutinefunction(method) else call

    def _tell(self, observation: Observation) -> None:
        assert self._observer is not None
        try:
            self._observer(observation)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("observer failed operation=%s", observation.operation)


class Ending:
    """The outcome of an operation."""

    __slots__ = ("goes_on", "outcome", "rows")

    def __init__(self, rows: int) -> None:
        self.outcome = OK
        self.rows = rows
        self.goes_on = False  # it has not ended: who goes on with it tells of it


def outcome_of(error: BaseException) -> str:
    """Return what metrics call an operation that ended with ``error``: ``not_primary``."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
        return "cancelled"
    name = type(error).__name__
    if not isinstance(error, KoinonError):
        return name
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Error")).lower()
