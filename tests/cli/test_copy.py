"""copy: between keyspaces of the shared cluster, and between clusters of this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.cli.app import make_app
from koinon.cli.data import comparing
from koinon.cli.data.copy import Tally
from koinon.client import Client, KeyspaceClient
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.types import Entry
from koinon_proto.contract.errors import KoinonError, StorageFullError
from koinon_proto.contract.keyspaces import NO_KEYSPACES, Keyspaces
from tests.client.kit.fake_cluster import PARTITIONS, FakeCluster
from tests.kit.tables import config_of

HOUR_MS = 3_600_000
ROWS = {b"m7/%d" % n: b"row %d" % n for n in range(300)}

Run = Callable[..., Any]


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(make_app(["koinon.cli.data.copy"]), ["copy", *arguments, "--json"])


@pytest.fixture
def koinon(cluster: LocalCluster) -> Run:
    """Runs ``koinon copy`` in the shared cluster; returns exit code and answer."""

    def run(*arguments: str) -> tuple[int, Any]:
        ended = ran("--coordinators", cluster.coordinators, *arguments)
        return ended.exit_code, json.loads(ended.stdout)

    return run


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with cluster.admin(timeout_ms=30_000) as made:
        yield made


@pytest.fixture
def target(admin: Admin, client: Client) -> Iterator[KeyspaceClient]:
    """The keyspace ``copied``, which goes with the test, as do the rows below ``m7`` elsewhere."""
    admin.keyspaces.create("copied", partition_count=4)
    yield client.keyspace("copied")
    admin.keyspaces.drop("copied")
    client.delete_many([entry.key for entry in client.scan(prefix=b"m7", keys_only=True)])


def test_copy_brings_the_prefix_with_what_is_left_of_the_time_to_live(
    koinon: Run, client: Client, target: KeyspaceClient
) -> None:
    client.put_many({**ROWS, b"m71/": b"another's"}).raise_for_errors()
    client.put(b"m7/limited", b"for an hour", ttl_ms=HOUR_MS)
    target.put(b"m7/3", b"theirs")
    both = ("--from", "default", "--to", "copied", "--prefix", "m7/")
    code, answer = koinon(*both, "--verify")
    assert (code, answer["rows_read"], answer["rows_applied"]) == (0, 301, 301)
    assert answer["verify"]["identical"]
    assert (answer["verify"]["rows_from"], answer["verify"]["rows_to"]) == (301, 301)
    copied = {entry.key: entry for entry in target.scan()}
    assert {key: copied[key].value for key in ROWS} == ROWS, "a row that is there is replaced"
    assert len(copied) == 301
    ours, theirs = client.get_entry(b"m7/limited"), copied[b"m7/limited"]
    assert ours is not None
    assert ours.expires_at_ms is not None
    assert theirs.expires_at_ms is not None
    assert abs(ours.expires_at_ms - theirs.expires_at_ms) < HOUR_MS / 4
    assert copied[b"m7/3"].expires_at_ms is None


def test_copy_if_absent_leaves_rows_alone_and_verify_names_those_that_differ(
    koinon: Run, cluster: LocalCluster, client: Client, target: KeyspaceClient
) -> None:
    client.put_many(ROWS).raise_for_errors()
    target.put_many({b"m7/3": b"theirs", b"m7/4": b"row 4", b"m7/x": b"extra"})
    url = f"koinon://{cluster.coordinators}/copied"
    code, answer = koinon(
        "--from", "default", "--to", url, "--prefix", "m7/", "--if-absent", "--verify"
    )
    assert (answer["rows_applied"], answer["rows_present"]) == (298, 2)
    assert target.get(b"m7/3") == b"theirs"
    found = answer["verify"]
    assert (code, found["identical"]) == (1, False)
    assert (found["rows_same"], found["rows_different"], found["rows_extra"]) == (299, 1, 1)
    assert sorted(found["examples"]) == [
        "key m7/3: has another value in the target",
        "key m7/x: only in the target",
    ]


def test_rows_that_are_left_out_of_a_comparison_are_said(
    cluster: LocalCluster, client: Client, target: KeyspaceClient
) -> None:
    client.put(b"m7/short", b"v", ttl_ms=30_000)
    both = ("--from", "default", "--to", "copied", "--prefix", "m7/", "--dry-run", "--verify")
    command = ["copy", "--coordinators", cluster.coordinators, *both]
    ended = CliRunner().invoke(make_app(["koinon.cli.data.copy"]), command)
    assert "Identical" not in ended.stdout
    assert "Nothing was compared." in ended.stdout
    assert "within a minute: 1 row of the source, 0 of the target" in ended.stdout
    assert "1 row would be copied (" in ended.stdout
    but_for = "1 row would be copied, except rows that the target has ("
    command.append("--if-absent")
    assert but_for in CliRunner().invoke(make_app(["koinon.cli.data.copy"]), command).stdout
    answer = json.loads(ran("--coordinators", cluster.coordinators, *both).stdout)
    assert answer["verify"]["rows_expiring_from"] == 1
    assert answer["verify"]["rows_expiring_to"] == 0


def test_copy_dry_run_writes_nothing_and_compares(
    koinon: Run, client: Client, target: KeyspaceClient
) -> None:
    client.put_many(ROWS).raise_for_errors()
    client.put(b"m7/1", ROWS[b"m7/1"], ttl_ms=HOUR_MS)
    target.put(b"m7/1", ROWS[b"m7/1"])
    code, answer = koinon(
        "--from", "default", "--to", "copied", "--prefix", "6d372f", "--hex", "--dry-run",
        "--verify",
    )  # fmt: skip
    assert (code, answer["rows_read"], answer["rows_applied"]) == (1, 300, 0)
    assert answer["verify"]["rows_missing"] == 299
    assert answer["verify"]["rows_other_expiry"] == 1
    assert len(list(target.scan())) == 1


def test_copy_rows_that_the_target_does_not_take_are_named(
    koinon: Run, admin: Admin, client: Client
) -> None:
    admin.keyspaces.create("small", partition_count=2, max_value_bytes=20, max_ttl_ms=60_000)
    client.put_many([(b"m7/a", b"v", None), (b"m7/b", b"v" * 21, None), (b"m7/c", b"v", HOUR_MS)])
    code, answer = koinon("--from", "default", "--to", "small", "--prefix", "m7/")
    assert (code, answer["rows_applied"], answer["rows_bad"]) == (2, 1, 2)
    assert sorted(example.split(":")[0] for example in answer["examples"]) == [
        "key m7/b",
        "key m7/c",
    ]
    admin.keyspaces.drop("small")
    client.delete_many([b"m7/a", b"m7/b", b"m7/c"])


def test_copy_to_itself_or_to_nowhere_is_refused(
    koinon: Run, cluster: LocalCluster, target: KeyspaceClient
) -> None:
    url = f"koinon://{cluster.coordinators}/copied"
    code, answer = koinon("--from", "copied", "--to", url)
    assert (code, "the same keyspace" in answer["error"]) == (2, True)
    code, answer = koinon("--from", "copied", "--to", "none")
    assert (code, "'none'" in answer["error"]) == (2, True)


# --- clusters of this process --------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCluster, FakeCluster]]:
    """Two clusters; the first has rows, which are copied ten at a time."""
    monkeypatch.setattr(comparing, "SLAB_ROWS", 10)
    made = FakeCluster(nodes=1), FakeCluster(nodes=1)
    made[1].table = made[1].served_table = made[1]._first_table(PARTITIONS, "other")
    for n in range(1_000):
        made[0].write(b"key%d" % n, b"v", 0)
    yield made
    for one in made:
        one.close()


def copied(pair: tuple[FakeCluster, FakeCluster], *arguments: str) -> tuple[int, Any]:
    urls = [f"koinon://{one.seeds}" for one in pair]
    ended = ran("--from", urls[0], "--to", urls[1], *arguments)
    return ended.exit_code, json.loads(ended.stdout)


def test_copy_target_refuses_rows_ends_early(pair: tuple[FakeCluster, FakeCluster]) -> None:
    def refuse(_: int) -> KoinonError:
        return StorageFullError(node_id="n1", reason="the disk is full")

    pair[1].nodes[0].refuse = refuse
    code, answer = copied(pair)
    assert (code, answer["rows_applied"]) == (3, 0)
    assert 0 < answer["rows_refused"] < 1_000
    assert "the disk is full" in answer["examples"][0]


def test_copy_interrupted_ends_between_slabs(pair: tuple[FakeCluster, FakeCluster]) -> None:
    async def interrupt(method: str, _: object) -> None:
        if method == "BatchWrite":
            pair[1].nodes[0].before = None
            os.kill(os.getpid(), signal.SIGINT)

    pair[1].nodes[0].before = interrupt
    code, answer = copied(pair, "--verify")
    assert (code, answer["interrupted"], answer["verify"]) == (130, True, None)
    assert 0 < answer["rows_applied"] == len(pair[1].store) < 1_000
    assert copied(pair, "--if-absent", "--verify")[1]["verify"]["identical"]


def test_rows_whose_time_is_over_are_not_sent() -> None:
    tally = Tally()
    slab = [
        Entry(b"gone", b"v", 1, 5_000),
        Entry(b"short", b"v", 1, 5_001),
        Entry(b"k", b"v", 1, None),
    ]
    default = Keyspaces(config_of(8), NO_KEYSPACES).default
    rows = tally.rows_of(slab, default, now_ms=5_000)
    assert rows == [(b"short", b"v", 1), (b"k", b"v", None)]
    assert (tally.read, tally.expired) == (3, 1)
