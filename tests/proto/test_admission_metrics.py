"""Metrics of the calls that a server admits and refuses."""

from __future__ import annotations

import asyncio

import pytest

from koinon_proto.contract.errors import ResourceExhaustedError
from koinon_proto.server import admission_metrics, guard
from koinon_proto.server.admission import LaneLimits, Share
from koinon_proto.server.guard import Guard

LIMITS = LaneLimits(
    connection=Share(calls=4, request_bytes=20, reply_bytes=100),
    host=Share(calls=8, request_bytes=30, reply_bytes=150),
    all=Share(calls=16, request_bytes=40, reply_bytes=200),
    waiting=2,
    message_bytes=10,
)
PEER = "ipv4:10.0.0.1:1"


def told(guarding: Guard, what: str) -> dict[str, float]:
    """Return the series of the data's lane whose names begin so, but for zeros."""
    return {
        series.removeprefix(f"koinon_{what}").replace('lane="data"', ""): value
        for family in admission_metrics.families(guarding)
        for series, value in zip(family.series, family.values, strict=True)
        if value and series.startswith(f"koinon_{what}") and 'lane="data"' in series
    }


async def test_calls_bytes_and_refusals_show_by_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(guard, "close_connection", closed.append)
    now_s = 100.0

    guarding = Guard(LIMITS, LIMITS)
    lane = guarding.data
    lane.now = lambda: now_s
    first, second, third = (lane.call(PEER, 5) for _ in range(3))
    await first.admitted()
    await second.admitted()
    first.received(4)
    waits = asyncio.ensure_future(third.admitted())
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="calls that wait"):
        await lane.call(PEER).admitted()
    with pytest.raises(ResourceExhaustedError, match="have not left"):
        first.hold(500)
    assert told(guarding, "admitted_calls") == {"{}": 2}
    assert told(guarding, "waiting_calls") == {"{}": 1}
    assert told(guarding, "admitted_bytes{") == {
        ',direction="request"}': 14,
        ',direction="answer"}': 10,
    }
    assert told(guarding, "admitted_bytes_limit") == {
        '{,direction="request"}': 40,
        '{,direction="answer"}': 200,
    }
    second.task = asyncio.ensure_future(asyncio.sleep(60))
    first.replied(50)
    await waits
    now_s += 61
    guarding.start()  # looks at once
    guarding.stop()
    assert closed == [PEER]
    assert told(guarding, "admission_refusals") == {
        f'_total{{,reason="{reason}"}}': 1
        for reason in ("waiting", "answers", "slow_request", "stuck_answer")
    }
