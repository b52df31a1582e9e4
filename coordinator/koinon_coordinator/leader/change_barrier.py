"""Waits until a change is in force, that is until no node serves by the former state.

That is so as soon as every live node has reported that it uses the change, which takes a heartbeat
or two; and at the latest once no node can hold a lease from before. Each heartbeat that is
acknowledged after the change was applied brings the change, and a node applies it before it extends
its lease. So earlier leases end one lease time later. A former leader may acknowledge heartbeats
for check-quorum after it was deposed, without knowing the change: these leases end one lease time
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
"""Returns the live nodes that have not reported that they use this version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeBarrier:
    """A committed change. ``behind``: live nodes that have not reported that they use it. For
    ``serves_s`` more seconds they may serve by the former state; 0: they serve no client until they
    use the change.
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
    """Wait until no node serves by a state before ``version``, which is applied here; at most
    ``wait_s``. ``what`` names the change, for the log.
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
