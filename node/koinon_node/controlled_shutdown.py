"""Hands over a node's partitions and lets its clients disconnect before the node stops.

1. Health checks report that the node does not serve any more.
2. The partitions that other nodes can lead are handed over to them.
3. Other primaries remove the node from their in-sync sets; attached clients are notified and
   disconnect.
4. Requests under way are answered, and no more are accepted.

Kafka's brokers call this a controlled shutdown. Each step has a timeout, so a node that cannot hand
over anything still stops.
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
    """Run the steps; return when neither transport accepts or answers requests any more."""
    await health.enter_graceful_shutdown()
    await parts.replicator.hand_over_all(_HAND_OVER_S)
    parts.follower.leave()
    # Callers with an older table get typed refusals meanwhile, which lead them to the newer one.
    # The farewell leaves some time for that to clients that do not attend.
    least_s = _FAREWELL_S if parts.replicator.leading.any_replicated else 0.0
    await asyncio.gather(
        _put_out(parts.state), parts.graceful_drain.end(least_s=least_s, most_s=_FAREWELL_S_MAX)
    )
    stopping = asyncio.gather(server.stop(_STOP_GRACE_S), parts.redis.stop(_STOP_GRACE_S))
    # Writes under way need the followers' streams: keep the streams open until they are complete.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REPLICATE_GRACE_S):
            pending, disk = parts.writer.pending, parts.writer.disk
            while any(pending.sent()) and not disk.hangs:  # noqa: ASYNC110 (once, at the end)
                await asyncio.sleep(0.01)
    parts.replication.close()
    await stopping


async def _put_out(state: NodeState) -> None:
    """Wait, with a timeout, until no primary that could do without this node waits for it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FAREWELL_S_MAX):
            while _is_waited_for(state):  # noqa: ASYNC110 (once, at the end)
                await asyncio.sleep(_PUT_OUT_PAUSE_S)


def _is_waited_for(state: NodeState) -> bool:
    """Return whether a primary has this node in an in-sync set from which it could remove the node:
    until then its writes wait for the node.
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
