"""Hands over what a node leads, and sees its clients off, before it stops.

1. Health checks are told that the node is about to stop.
2. The partitions that others can lead are handed to them.
3. Other primaries take the node out of their sets in sync; attached clients are told, and go.
4. What is under way is answered, and nothing more is taken.

Kafka's brokers call this a controlled shutdown. Each step has a bound, so a node that can hand over
nothing stops all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from koinon_node.assembly import Parts
from koinon_node.state import NodeState
from koinon_proto.contract.table import NO_NODE
from koinon_proto.server.aio_server import GuardedServer

_HAND_OVER_S = 10.0
_FAREWELL_S, _FAREWELL_S_MAX = 0.3, 5.0
_PUT_OUT_PAUSE_S = 0.02
_STOP_GRACE_S = 2.0
_REPLICATE_GRACE_S = 1.0


async def shut_down(parts: Parts, server: GuardedServer, health: Any) -> None:
    """Carry out the steps; return when neither transport takes or answers anything more."""
    await health.enter_graceful_shutdown()
    await parts.replicator.hand_over_all(_HAND_OVER_S)
    parts.follower.leave()
    # Whoever goes by an older table meanwhile is refused by name, and learns of the newer. Some
    # time of that is left to callers that do not attend.
    least_s = _FAREWELL_S if parts.replicator.leading.any_replicated else 0.0
    await asyncio.gather(
        _put_out(parts.state), parts.graceful_drain.end(least_s=least_s, most_s=_FAREWELL_S_MAX)
    )
    stopping = asyncio.gather(server.stop(_STOP_GRACE_S), parts.redis.stop(_STOP_GRACE_S))
    # Writes under way need the followers' streams, which would outlast the server's grace.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REPLICATE_GRACE_S):
            pending, disk = parts.writer.pending, parts.writer.disk
            while any(pending.sent()) and not disk.hangs:  # noqa: ASYNC110 (once, at the end)
                await asyncio.sleep(0.01)
    parts.replication.close()
    await stopping


async def _put_out(state: NodeState) -> None:
    """Wait until no primary waits for this node that could do without it, but not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FAREWELL_S_MAX):
            while _is_waited_for(state):  # noqa: ASYNC110 (once, at the end)
                await asyncio.sleep(_PUT_OUT_PAUSE_S)


def _is_waited_for(state: NodeState) -> bool:
    """Return whether a primary has this node in an in-sync set that it could take the node out of:
    writes wait for the node then.
    """
    table, me = state.served.table, state.served.node_number
    if table is None or not state.serving():
        return False
    return any(
        me in row.in_sync
        and row.primary not in (NO_NODE, me)
        and len(row.in_sync) > table.keyspaces.min_in_sync(row)
        for row in table.rows
    )
