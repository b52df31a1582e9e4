"""Consumer groups on real processes: shared by the leader, kept by the next, and administered."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from typer.testing import CliRunner

import koinon
from koinon.client import Client
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon_proto.contract.cluster_errors import UnknownGroupError
from koinon_proto.contract.keyspaces import Keyspaces
from tests.kit.command_line import koinon_app
from tests.kit.waiting import wait_until

PARTITIONS = 24
TIMEOUT_MS = 30_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, coordinators=3) as made:
        with Admin(made.coordinators, timeout_ms=TIMEOUT_MS) as admin:
            admin.keyspaces.create("orders", partition_count=PARTITIONS)
        yield made


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.coordinators, timeout_ms=TIMEOUT_MS) as made:
        yield made


def keyspaces(admin: Admin) -> Keyspaces:
    table = admin.status().table
    assert table is not None
    return table.keyspaces


class Consumer:
    """A consumer with a thread of its own, which commits all that it is delivered."""

    def __init__(
        self, cluster: LocalCluster, group: str, member: str, session_ms: int = 10_000
    ) -> None:
        self.revoked: list[int] = []
        self.owned: list[int] = []
        self.keys: list[bytes] = []
        self._stop = threading.Event()
        self._client: Client = koinon.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS)
        self._group: Any = self._client.group(
            group,
            keyspaces=["orders"],
            member=member,
            session_ms=session_ms,
            on_revoked=self._note,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _note(self, partitions: Any) -> None:
        self.revoked += partitions

    def _run(self) -> None:
        with self._client, self._group as group:
            while not self._stop.is_set():
                batch = next(group)
                self.keys += [change.key for change in batch]
                batch.commit()
                self.owned = list(group.partitions)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_MS / 1000)
        assert not self._thread.is_alive()


def shared_by(*consumers: Consumer) -> Callable[[], bool]:
    """Return a condition: the consumers own all partitions, each one has some."""

    def is_shared() -> bool:
        owned = [p for consumer in consumers for p in consumer.owned]
        return len(owned) == len(set(owned)) == PARTITIONS and all(c.owned for c in consumers)

    return is_shared


def run(cluster: LocalCluster, *arguments: str, code: int = 0) -> Any:
    """Run ``koinon admin groups … --json``; return its answer."""
    ended = CliRunner().invoke(
        koinon_app(),
        ["admin", "groups", *arguments, "--json"],
        env={"KOINON_COORDINATORS": cluster.coordinators},
    )
    assert ended.exit_code == code, ended.output
    return json.loads(ended.stdout)


def test_members_keep_their_partitions_when_the_leader_is_killed(
    cluster: LocalCluster, admin: Admin
) -> None:
    with ExitStack() as closing:
        a, b = (Consumer(cluster, "kept", name) for name in "ab")
        closing.callback(b.close)
        closing.callback(a.close)
        wait_until(shared_by(a, b))
        before = admin.groups.get("kept", keyspaces(admin))
        owned = [list(a.owned), list(b.owned)]
        leader = cluster.leader()
        assert leader is not None
        cluster.kill(leader)

        def is_back() -> bool:
            seen = admin.groups.get("kept", keyspaces(admin))
            return seen.member_count == 2 and not seen.unowned_count

        wait_until(is_back)
        time.sleep(2.0)  # in which a leader that forgot them would share anew
        after = admin.groups.get("kept", keyspaces(admin))
        assert after.generation == before.generation
        assert [a.owned, b.owned] == owned
        assert a.revoked == b.revoked == []
        c = Consumer(cluster, "kept", "c")
        closing.callback(c.close)
        wait_until(shared_by(a, b, c))
        assert set(a.owned) < set(owned[0])
        assert set(b.owned) < set(owned[1])
        cluster.restart(leader)


def test_dropped_keyspace_is_revoked_and_the_consumer_goes_on_with_the_others(
    cluster: LocalCluster, admin: Admin
) -> None:
    revoked: list[int] = []
    for name in ("one", "two"):
        admin.keyspaces.create(name, partition_count=3)
    first, second = (keyspaces(admin).named(name).partition_ids for name in ("one", "two"))
    with (
        koinon.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS) as client,
        client.group("drops", keyspaces=["one", "two"], on_revoked=revoked.extend) as group,
    ):
        while group.partitions != [*first, *second]:
            next(group)
        client.keyspace("one").put(b"k", b"1")
        while not len(late := next(group)):
            pass
        admin.keyspaces.drop("one")
        while not revoked:
            next(group)
        assert (revoked, group.partitions) == ([*first], [*second])
        with pytest.raises(koinon.StaleGenerationError):
            late.commit()
        client.keyspace("two").put(b"k", b"2")
        while not len(batch := next(group)):
            pass
        assert batch.values == [b"2"]
        batch.commit()
        admin.keyspaces.drop("two")
        with pytest.raises(koinon.UnknownKeyspaceError, match="two"):
            for _ in group:
                pass
        assert revoked == [*first, *second]


def test_successor_whose_clock_is_behind_takes_the_members_place(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with koinon.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS) as client:
        first, second = (client.group("clocks", keyspaces=["orders"], member="m") for _ in range(2))
        with first:
            while not first.partitions:
                next(first)
            now = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: now() - 5_000_000_000)
            with second:
                while not second.partitions:
                    next(second)
                with pytest.raises(koinon.MemberFencedError):
                    for _ in first:
                        pass
                next(second)


def test_operators_see_reset_and_delete_groups(cluster: LocalCluster, admin: Admin) -> None:
    with koinon.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS) as client:
        keys = [b"order/%d" % n for n in range(50)]
        client.keyspace("orders").put_many(dict.fromkeys(keys, b"")).raise_for_errors()
    one = Consumer(cluster, "billing", "one", session_ms=2_000)
    wait_until(lambda: set(keys) <= set(one.keys))
    run(cluster, "reset", "billing", "--to", "beginning", "--yes", code=3)
    assert run(cluster, "reset", "billing", "--to", "beginning", "--yes", "--force")["partitions"]
    wait_until(lambda: all(one.keys.count(key) > 1 for key in keys))
    shown = run(cluster, "describe", "billing")
    (member,) = shown["group"]["members"]
    assert (member["member_id"], len(member["granted"])) == ("one", PARTITIONS)
    assert member["keyspaces"] == ["orders"]
    assert len(shown["cursors"]) == PARTITIONS
    listed = {group["name"]: group for group in run(cluster)["groups"]}
    assert listed["billing"]["strategy"] == "sticky"
    run(cluster, "delete", "billing", "--yes", code=3)
    one.close()
    wait_until(lambda: not _members(admin, "billing"))
    run(cluster, "reset", "billing", "--to", "end", "--yes")
    assert run(cluster, "describe", "billing")["behind"] == 0
    run(cluster, "delete", "billing", "--yes")
    with pytest.raises(UnknownGroupError):
        _members(admin, "billing")
    run(cluster, "describe", "billing", code=3)


def _members(admin: Admin, name: str) -> int:
    return admin.groups.get(name, keyspaces(admin)).member_count
