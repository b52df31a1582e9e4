"""The service of cursors over real gRPC: what is answered, and every limit tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    CursorMovedError,
    InvalidArgumentError,
    KoinonError,
    NotPrimaryError,
    StaleGenerationError,
    WrongClusterError,
    WrongPartitionError,
)
from koinon_proto.v1 import groups_pb2, groups_pb2_grpc, kv_pb2
from koinon_proto.v1.feed_pb2 import FeedPosition
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import PARTITIONS, NodeProcess, partitions_of, refusal, running_node

NOT_OURS = 5
GROUP = 77


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("cursors") / "n1"
    with (
        ScriptedCoordinator(Script(primaries={NOT_OURS: 2})) as coordinator,
        running_node(data, coordinator) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def cursors(node: NodeProcess) -> Any:
    return groups_pb2_grpc.CursorsStub(node.channel)


def claim(*partition_ids: int, generation: int = 1, **how: Any) -> groups_pb2.ClaimCursorsRequest:
    request = groups_pb2.ClaimCursorsRequest(
        group_id=GROUP,
        member_id="m",
        partition_ids=partition_ids,
        generations=[generation] * len(partition_ids),
    )
    request.MergeFrom(groups_pb2.ClaimCursorsRequest(**how))
    return request


def commit(partition_id: int, sequence: int, generation: int = 1) -> Any:
    return groups_pb2.CommitCursorsRequest(
        group_id=GROUP,
        positions=[FeedPosition(partition_id=partition_id, sequence=sequence)],
        generations=[generation],
    )


def refused(answer: Any) -> dict[int, type[KoinonError]]:
    return {r.partition_id: type(convert.error_from_proto(r.error)) for r in answer.refusals}


def read(cursors: Any, *partition_ids: int) -> Any:
    return cursors.Read(
        groups_pb2.ReadCursorsRequest(group_id=GROUP, partition_ids=partition_ids)
    ).cursors


def test_replaced_owner_is_refused_partition_by_partition(cursors: Any) -> None:
    answer = cursors.Claim(claim(0, 1, NOT_OURS))
    assert [c.position.partition_id for c in answer.cursors] == [0, 1]
    assert refused(answer) == {NOT_OURS: NotPrimaryError}
    assert not answer.cursors[0].is_committed
    assert not refused(cursors.Commit(commit(0, 5)))
    (taken,) = cursors.Claim(claim(0, generation=2)).cursors
    assert (taken.position.sequence, taken.is_committed) == (5, True)
    assert refused(cursors.Commit(commit(0, 9))) == {0: StaleGenerationError}
    assert refused(cursors.Claim(claim(0))) == {0: StaleGenerationError}
    one, other = read(cursors, 0, 2)
    assert (one.generation, one.position.sequence, one.member_id) == (2, 5, "m")
    assert (other.generation, other.member_id) == (0, "")


def test_claim_from_now_begins_behind_what_is_there(cursors: Any, node: NodeProcess) -> None:
    (p,) = partitions_of([b"there"])
    node.kv.Put(kv_pb2.PutRequest(key=b"there", value=b"v"))
    (before,) = read(cursors, p)
    assert before.completed_sequence
    (claimed,) = cursors.Claim(claim(p, generation=9, from_now=True)).cursors
    assert claimed.position.sequence == before.completed_sequence
    assert claimed.is_committed


def test_reset_and_delete(cursors: Any) -> None:
    cursors.Claim(claim(3, generation=4))
    moves = groups_pb2.ResetCursorsRequest(
        group_id=GROUP, generation=5, positions=[FeedPosition(partition_id=3, sequence=8)]
    )
    assert not refused(cursors.Reset(moves))
    assert refused(cursors.Commit(commit(3, 9, generation=4))) == {3: StaleGenerationError}
    moves.generation = 4
    assert refused(cursors.Reset(moves)) == {3: StaleGenerationError}
    moves.generation, moves.positions[0].sequence = 5, 2**64 - 1
    cursors.Reset(moves)
    (at_end,) = read(cursors, 3)
    assert at_end.position.sequence < 2**63, "the end is where the partition is now"
    cursors.Delete(groups_pb2.DeleteCursorsRequest(group_id=GROUP, partition_ids=[3]))
    assert read(cursors, 3)[0].generation == 0


def test_batch_and_cursor_are_one_write(cursors: Any, node: NodeProcess) -> None:
    names = [b"batch/%d" % n for n in range(200)]
    p = next(p for p in partitions_of(names) if p != NOT_OURS)
    mine = [name for name in names if partitions_of([name]) == [p]][:3]
    cursors.Claim(claim(p, generation=20))
    request = groups_pb2.CommitBatchWithCursorRequest(
        batch=kv_pb2.CommitBatchRequest(
            partition_id=p,
            operations=[kv_pb2.Operation(key=k, increment=kv_pb2.Increment(by=1)) for k in mine],
        ),
        group_id=GROUP,
        generation=20,
        position=FeedPosition(partition_id=p, sequence=3),
        after=read(cursors, p)[0].position,
    )
    assert [result.number for result in cursors.CommitBatch(request).results] == [1, 1, 1]
    assert isinstance(refusal(lambda: cursors.CommitBatch(request)), CursorMovedError)
    request.generation = 19
    assert isinstance(refusal(lambda: cursors.CommitBatch(request)), StaleGenerationError)
    request.batch.operations[0].key = next(n for n in names if partitions_of([n]) != [p])
    assert isinstance(refusal(lambda: cursors.CommitBatch(request)), WrongPartitionError)
    assert node.kv.Get(kv_pb2.GetRequest(key=mine[0])).value == b"1"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (claim(1, 0), InvalidArgumentError),
        (claim(PARTITIONS), InvalidArgumentError),
        (claim(0, generations=[1]), InvalidArgumentError),
        (claim(0, member_id="m" * 513), InvalidArgumentError),
        (claim(0, cluster_id="another"), WrongClusterError),
    ],
)
def test_claim_that_breaks_a_limit_is_refused(
    cursors: Any, request_: Any, error: type[KoinonError]
) -> None:
    assert isinstance(refusal(lambda: cursors.Claim(request_)), error)


def test_commit_of_an_impossible_position_is_refused(cursors: Any) -> None:
    request = commit(0, 5)
    request.positions[0].bound = 4
    assert isinstance(refusal(lambda: cursors.Commit(request)), InvalidArgumentError)
    request = commit(0, 5)
    del request.generations[:]
    assert isinstance(refusal(lambda: cursors.Commit(request)), InvalidArgumentError)


def test_cursors_outlive_the_process(tmp_path: Path) -> None:
    with ScriptedCoordinator(Script()) as coordinator:
        for expected in (0, 6):
            with running_node(tmp_path / "n1", coordinator) as node:
                cursors: Any = groups_pb2_grpc.CursorsStub(node.channel)
                assert read(cursors, 1)[0].position.sequence == expected
                cursors.Claim(claim(1))
                cursors.Commit(commit(1, 6))
                node.kill()
