"""Changes of users, roles and tokens over real gRPC, and how long they wait for nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.commands import AccessCommand, Result, RevokeCertificate
from koinon_coordinator.core.decide.sessions import SessionTimes
from koinon_coordinator.leader.access_changes import AccessChanges
from koinon_coordinator.leader.change_barrier import ChangeBarrier
from koinon_proto.contract import convert
from koinon_proto.contract.access import AccessState, make_token
from koinon_proto.contract.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    WrongClusterError,
)
from koinon_proto.contract.table import NodeId
from koinon_proto.v1 import access_pb2, admin_pb2
from tests.coordinator.kit.fake_node import Caller, FakeNode
from tests.coordinator.kit.served import FAST, with_coordinator
from tests.coordinator.kit.support import bootstrapped


def test_access_is_changed_and_shown_without_hashes(tmp_path: Path) -> None:
    token, text = make_token("app", created_s=5)

    async def test(coordinator: Coordinator, caller: Caller) -> None:
        async def change(**changes: Any) -> int:
            request = admin_pb2.ChangeAccessRequest(**changes)
            reply = await caller.call(caller.admin.ChangeAccess, request)
            return int(reply.access_version)

        async def access() -> AccessState:
            request = admin_pb2.GetAccessRequest()
            return convert.ACCESS.decode(
                (await caller.call(caller.admin.GetAccess, request)).access
            )

        assert await access() == AccessState()
        grant = access_pb2.Grant(
            effect=access_pb2.GRANT_EFFECT_ALLOW, actions=[access_pb2.ACTION_READ], prefix=b"a"
        )
        role = access_pb2.Role(name="reader", grants=[grant])
        assert await change(put_role=role, expected_access_version=0) == 1
        assert await change(put_role=role) == 1
        with pytest.raises(ConditionFailedError):
            await change(drop_role="reader", expected_access_version=0)
        assert await change(put_user=access_pb2.User(name="app", roles=["reader"])) == 2
        assert await change(add_token=convert.TOKEN.encode(token)) == 3
        with pytest.raises(InvalidArgumentError, match="belongs to app"):
            await change(drop_role="reader")
        shown = await access()
        assert (shown.version, shown.tokens[0].id, shown.tokens[0].sha256) == (3, token.id, b"")
        assert getattr(coordinator.state.access.token_of(text, 6), "user", None) == "app"
        assert await change(revoke_certificate="1f") == 4
        assert await change(restore_certificate="1f") == 5
        assert await change(drop_token=token.id) == 6
        assert await change(drop_user="app") == 7
        assert await change(drop_role="reader") == 8

        for wrong in (
            admin_pb2.ChangeAccessRequest(),
            admin_pb2.ChangeAccessRequest(
                put_role=access_pb2.Role(
                    name="r", grants=[access_pb2.Grant(actions=[access_pb2.ACTION_READ])]
                )
            ),
            admin_pb2.ChangeAccessRequest(
                put_role=access_pb2.Role(
                    name="r",
                    grants=[access_pb2.Grant(effect=access_pb2.GRANT_EFFECT_ALLOW, actions=[99])],  # type: ignore[list-item]
                )
            ),
        ):
            with pytest.raises(InvalidArgumentError):
                await caller.call(caller.admin.ChangeAccess, wrong)
        with pytest.raises(WrongClusterError):
            await change(cluster_id="other", drop_user="app")
        request = admin_pb2.GetAccessRequest(cluster_id="other")
        with pytest.raises(WrongClusterError):
            await caller.call(caller.admin.GetAccess, request)

    with_coordinator(tmp_path, test)


class Term:
    """A term that began a moment ago, over a cluster with two live nodes."""

    began_at = 99.9

    def __init__(self) -> None:
        self.now = 100.0
        self.state = bootstrapped([(1, 2)], nodes=2)

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    def check_cluster(self, _: str) -> None: ...

    async def committed(self, command: AccessCommand) -> Result:
        return self.state.apply(command)


N1, N2 = NodeId("n1"), NodeId("n2")
TIMES = SessionTimes(
    heartbeat_interval_s=0.2, session_timeout_s=1.5, lease_s=1.0, check_quorum_s=0.4, pause_s=1.0
)


async def test_change_of_access_is_answered_when_no_node_goes_by_what_was_before() -> None:
    async def changed(
        behind: list[list[NodeId]], wait_s: float = 60.0
    ) -> tuple[ChangeBarrier, float]:
        term = Term()
        asked = iter(behind)
        changes = AccessChanges(term, TIMES, lambda _: next(asked))  # type: ignore[arg-type]
        made = await changes.change(RevokeCertificate(serial="1f"), wait_s)
        return made, term.now

    made, at = await changed([[N1, N2], [N2], []])
    assert made == ChangeBarrier(version=1)
    assert at < 101.0
    made, at = await changed([[N2]] * 100)
    assert made == ChangeBarrier(version=1, behind=(N2,))
    assert at >= 99.9 + 0.4 + 1.0  # a leader before this one gave leases until then
    made, at = await changed([[N2]] * 100, 0.5)
    assert made.behind == (N2,)
    assert 0.0 < made.serves_s < 0.9


async def test_change_of_access_that_is_no_news_waits_as_the_first_one_does() -> None:
    changes = AccessChanges(Term(), TIMES, lambda _: [N1])  # type: ignore[arg-type]
    for _ in range(2):
        made = await changes.change(RevokeCertificate(serial="1f"))
        assert made == ChangeBarrier(version=1, behind=(N1,))


def test_change_of_access_waits_for_nodes_to_say_so(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        node = FakeNode("n1", [caller.address])
        try:
            await node.register()
            await node.heartbeat()
            request = admin_pb2.ChangeAccessRequest(put_role=access_pb2.Role(name="reader"))
            began_at = asyncio.get_running_loop().time()
            change = asyncio.create_task(caller.call(caller.admin.ChangeAccess, request))
            while node.access is None:
                await node.heartbeat()
                await asyncio.sleep(0.01)
            if asyncio.get_running_loop().time() - began_at < FAST.lease_ms / 1000:
                assert not change.done()
            node.access_version = node.access.access_version
            await node.heartbeat()
            reply = await change
            assert (reply.access_version, list(reply.nodes_behind)) == (1, [])
            node.access_version = 0
            request = admin_pb2.ChangeAccessRequest(put_role=access_pb2.Role(name="writer"))
            reply = await caller.call(caller.admin.ChangeAccess, request)
            assert list(reply.nodes_behind) == ["n1"]
        finally:
            await node.close()

    with_coordinator(tmp_path, test, timing=FAST)


def test_node_is_sent_access_when_it_has_an_older_one(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        node = FakeNode("n1", [caller.address])
        try:
            await node.register()
            assert node.access is None
            change = admin_pb2.ChangeAccessRequest(put_role=access_pb2.Role(name="reader"))
            await caller.call(caller.admin.ChangeAccess, change)
            await node.heartbeat()
            assert node.access is not None
            assert node.access.access_version == 1
            node.access_version, node.access = 1, None
            await node.heartbeat()
            assert node.access is None
            await node.register()
            assert node.access is not None
        finally:
            await node.close()

    with_coordinator(tmp_path, test, timing=FAST)
