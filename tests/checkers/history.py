"""The record of what callers asked for and what they were told, which a checker judges.

    history = History()
    operation = history.invoke("client 1", Kind.PUT, b"key", b"value")
    history.ok(operation, version=17)       # or failed, refused, unknown
    violations = check(history)             # see linearizability.py

Every operation that was invoked and never answered is of unknown fate. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

ABSENT_VERSION = 0
NEVER = float("inf")


class Kind(Enum):
    GET = "get"
    PUT = "put"
    DELETE = "delete"


class Outcome(Enum):
    """``REFUSED``: a condition did not hold; ``FAILED``: it certainly had no effect, and says
    nothing else; ``UNKNOWN``: it takes effect at any time from its invocation on, or never.
    """

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One call on one key.

    ``value``: what a put wrote, or what a get found (None: there was no record). ``version``: of
    what was written or found; 0 for a get or a delete that found no record, and of an answer that
    did not name one to a get, None. ``condition``: the version that must be there (0: no record).
    A refused one carries the version that was found instead. ``expires``: the record may go away
    by itself at any time.
    """

    number: int
    caller: str
    kind: Kind
    key: bytes
    invoked_at: float
    value: bytes | None = None
    condition: int | None = None
    expires: bool = False
    outcome: Outcome = Outcome.UNKNOWN
    version: int | None = None
    completed_at: float = NEVER

    @property
    def writes(self) -> bool:
        return self.kind is not Kind.GET

    def __str__(self) -> str:
        what = self.kind.value
        if self.kind is Kind.PUT:
            what += f" {self.value!r}"
        if self.condition is not None:
            what += f" if version {version_text(self.condition)}"
        answer = self.outcome.value
        if self.kind is Kind.GET and self.outcome is Outcome.OK:
            answer = "no record" if self.value is None else repr(self.value)
        if self.version is not None:
            answer += f" version {version_text(self.version)}"
        until = "..." if self.completed_at == NEVER else f"{self.completed_at:.4f}"
        return f"[{self.invoked_at:.4f} {until}] {self.caller}: {what} -> {answer}"


def version_text(version: int) -> str:
    """Return a version as epoch.counter, as Koinon's are made; small ones as they are."""
    epoch, counter = version >> 40, version & ((1 << 40) - 1)
    return f"{epoch}.{counter}" if epoch else str(version)


class History:
    """Operations in the order in which they were invoked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: list[Operation] = []

    def invoke(
        self,
        caller: str,
        kind: Kind,
        key: bytes,
        value: bytes | None = None,
        *,
        condition: int | None = None,
        expires: bool = False,
    ) -> int:
        """Note that a call begins now; return its number. Values of puts should be unique."""
        with self._lock:
            operation = Operation(
                number=len(self._operations),
                caller=caller,
                kind=kind,
                key=key,
                invoked_at=self._clock(),
                value=value,
                condition=condition,
                expires=expires,
            )
            self._operations.append(operation)
            return operation.number

    def ok(self, number: int, *, version: int | None, value: bytes | None = None) -> None:
        """End it as done: a write gave ``version`` (0: nothing to delete), or a get found this."""
        with self._lock:
            before = self._operations[number]
            found = value if before.kind is Kind.GET else before.value
            self._end(number, Outcome.OK, version=version, value=found)

    def refused(self, number: int, *, current_version: int) -> None:
        """End it as refused: its condition did not hold, this version was there."""
        with self._lock:
            self._end(number, Outcome.REFUSED, version=current_version)

    def failed(self, number: int) -> None:
        """End it as failed: it had no effect, and never will."""
        with self._lock:
            self._end(number, Outcome.FAILED)

    def unknown(self, number: int) -> None:
        """End it with its fate unknown; the same as never ending it."""
        with self._lock:
            self._end(number, Outcome.UNKNOWN)

    def _end(self, number: int, outcome: Outcome, **fields: object) -> None:
        ended_at = self._clock() if outcome is not Outcome.UNKNOWN else NEVER
        self._operations[number] = replace(
            self._operations[number],
            outcome=outcome,
            completed_at=ended_at,
            **fields,  # type: ignore[arg-type]
        )

    def operations(self) -> list[Operation]:
        """Return all, as they are now."""
        with self._lock:
            return list(self._operations)
