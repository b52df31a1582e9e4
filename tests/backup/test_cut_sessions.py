"""When answers of nodes are a cut, and that nobody is released before all have made it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from koinon.backup import cut_sessions
from koinon.backup.cut_sessions import NodeCut
from koinon_proto.contract.cluster_errors import CutFailedError
from koinon_proto.contract.errors import KoinonError, PermissionDeniedError, ResourceExhaustedError
from koinon_proto.contract.keyspaces import Keyspace, default_keyspace
from tests.kit.tables import config_of

EVENTS = list[str]
KEYSPACE: Keyspace = default_keyspace(
    config_of(4, replication_factor=1, min_in_sync=1, max_value_bytes=1024)
)


class Lost(grpc.RpcError):
    """A call that was cut off."""

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()


class PlayedNode:
    """A node's part whose answers the test gives."""

    def __init__(self, name: str, ids: Sequence[int], events: EVENTS, fails: str = "") -> None:
        self.node = SimpleNamespace(node_id=name)
        self.error: KoinonError | None = None
        self._ids, self._events, self._fails = list(ids), events, fails

    def make(self) -> Any:
        self._events.append(f"make {self.node.node_id}")
        point = SimpleNamespace(partition_ids=self._ids, sequences=[9] * len(self._ids))
        return SimpleNamespace(result=lambda: self._answer("made", point))

    def release(self) -> Any:
        self._events.append(f"release {self.node.node_id}")
        return SimpleNamespace(
            result=lambda: self._answer("released", SimpleNamespace(held_ms=len(self._ids)))
        )

    def _answer(self, what: str, answer: Any) -> Any:
        self._events.append(f"{what} {self.node.node_id}")
        if self._fails == what:
            self.error = CutFailedError(node_id=self.node.node_id, reason="the test")
            raise Lost
        return answer


def made(*parts: PlayedNode) -> tuple[dict[int, NodeCut], dict[int, int], int]:
    return cut_sessions._make_all(cast(Any, parts), [KEYSPACE])


def test_all_have_made_the_cut_before_any_is_released() -> None:
    events: EVENTS = []
    parts = [PlayedNode("a", [0, 3], events), PlayedNode("b", [1], events)]
    parts.append(PlayedNode("c", [2], events))
    owners, sequences, held_ms = made(*parts)
    assert {p: part.node.node_id for p, part in owners.items()} == dict(
        zip(range(4), "abca", strict=True)
    )
    assert sequences == dict.fromkeys(range(4), 9)
    assert held_ms == 2
    first_release = next(at for at, event in enumerate(events) if event.startswith("release"))
    assert {event for event in events[:first_release] if event.startswith("made")} == {
        *("made a", "made b", "made c")
    }


@pytest.mark.parametrize("fails", ["made", "released"])
def test_one_node_that_fails_makes_it_no_cut_and_the_others_are_released(fails: str) -> None:
    events: EVENTS = []
    parts = [PlayedNode("a", [0, 1], events), PlayedNode("b", [2, 3], events, fails)]
    with pytest.raises(CutFailedError, match="node b"):
        made(*parts)
    assert "released a" in events


@pytest.mark.parametrize(
    ("first", "second"), [([0, 1], [2]), ([0, 1, 2], [2, 3]), ([0, 1, 2, 3], [3])]
)
def test_partition_that_none_or_two_have_served_makes_it_no_cut(
    first: list[int], second: list[int]
) -> None:
    events: EVENTS = []
    with pytest.raises(
        CutFailedError, match=r"partition [23] (was served by no node|changed its primary)"
    ):
        made(PlayedNode("a", first, events), PlayedNode("b", second, events))


def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    again = cut_sessions._may_pass
    assert again(CutFailedError(node_id="a", reason=""))
    assert again(ResourceExhaustedError(resource="calls under way", limit=64))
    assert not again(ResourceExhaustedError(resource="backups under way", limit=1))
    assert not again(PermissionDeniedError(principal="user a", action="backup", what=""))
