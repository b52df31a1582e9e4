"""Tells a client's observer of operations that have ended."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from koinon.types import Observation, Observer
from koinon_proto.contract.errors import KoinonError

log = logging.getLogger(__name__)

OK = "ok"


class Observing:
    """One client's observer, or none. From any thread."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._failed = False  # it has raised before

    @contextmanager
    def operation(self, name: str, rows: int = 0) -> Iterator[Ending]:
        """Observe what is done inside. It may say more of how it ended."""
        ending = Ending(rows)
        if self._observer is None:
            yield ending
            return
        began = time.perf_counter()
        try:
            yield ending
        except BaseException as error:
            ending.outcome = outcome_of(error)
            raise
        finally:
            seconds = time.perf_counter() - began
            self._tell(Observation(name, ending.outcome, seconds, ending.rows))

    def _tell(self, observation: Observation) -> None:
        assert self._observer is not None
        try:
            self._observer(observation)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("observer failed operation=%s", observation.operation)


class Ending:
    """How an operation has ended."""

    __slots__ = ("outcome", "rows")

    def __init__(self, rows: int) -> None:
        self.outcome = OK
        self.rows = rows


def outcome_of(error: BaseException) -> str:
    """Return what metrics call an operation that ended with ``error``: ``not_primary``."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
        return "cancelled"
    name = type(error).__name__
    if not isinstance(error, KoinonError):
        return name
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Error")).lower()
