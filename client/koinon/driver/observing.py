"""Reports operations to a client's observer when they end, and also calls that failed before an
operation began: bad arguments, a closed client.
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
_TOLD = "_koinon_told"  # an attribute of errors that were already reported
_CALLS = {
    **dict.fromkeys(("get", "get_entry", "put", "delete", "exists"), 1),
    **dict.fromkeys(("increment", "touch", "get_or_put"), 1),
    **dict.fromkeys(("get_many", "get_entries", "put_many", "delete_many"), 0),
}
"""A client's methods, with the row count to report if a call fails before its rows are counted."""


class Observing:
    """One client's observer, or none. Usable from any thread."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._failed = False  # the observer has raised before
        self.now = time.perf_counter

    @contextmanager
    def operation(self, name: str, rows: int = 0, began: float | None = None) -> Iterator[Ending]:
        """Report the operation inside this context when it ends; the ``Ending`` can be given more
        facts. ``began``: its start by ``now``, if that was before the context.
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
        """Report a call that fails, unless an operation inside it was already reported."""
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
        """Wrap the client's methods so that the observer gets every failed call."""
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
        self.goes_on = False  # the operation continues elsewhere, and is reported there


def outcome_of(error: BaseException) -> str:
    """Return the name that metrics use for an error: ``not_primary``."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
        return "cancelled"
    name = type(error).__name__
    if not isinstance(error, KoinonError):
        return name
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Error")).lower()
