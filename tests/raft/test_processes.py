"""Raft groups of real processes: kill -9, SIGSTOP, torn and lost disks, changing members."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from koinon_proto.process.clock import boottime
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until

from .processes import Cluster, MemberProcess, RemoteError

COMMAND_BYTES = 100


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, size=3, snapshot_every_entries=500, retained_entries_max=50) as made:
        yield made


def wait_for_all_to_apply(cluster: Cluster, command: str) -> None:
    for member in cluster.members.values():
        if member.is_alive:
            wait_until(
                lambda m=member: command in m.call("dump"),  # type: ignore[misc]
                f"{member.member_id} applies {command}",
            )


def stop_event_of(member: MemberProcess) -> tuple[str, str]:
    event = wait_until(lambda: member.stop_event, f"{member.member_id} stops by itself")
    return event["error"], event["text"]


def test_group_leader_killed_under_load_loses_nothing_acknowledged(cluster: Cluster) -> None:
    acknowledged: set[str] = set()
    for turn in range(3):
        leader = cluster.wait_for_leader()
        load = leader.begin(
            "load", proposers=16, seconds=60, size=COMMAND_BYTES, tag=f"t{turn}-", report=True
        )
        leader.wait_for_progress(700)
        leader.kill()
        acknowledged |= load.acknowledged_so_far()
        successor = cluster.wait_for_leader()
        successor.call("propose", command=f"after {turn}")
        acknowledged.add(f"after {turn}")
        leader.start()
    leader = cluster.wait_for_leader()
    leader.call("barrier")
    assert acknowledged <= set(leader.call("dump"))
    wait_for_all_to_apply(cluster, "after 2")
    states = [member.call("dump") for member in cluster.members.values()]
    shortest = min(len(state) for state in states)
    assert states[0][:shortest] == states[1][:shortest] == states[2][:shortest]


def test_group_paused_leader_resumed_serves_nothing_stale(cluster: Cluster) -> None:
    old = cluster.wait_for_leader()
    old.call("propose", command="before")
    old.pause()
    paused_at = boottime()
    new = cluster.wait_for_leader(other_than=old.member_id)
    new.call("propose", command="since")
    requests = [old.begin("read_last"), old.begin("contact")]
    write = old.begin("propose", command="too late")
    old.resume()
    contact = requests[1].result()
    assert contact["contact_at"] is None or contact["contact_at"] <= paused_at
    try:
        assert requests[0].result() == "since"
    except RemoteError as error:
        assert error.kind == "NotLeaderError"  # noqa: PT017 (either answer is right)
    # Resumed within check-quorum of its last contact it may still append, and then cannot know.
    with pytest.raises(RemoteError, match=r"NotLeaderError|UnknownFateError"):
        write.result()
    wait_for_all_to_apply(cluster, "since")
    assert old.call("status")["leader_id"] != old.member_id


def test_group_restarted_whole_keeps_everything(cluster: Cluster) -> None:
    leader = cluster.wait_for_leader()
    proposed = 0
    while proposed < 600:  # so that there is a snapshot
        load = leader.begin(
            "load", proposers=16, seconds=1.0, size=COMMAND_BYTES, tag=f"kept-{proposed}-"
        )
        proposed += load.result()["acknowledged"]
    for member in cluster.members.values():
        member.kill()
    for member in cluster.members.values():
        member.start(wait=False)
    leader = cluster.wait_for_leader()
    leader.call("barrier")
    kept = [name for name in leader.call("dump") if name.startswith("kept-")]
    assert len(kept) == len(set(kept)) == proposed
    assert leader.call("status")["snapshot_index"] > 0


def test_member_with_a_torn_directory_is_refused_with_the_files_name(cluster: Cluster) -> None:
    cluster.wait_for_leader().call("propose", command="x")
    wait_for_all_to_apply(cluster, "x")
    victim = next(iter(cluster.members.values()))
    victim.kill()
    with (victim.data_dir / "data.mdb").open("r+b") as file:
        file.truncate(8192)
    victim.start()
    kind, text = stop_event_of(victim)
    assert kind == "DataDirectoryError"
    assert str(victim.data_dir / "data.mdb") in text
    cluster.wait_for_leader().call("propose", command="y")


def test_member_that_lost_its_disk_is_refused_and_can_be_replaced(cluster: Cluster) -> None:
    leader = cluster.wait_for_leader()
    leader.call("propose", command="x")
    wait_for_all_to_apply(cluster, "x")
    victim = next(m for m in cluster.members.values() if m is not leader)
    victim.kill()
    shutil.rmtree(victim.data_dir)
    victim.start()
    kind, text = stop_event_of(victim)
    assert kind == "StoreChangedError"
    assert f"member {victim.member_id} lost its data: remove it and add it again" in text

    leader = cluster.wait_for_leader()
    leader.call("remove", member_id=victim.member_id)
    address = free_address()
    newcomer = cluster.make_member("m4", address, {})
    cluster.members["m4"] = newcomer
    newcomer.start()
    leader.call("add_learner", member_id="m4", address=address)
    wait_until(lambda: leader.call("status")["lag"]["m4"] == 0, "it has caught up")
    leader.call("promote", member_id="m4")
    assert "m4" in leader.call("status")["voters"]
    wait_until(lambda: newcomer.call("dump") == ["x"], "it has applied it")


def test_group_grows_and_shrinks_while_it_serves(cluster: Cluster) -> None:
    leader = cluster.wait_for_leader()
    leader.call("load", proposers=16, seconds=0.5, size=COMMAND_BYTES, tag="first-")
    load = leader.begin("load", proposers=4, seconds=2, size=COMMAND_BYTES, tag="during-")
    for member_id in ("m4", "m5"):
        address = free_address()
        newcomer = cluster.members[member_id] = cluster.make_member(member_id, address, {})
        newcomer.start()
        leader.call("add_learner", member_id=member_id, address=address)
        wait_until(
            lambda m=member_id: (leader.call("status")["lag"][m] or 0) < 500,  # type: ignore[misc]
            f"{member_id} catches up",
        )
        leader.call("promote", member_id=member_id)
    assert load.result()["acknowledged"] > 0
    assert leader.call("status")["voters"] == ["m1", "m2", "m3", "m4", "m5"]
    leader.call("remove", member_id=leader.member_id)
    assert stop_event_of(leader)[0] == "MemberRemovedError"
    successor = cluster.wait_for_leader(other_than=leader.member_id)
    successor.call("propose", command="without the first leader")
    for member in cluster.members.values():
        if member is not leader:
            wait_until(lambda m=member: "without the first leader" in m.call("dump"), "it is there")  # type: ignore[misc]


def test_group_transfer_moves_leadership(cluster: Cluster) -> None:
    leader = cluster.wait_for_leader()
    to = next(m for m in cluster.members if m != leader.member_id)
    leader.call("transfer", to=to)
    successor = cluster.wait_for_leader(other_than=leader.member_id)
    assert successor.member_id == to
    successor.call("propose", command="x")
