"""The metrics of calls: how many are admitted, how many wait, how many were refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from koinon_proto.process.measures import Family, labelled
from koinon_proto.server.admission import Lane
from koinon_proto.server.guard import Guard

_BY_LANE: tuple[tuple[str, str, Callable[[Lane], int | dict[str, int]]], ...] = (
    (
        "koinon_admitted_calls",
        "Calls that were admitted and whose answers have not left.",
        lambda lane: lane.all.calls,
    ),
    (
        "koinon_waiting_calls",
        "Calls whose messages are not received yet, because others hold the room.",
        lambda lane: lane.waiting,
    ),
    (
        "koinon_admitted_bytes",
        "Bytes that admitted calls hold, or have reserved.",
        lambda lane: {"request": lane.all.request_bytes, "answer": lane.all.reply_bytes},
    ),
    (
        "koinon_admitted_bytes_limit",
        "How many of these there may be.",
        lambda lane: {
            "request": lane.limits.all.request_bytes,
            "answer": lane.limits.all.reply_bytes,
        },
    ),
)
"""Gauges: name, meaning, and the value of a lane, or its values by direction."""


def families(guard: Guard) -> Iterator[Family]:
    """Return the families of a server's guard. On the event loop."""
    for name, meaning, read in _BY_LANE:
        labels: tuple[str, ...] = ("lane",)
        values: dict[tuple[str, ...], int] = {}
        for lane_name, lane in guard.lanes.items():
            found = read(lane)
            if isinstance(found, int):
                values[lane_name,] = found
                continue
            labels = ("lane", "direction")
            values |= {(lane_name, direction): size for direction, size in found.items()}
        yield labelled(name, "gauge", meaning, labels, values)
    yield labelled(
        "koinon_unidentified_total",
        "counter",
        "Calls and commands that were let in from callers that have shown nothing.",
        ("protocol",),
        {(protocol,): count for protocol, count in guard.gate.unidentified.items()},
    )
    yield labelled(
        "koinon_admission_refusals_total",
        "counter",
        "Calls that were refused or cut short for want of room or time, by the reason.",
        ("lane", "reason"),
        {
            (name, reason.value): count
            for name, lane in guard.lanes.items()
            for reason, count in lane.refusals.items()
        },
    )
    yield labelled(
        "koinon_flooding_connections_closed_total",
        "counter",
        "Connections of gRPC that were closed because they sent header blocks without calls.",
        (),
        {(): guard.floods.closed},
    )
