"""Metrics of the requests that this process has handled."""

from __future__ import annotations

from itertools import accumulate

from koinon_proto.process.measures import Family, labelled
from koinon_proto.server.requests import BOUNDS_S, Method, methods

_SERIES = ("service", "method", "outcome")
_BOUNDS = (*(f"{bound:g}" for bound in BOUNDS_S), "+Inf")
_DURATION = "koinon_request_duration_seconds"


def families() -> list[Family]:
    """Return the families; a method shows once it was called. On the event loop."""
    known = list(methods.values())
    unary = [method for method in known if not method.stream]
    totals: dict[tuple[str, ...], int] = {
        (method.service, method.name, outcome): count
        for method in unary
        for outcome, count in method.outcomes.items()
    }
    in_progress: dict[tuple[str, ...], int] = {}
    for method in unary:
        before = in_progress.get((method.service,), 0)
        in_progress[method.service,] = before + method.in_progress
    return [
        labelled(
            "koinon_requests_total",
            "counter",
            "Requests that have ended, by outcome: ok, cancelled, or the error's name.",
            _SERIES,
            totals,
        ),
        _durations(unary),
        labelled(
            "koinon_requests_in_progress",
            "gauge",
            "Requests under way.",
            ("service",),
            in_progress,
        ),
        labelled(
            "koinon_streams_in_progress",
            "gauge",
            "Streams that are open: of followers, of watchers of the table, of clients.",
            ("service", "method"),
            {(m.service, m.name): m.in_progress for m in known if m.stream},
        ),
    ]


def _durations(unary: list[Method]) -> Family:
    series: list[str] = []
    values: list[int | float] = []
    for method in unary:
        of = f'service="{method.service}",method="{method.name}"'
        counts = list(accumulate(method.buckets))
        series += [f'{_DURATION}_bucket{{{of},le="{bound}"}}' for bound in _BOUNDS]
        series += [f"{_DURATION}_sum{{{of}}}", f"{_DURATION}_count{{{of}}}"]
        values += [*counts, method.seconds, counts[-1]]
    return Family(_DURATION, "histogram", "From a request's arrival to its answer.", series, values)
