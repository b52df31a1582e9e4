"""The metrics of calls: how many are admitted, how many wait, how many were refused."""

from __future__ import annotations

from collections.abc import Iterator

from koinon_proto.process.measures import Family, labelled
from koinon_proto.server.guard import Guard

_LANE = ("lane",)
_BYTES = ("lane", "direction")


def families(guard: Guard) -> Iterator[Family]:
    """Return the families of a server's guard. On the event loop."""
    lanes = guard.lanes.items()
    yield labelled(
        "koinon_admitted_calls",
        "gauge",
        "Calls that were admitted and whose answers have not left.",
        _LANE,
        {(name,): lane.all.calls for name, lane in lanes},
    )
    yield labelled(
        "koinon_waiting_calls",
        "gauge",
        "Calls whose messages are not received yet, because others hold the room.",
        _LANE,
        {(name,): lane.waiting for name, lane in lanes},
    )
    yield labelled(
        "koinon_admitted_bytes",
        "gauge",
        "Bytes that admitted calls hold, or have reserved.",
        _BYTES,
        {
            (name, direction): size
            for name, lane in lanes
            for direction, size in (
                ("request", lane.all.request_bytes),
                ("answer", lane.all.reply_bytes),
            )
        },
    )
    yield labelled(
        "koinon_admitted_bytes_limit",
        "gauge",
        "How many of these there may be.",
        _BYTES,
        {
            (name, direction): limit
            for name, lane in lanes
            for direction, limit in (
                ("request", lane.limits.all.request_bytes),
                ("answer", lane.limits.all.reply_bytes),
            )
        },
    )
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
            for name, lane in lanes
            for reason, count in lane.refusals.items()
        },
    )
