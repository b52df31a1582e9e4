"""Changes of keyspaces that meet each other at a leader: each leaves what the others have set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from koinon_coordinator.core.cluster.commands import SetReplicationFactor
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.keyspace_requests import Alteration
from koinon_coordinator.core.decide.plan_requests import PlanKind, PlanWish
from koinon_proto.contract.errors import UnknownKeyspaceError
from koinon_proto.contract.keyspaces import Keyspace
from tests.coordinator.cluster.test_keyspaces import created, dropped, wanted, with_nodes
from tests.coordinator.kit.plans import execute
from tests.coordinator.kit.support import LeaderContext, hold_proposals, run_term, settled

TWO = PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=2, keyspace="vip")


def with_vip() -> ClusterState:
    """Three nodes; ``vip`` has three copies of each partition, ``default`` two."""
    state = with_nodes()
    created(state, wanted(replication_factor=3))
    return state


def alter(term: LeaderContext, name: str = "vip", **given: int) -> Awaitable[object]:
    return term.leadership.keyspaces.alter(name, Alteration(**given), wait_s=0.0)  # type: ignore[arg-type]


def vip(term: LeaderContext) -> Keyspace:
    return term.replicated.state.keyspaces.named("vip")


def test_replication_factor_is_set_in_the_keyspace_that_the_plan_is_for() -> None:
    async def test(term: LeaderContext) -> None:
        default = term.replicated.state.keyspaces.default
        await execute(term, TWO)
        assert (vip(term).replication_factor, vip(term).min_in_sync) == (2, 1)
        assert term.replicated.state.keyspaces.default == default
        await execute(term, PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=1))
        assert vip(term).replication_factor == 2
        assert term.replicated.state.keyspaces.default.replication_factor == 1

    run_term(test, state=with_vip())


def test_alterations_that_are_under_way_together_all_hold() -> None:
    async def test(term: LeaderContext) -> None:
        proposed, gate = hold_proposals(term)
        first = asyncio.ensure_future(alter(term, max_value_bytes=77))
        await proposed.wait()
        others = [
            asyncio.ensure_future(alter(term, max_rows_per_s=5)),
            asyncio.ensure_future(execute(term, TWO)),
            asyncio.ensure_future(alter(term, max_ttl_ms=9)),
        ]
        await settled()
        gate.set()
        await asyncio.gather(first, *others)
        now = vip(term)
        assert (now.max_value_bytes, now.max_rows_per_s, now.max_ttl_ms) == (77, 5, 9)
        assert now.replication_factor == 2

    run_term(test, state=with_vip())


def test_alteration_whose_caller_has_gone_is_not_undone_by_the_next() -> None:
    """It is on its way all the same."""

    async def test(term: LeaderContext) -> None:
        proposed, gate = hold_proposals(term)
        first = asyncio.ensure_future(alter(term, max_value_bytes=77))
        await proposed.wait()
        first.cancel()
        next_one = asyncio.ensure_future(alter(term, max_rows_per_s=5))
        await settled()
        gate.set()
        await next_one
        assert (vip(term).max_value_bytes, vip(term).max_rows_per_s) == (77, 5)

    run_term(test, state=with_vip())


def test_alteration_that_is_refused_lets_the_next_have_its_turn() -> None:
    async def test(term: LeaderContext) -> None:
        dropped(term.replicated.state, "vip")
        with pytest.raises(UnknownKeyspaceError):
            await alter(term, max_rows_per_s=5)
        with pytest.raises(UnknownKeyspaceError):
            await execute(term, TWO)
        await alter(term, "default", max_rows_per_s=5)
        assert term.replicated.state.keyspaces.default.max_rows_per_s == 5

    assert run_term(test, state=with_vip()).count(SetReplicationFactor) == 0
