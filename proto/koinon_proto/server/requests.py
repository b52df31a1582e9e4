"""Counts, times and logs the requests that a server handles: all requests at debug level, slow
requests at a higher one.

``rpc.typed_errors`` brings every unary handler here; streams are only counted while they last. The
numbers are plain, for the event loop alone; ``request_metrics`` tells them.

What a reply refuses in part (``refusals``, ``row_errors``) counts as its first refusal.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from time import perf_counter
from typing import Any

from koinon_proto.contract import request_ids
from koinon_proto.contract.request_ids import Handling
from koinon_proto.process.logs import LinesPerSecond

log = logging.getLogger(__name__)

BOUNDS_S = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
OK = "ok"
CANCELLED = "cancelled"
INTERNAL = "internal"
SLOW_MS = 1_000
SLOW_LINES_MAX = 20
"""A second."""

_REFUSING_FIELDS = ("refusals", "row_errors")


class Method:
    """The requests of one method of one service."""

    def __init__(self, service: str, name: str, *, stream: bool) -> None:
        self.service = service
        self.name = name
        self.stream = stream
        self.in_progress = 0
        self.outcomes: dict[str, int] = {}
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self._refusing: tuple[str, ...] | None = None  # of the reply; not known before the first

    @property
    def path(self) -> str:
        """The method as logs name it: ``KeyValue/BatchGet``."""
        return f"{self.service}/{self.name}"

    def ended(self, elapsed_s: float, outcome: str = OK, count: int = 1) -> None:
        """Count requests, each of which took so long."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        if not self.stream:
            self.seconds += elapsed_s * count
            self.buckets[bisect_left(BOUNDS_S, elapsed_s)] += count

    def refusals(self, reply: Any) -> list[Any]:
        """Return the errors (wire form) that the reply has in place of answers."""
        if self._refusing is None:
            known = getattr(getattr(reply, "DESCRIPTOR", None), "fields_by_name", {})
            self._refusing = tuple(
                name
                for name in _REFUSING_FIELDS
                if name in known and "error" in known[name].message_type.fields_by_name
            )
        found: list[Any] = []
        for name in self._refusing:
            if refused := getattr(reply, name):
                found += [one.error for one in refused]
        return found


class Request:
    """One request, from its arrival to its end."""

    __slots__ = ("_began", "_context", "_handled", "_method", "_request")

    def __init__(self, method: Method, request: Any, context: Any) -> None:
        self._method = method
        self._request = request
        self._context = context
        sent = ""
        for entry in context.invocation_metadata():
            if entry[0] == request_ids.KEY:
                sent = entry[1]
        self._handled = Handling(sent)
        request_ids.handling.set(self._handled)  # this task's own
        method.in_progress += 1
        self._began = perf_counter()

    def answered(self, reply: Any) -> None:
        """End the request with a reply."""
        method = self._method
        if (method._refusing or method._refusing is None) and (refused := method.refusals(reply)):
            outcome = refused[0].WhichOneof("kind") or INTERNAL
            self._end(outcome, reply, refused[0].message, len(refused))
        else:
            self._end(OK, reply)

    def failed(self, outcome: str, error: BaseException) -> None:
        """End the request with an error."""
        self._end(outcome, None, error)

    def _end(
        self, outcome: str, reply: Any, error: BaseException | str = "", refusals: int = 0
    ) -> None:
        method = self._method
        elapsed_s = perf_counter() - self._began
        method.in_progress -= 1
        method.ended(elapsed_s, outcome)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request ended method=%s took_ms=%.2f outcome=%s refusals=%d error=%s peer=%s",
                method.path,
                1000 * elapsed_s,
                outcome,
                refusals,
                error,
                self._context.peer(),
            )
        if not method.stream and elapsed_s >= slow.after_s and slow.may_log():
            self._log_slow(elapsed_s, outcome, reply)
        self._handled.sent = ""

    def _log_slow(self, elapsed_s: float, outcome: str, reply: Any) -> None:
        log.warning(
            "slow request method=%s took_ms=%.1f outcome=%s rows=%d bytes_in=%d bytes_out=%d "
            "peer=%s unlogged=%d",
            self._method.path,
            1000 * elapsed_s,
            outcome,
            len(getattr(self._request, "keys", ())),
            self._request.ByteSize(),
            reply.ByteSize() if reply is not None else 0,
            self._context.peer(),
            slow.take_unlogged(),
        )


class Slow(LinesPerSecond):
    """The limit above which requests are logged as slow, and the bound on the number of such
    lines.
    """

    def __init__(self) -> None:
        super().__init__(SLOW_LINES_MAX)
        self.after_s = SLOW_MS / 1000


slow = Slow()
methods: dict[tuple[str, str], Method] = {}
"""Those that were called, by service and name."""


def log_slow_after(after_ms: int) -> None:
    """Log requests that take at least so long; 0: none."""
    slow.after_s = after_ms / 1000 if after_ms > 0 else float("inf")


def add_flag(parser: Any) -> None:
    """Add the flag of ``log_slow_after`` to a server's parser."""
    parser.add_argument(
        "--slow-request-ms",
        type=int,
        default=SLOW_MS,
        metavar="MS",
        help="requests that take so long are logged; 0: none (%(default)s)",
    )


def method_of(servicer: type, name: str, *, stream: bool = False) -> Method:
    """Return the method of this name of a servicer's class. Its service is named by the generated
    base class (``KeyValueServicer``), or by the class itself without "Service".
    """
    bases = (base.__name__ for base in servicer.__mro__ if base.__name__.endswith("Servicer"))
    service = next(bases, "").removesuffix("Servicer") or servicer.__name__.removesuffix("Service")
    return methods.setdefault((service, name), Method(service, name, stream=stream))
