"""Waits until a change is in force: until no node serves by what was before.

That is so as soon as every live node has said that it goes by the change, which takes a heartbeat
or two; and at the latest once no node can hold a lease that it was given before. Each heartbeat
that is acknowledged after the change is applied brings it, and a node applies it before it extends
its lease. So leases from before end a lease after that. A leader before this one may acknowledge
heartbeats for check-quorum after it was deposed, and knows nothing of the change: they end a lease
after that. Both hold as well if this leader is deposed while it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koinon_coordinator.core.decide.sessions import SessionTimes
from koinon_coordinator.leader.context import LeaderContext
from koinon_proto.contract.table import NodeId

log = logging.getLogger(__name__)

POLL_S = 0.02
NAMED_MAX = 10
Behind = Callable[[int], Sequence[NodeId]]
"""Returns the live nodes that have not said that they go by this version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeBarrier:
    """A change that was made. ``behind``: live nodes that have not said that they go by it. For
    ``serves_s`` more seconds they may serve by what was before; 0: they serve no client until then.
    """

    version: int
    behind: tuple[NodeId, ...] = ()
    serves_s: float = 0.0


async def in_force(
    term: LeaderContext,
    times: SessionTimes,
    behind: Behind,
    *,
    version: int,
    wait_s: float,
    what: str,
) -> ChangeBarrier:
    """Wait until no node serves by what was before ``version``, which is applied here; for
    ``wait_s`` at most. ``what`` is what has changed, for the log.
    """
    clock = term.clock
    applied_at = clock()
    alone_at = term.began_at + times.check_quorum_s
    leases_end_at = max(applied_at, alone_at) + times.lease_s
    while late := tuple(behind(version)):
        left_s = leases_end_at - clock()
        waits_s = min(left_s, applied_at + wait_s - clock())
        if waits_s <= 0:
            log.warning(
                "changed, but nodes have not said so what=%s version=%d nodes=%s",
                what,
                version,
                ",".join(late[:NAMED_MAX]),
            )
            return ChangeBarrier(version=version, behind=late, serves_s=max(0.0, left_s))
        await asyncio.sleep(min(waits_s, POLL_S))
    return ChangeBarrier(version=version)
