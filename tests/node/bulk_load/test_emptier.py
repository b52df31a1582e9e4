"""Emptying a keyspace for a client: one load however often the leader is asked, and no answer
before that load has ended.
"""

from __future__ import annotations

import asyncio

import pytest

from koinon_node.bulk_load import emptier as emptier_module
from koinon_node.bulk_load.emptier import Emptier
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.membership.lease import Lease
from koinon_node.state import NodeState
from koinon_proto.contract.errors import KoinonError, UnavailableError, UnknownFateError
from koinon_proto.contract.keyspaces import DEFAULT_ID
from koinon_proto.contract.table import ActiveLoad
from koinon_proto.v1.loads_pb2 import LOAD_STATE_DONE as DONE
from koinon_proto.v1.loads_pb2 import LOAD_STATE_MERGING as MERGES
from koinon_proto.v1.loads_pb2 import EmptyKeyspaceResponse, LoadState
from tests.kit.tables import node_of, row_of, table_with
from tests.kit.waiting import until

VERSION = 7
LOAD_ID = 40


class Leader:
    """Answers with what the test has said, one after the other."""

    def __init__(self, *answers: KoinonError | LoadState) -> None:
        self.answers = list(answers)
        self.jobs: list[str] = []

    async def empty_keyspace(
        self, cluster_id: str, keyspace_id: int, job_id: str, description: str
    ) -> EmptyKeyspaceResponse:
        self.jobs.append(job_id)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, KoinonError):
            raise answer
        return EmptyKeyspaceResponse(load_id=LOAD_ID, state=answer, table_version=VERSION)


class Asked:
    """An emptier under way, with the state that it looks at."""

    def __init__(self, *answers: KoinonError | LoadState) -> None:
        self.leader = Leader(*answers)
        self.now = 0.0
        self.state = NodeState("n1", lambda: self.now)
        self.state.lease = Lease(node_epoch=1, until_s=100.0)
        self.show(VERSION - 1)
        self.task = asyncio.ensure_future(
            Emptier(self.state, self.leader).empty(DEFAULT_ID, "FLUSHDB by anybody")
        )

    def show(self, version: int, *loads: ActiveLoad) -> None:
        """The node takes a table of this version."""
        table = table_with([row_of(0, 1)], [node_of(1)], version=version, loads=loads)
        self.state.served = ServedPartitions(table=table)


MERGING = ActiveLoad(load_id=LOAD_ID, merging=True)
LOST = UnknownFateError(reason="no answer came")


async def test_answer_comes_once_a_table_that_knows_of_the_load_names_it_no_more() -> None:
    asked = Asked(MERGES)
    await until(lambda: asked.leader.jobs)
    for loads in ((), (MERGING,)):
        asked.show(VERSION - 1 + len(loads), *loads)
        await asyncio.sleep(2 * emptier_module._POLL_S)
        assert not asked.task.done()
    asked.show(VERSION + 1, ActiveLoad(load_id=LOAD_ID + 1, merging=True))
    await asked.task


async def test_leader_whose_answer_is_lost_is_asked_again_for_the_same_load() -> None:
    asked = Asked(LOST, LOST, DONE)
    await asked.task
    assert len(asked.leader.jobs) == 3
    assert len({*asked.leader.jobs}) == 1


async def test_two_calls_are_two_loads() -> None:
    first, second = Asked(DONE), Asked(DONE)
    await asyncio.gather(first.task, second.task)
    assert first.leader.jobs != second.leader.jobs


async def test_refusal_is_passed_on_at_once() -> None:
    asked = Asked(UnavailableError(reason="no leader"))
    with pytest.raises(UnavailableError):
        await asked.task
    assert len(asked.leader.jobs) == 1


async def test_fate_is_unknown_if_no_answer_comes_or_the_lease_is_lost_meanwhile() -> None:
    asked = Asked(LOST)
    await until(lambda: asked.leader.jobs)
    asked.now = emptier_module._COMMIT_S
    with pytest.raises(UnknownFateError):
        await asked.task
    asked = Asked(MERGES)
    await until(lambda: asked.leader.jobs)
    asked.now = 101.0
    with pytest.raises(UnknownFateError, match="has lost its lease"):
        await asked.task
