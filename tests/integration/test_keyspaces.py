"""Keyspaces on real processes: created, used by every kind of operation, dropped, and killed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner

import koinon
from koinon.client import Client, KeyspaceClient
from koinon.driver.engine import Engine
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    QuotaExceededError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.table import NodeNumber, Table
from koinon_proto.partitioner import partitioner_of
from tests.kit.command_line import koinon_app
from tests.kit.waiting import wait_until

KEYS = 300
TIMEOUT_MS = 30_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, coordinators=3) as made:
        yield made


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.coordinators, timeout_ms=TIMEOUT_MS) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with koinon.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS) as made:
        yield made


def table_of(admin: Admin) -> Table:
    table = admin.status().table
    assert table is not None
    return table


def wait_for(admin: Admin, condition: Callable[[Table], bool]) -> None:
    wait_until(lambda: condition(table_of(admin)))


def drop(admin: Admin, name: str) -> None:
    """Drop the keyspace, and wait until its partitions may be another's."""
    admin.keyspaces.drop(name)
    wait_for(admin, lambda table: not table.keyspaces.dropping)


def rows(count: int = KEYS) -> dict[bytes, bytes]:
    return {b"city%d/%d" % (n % 7, n): b"%d" % n for n in range(count)}


def test_every_operation_stays_in_its_keyspace(admin: Admin, client: Client) -> None:
    admin.keyspaces.create("rides", partition_count=8, partitioner="murmur2(until:2f)")
    rides = client.keyspace("rides")
    client.put(b"city1/1", b"default")
    rides.put_many(rows()).raise_for_errors()
    assert client.get(b"city1/1") == b"default"
    assert rides.get_many(list(rows())) == list(rows().values())
    assert {entry.key for entry in rides.scan()} == set(rows())
    assert b"city2/2" not in {entry.key for entry in client.scan()}
    found = [entry.key for entry in rides.scan(prefix=b"city3/")]
    assert found == sorted(key for key in rows() if key.startswith(b"city3/"))
    assert (
        rides.batch(b"city1/a").put(b"city1/a", b"1").increment(b"city1/n").commit().results[1] == 1
    )
    assert rides.increment(b"n", 4) == 4
    assert (rides.exists(b"city1/n"), client.exists(b"city1/n")) == (True, False)
    assert rides.delete_many(list(rows())).absent == 0
    assert client.get(b"city1/1") == b"default"
    drop(admin, "rides")


def test_single_operations_go_over_resp_in_any_keyspace_until_it_is_dropped(
    cluster: LocalCluster, admin: Admin
) -> None:
    made = admin.keyspaces.create("fast", partition_count=8).keyspace
    with koinon.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS) as client:
        fast = client.keyspace("fast")
        for n in range(40):
            fast.put(b"k%d" % n, b"fast")
        assert {fast.get(b"k%d" % n) for n in range(40)} == {b"fast"}
        assert (fast.increment(b"n", 4), fast.get_or_put(b"k1", b"new")) == (4, b"fast")
        assert client.get(b"k1") is None
        engine = client._engine
        assert isinstance(engine, Engine)
        assert engine.pools is not None
        pools = engine.pools.by_place

        def goes_over_resp() -> bool:
            fast.put(b"k1", b"fast")
            return any(
                place[1] == made.keyspace_id and pool.sockets for place, pool in [*pools.items()]
            )

        wait_until(goes_over_resp)
        drop(admin, "fast")
        admin.keyspaces.create("fast", partition_count=8)
        for use in (lambda: fast.get(b"k1"), lambda: fast.put(b"k1", b"v")):
            with pytest.raises(UnknownKeyspaceError):
                use()
        again = client.keyspace("fast")
        assert again.get(b"k1") is None
        links = {place[2] for place in engine.singles._resp_links}
        assert made.keyspace_id not in links, "those of the keyspace that is gone were ended"
    drop(admin, "fast")


async def test_asyncio_client_and_url_open_a_keyspace(
    cluster: LocalCluster, admin: Admin, client: Client
) -> None:
    admin.keyspaces.create("orders", partition_count=4)
    async with koinon.aio.connect(cluster.coordinators, timeout_ms=TIMEOUT_MS) as opened:
        orders = await opened.keyspace("orders")
        await orders.put(b"k", b"async")
        found = await orders.get(b"k"), await opened.get(b"k")
    assert found == (b"async", None)
    url = f"koinon://{cluster.coordinators}/orders?timeout_ms={TIMEOUT_MS}"
    with koinon.connect(url) as by_url:
        assert by_url.get(b"k") == b"async"
        assert by_url.keyspace("default").get(b"k") is None
    with pytest.raises(UnknownKeyspaceError, match="'none'"):
        koinon.connect(cluster.coordinators, keyspace="none")
    drop(admin, "orders")


def test_dropped_keyspace_is_gone_for_all_and_its_name_and_partitions_are_anothers(
    cluster: LocalCluster, admin: Admin, client: Client
) -> None:
    """Also for a client whose table still shows the keyspace before, on the same partitions."""
    first = admin.keyspaces.create("again", partition_count=4).keyspace
    old = client.keyspace("again")
    old.put_many(rows()).raise_for_errors()
    behind = koinon.connect(cluster.coordinators, keyspace="again", timeout_ms=TIMEOUT_MS)
    stale = behind.keyspace("again")
    admin.keyspaces.drop("again")
    for use in (lambda: old.get(b"city1/1"), lambda: old.put(b"k", b"v"), lambda: list(old.scan())):
        with pytest.raises(UnknownKeyspaceError):
            use()
    wait_for(admin, lambda table: table.keyspaces.by_id(first.keyspace_id) is None)
    second = admin.keyspaces.create("again", partition_count=4).keyspace
    assert second.base == first.base
    again = client.keyspace("again")
    assert list(again.scan()) == []
    again.put(b"city1/1", b"new")
    with pytest.raises(UnknownKeyspaceError):
        old.get(b"city1/1")
    with pytest.raises(UnknownKeyspaceError):
        old.put_many(rows())
    with pytest.raises(UnknownKeyspaceError):
        stale.get(b"city1/1")
    assert len(stale.put_many(rows()).refused) == KEYS
    assert again.get(b"city1/1") == b"new"
    assert len(list(again.scan())) == 1
    behind.close()
    drop(admin, "again")


def test_min_in_sync_that_is_altered_holds_for_rows_that_do_not_change(
    cluster: LocalCluster, admin: Admin, client: Client
) -> None:
    admin.keyspaces.create("safe", partition_count=4)
    safe = client.keyspace("safe")
    safe.put_many(rows()).raise_for_errors()
    admin.keyspaces.alter("safe", min_in_sync=3)
    safe.put_many(rows()).raise_for_errors()
    table = client.table()
    # What n2 leads is not served at all while it is down: no node may leave the in-sync sets.
    key = next(k for k in rows() if table.nodes[primary_of(table, k)].node_id != "n2")
    cluster.kill("n2")

    def is_refused() -> bool:
        """Tell whether a put is refused; before the node is given up, it may be of unknown fate."""
        try:
            safe.put(key, b"v", timeout_ms=1_000)
        except koinon.UnknownFateError:
            return False
        except koinon.UnavailableError as error:
            return "3 are needed" in str(error)
        pytest.fail("a put was acknowledged with two copies of three")

    try:
        wait_until(is_refused)
        assert client.put(b"k", b"v")  # two of three are enough in default
        admin.keyspaces.alter("safe", min_in_sync=2)
        for one in rows():
            assert safe.put(one, b"v")
    finally:
        cluster.restart("n2")
    drop(admin, "safe")


def test_times_to_live_that_are_altered_hold_for_what_is_written_from_then_on(
    admin: Admin, client: Client
) -> None:
    """The client's table is the one from before: the nodes go by what is new at once."""
    admin.keyspaces.create("sessions", partition_count=4, default_ttl_ms=60_000)
    sessions = client.keyspace("sessions")
    sessions.put_many(rows(20)).raise_for_errors()
    sessions.put(b"long", b"v", ttl_ms=3_600_000)
    assert all(expires_in_ms(sessions, key) <= 60_000 for key in rows(20))
    admin.keyspaces.alter("sessions", max_ttl_ms=60_000)
    with pytest.raises(InvalidArgumentError, match="limit 60000, got 60001"):
        sessions.put(b"k", b"v", ttl_ms=60_001)
    failed = sessions.put_many(rows(20), ttl_ms=60_001)
    assert len(failed.refused) == 20
    with pytest.raises(InvalidArgumentError):
        sessions.batch(b"k").put(b"k", b"v", ttl_ms=60_001).commit()
    with pytest.raises(InvalidArgumentError, match="cannot live for ever"):
        sessions.touch(b"long", None)
    assert expires_in_ms(sessions, b"long") > 3_000_000  # as it was written
    admin.keyspaces.alter("sessions", default_ttl_ms=0, max_ttl_ms=0)
    sessions.put(b"k", b"v")
    entry = sessions.get_entry(b"k")
    assert entry is not None
    assert entry.expires_at_ms is None
    drop(admin, "sessions")


def test_limits_hold_in_the_whole_cluster_from_the_moment_that_they_are_set(
    cluster: LocalCluster, admin: Admin, client: Client
) -> None:
    """With a limit of a byte a second, a large row keeps its node's share for hours."""
    admin.keyspaces.create("public", partition_count=16)
    public = client.keyspace("public")
    public.put_many(rows()).raise_for_errors()
    made = admin.keyspaces.alter("public", max_bytes_per_s=1).keyspace
    assert (made.max_rows_per_s, made.max_bytes_per_s) == (0, 1)
    large = {b"large%d" % n: bytes(10_000) for n in range(64)}  # on every node
    written = public.put_many(large)
    assert not written.unknown
    assert {type(failure.error) for failure in written.refused} == {QuotaExceededError}
    for use in (
        lambda: public.put(b"k", b"v"),
        lambda: public.get(b"city1/1"),
        lambda: public.get_many(list(rows())),
        lambda: public.increment(b"n"),
        lambda: public.batch(b"k").put(b"k", b"v").commit(),
        lambda: list(public.scan()),
    ):
        with pytest.raises(
            QuotaExceededError, match="keyspace 'public' is at its limit of 1 bytes"
        ):
            use()
    client.put(b"k", bytes(10_000))
    assert client.get(b"k") == bytes(10_000), "others are in nobody's way"
    admin.keyspaces.alter("public", max_bytes_per_s=0)
    assert public.get(b"k") is None
    assert public.get(b"n") is None
    public.put_many(large).raise_for_errors()
    drop(admin, "public")


async def test_clients_wait_for_their_turn_and_get_it(
    cluster: LocalCluster, admin: Admin, client: Client
) -> None:
    """Every kind of client gets done within the deadline what is refused at first."""
    admin.keyspaces.create("narrow", partition_count=2, max_rows_per_s=300)
    narrow = client.keyspace("narrow")
    narrow.put_many(rows()).raise_for_errors()  # 300 of them
    for n in range(30):
        narrow.increment(b"n")
        assert narrow.get(b"city1/%d" % (1 + 7 * n)) == b"%d" % (1 + 7 * n)
    assert narrow.get_many(list(rows())) == list(rows().values())
    assert len(list(narrow.scan())) == len(rows()) + 1

    async with koinon.aio.connect(
        cluster.coordinators, timeout_ms=TIMEOUT_MS, keyspace="narrow"
    ) as opened:
        await asyncio.gather(*[opened.increment(b"n") for _ in range(70)])
        found = int(await opened.get(b"n") or 0)
    assert found == 100
    drop(admin, "narrow")


def primary_of(table: Table, key: bytes) -> NodeNumber:
    """Return the node that leads the key's partition in the keyspace ``safe``."""
    return table.rows[partitioner_of(table.keyspaces.named("safe")).partition_of(key)].primary


def expires_in_ms(client: Client | KeyspaceClient, key: bytes) -> float:
    entry = client.get_entry(key)
    assert entry is not None
    assert entry.expires_at_ms is not None
    return entry.expires_at_ms - time.time() * 1_000


def test_commands_create_use_show_and_drop_a_keyspace(cluster: LocalCluster) -> None:
    def koinon_command(*arguments: str, code: int = 0) -> str:
        environment = {"KOINON_COORDINATORS": cluster.coordinators, "COLUMNS": "200"}
        ended = CliRunner().invoke(koinon_app(), arguments, env=environment)
        assert ended.exit_code == code, ended.output
        return ended.stdout

    create = ("admin", "keyspaces", "create", "carts", "--router", "until:2f", "--partitions", "4")
    made = json.loads(koinon_command(*create, "--json"))["keyspace"]
    assert (made["partitioner"], made["partition_count"]) == ("murmur2(until:2f)", 4)
    koinon_command(*create)  # again
    koinon_command(*create[:-1], "8", code=2)
    koinon_command("put", "--keyspace", "carts", "u7/shoes", "2")
    assert koinon_command("get", "--keyspace", "carts", "u7/shoes").strip() == "2"
    koinon_command("get", "u7/shoes", code=1)
    where = json.loads(koinon_command("where", "--keyspace", "carts", "u7/shoes", "--json"))
    assert where["partition_id"] >= made["base"]
    (found,) = [
        keyspace
        for keyspace in json.loads(koinon_command("admin", "keyspaces", "--json"))["keyspaces"]
        if keyspace["name"] == "carts"
    ]
    assert found["online"] == 4
    assert "carts" in koinon_command("admin", "keyspaces")
    described = koinon_command("admin", "keyspaces", "describe", "carts")
    assert "4 of 4 online" in described
    assert "murmur2(until:2f), fingerprint " in described
    one = koinon_command("admin", "keyspaces", "describe", "carts", "--json")
    assert json.loads(one)["keyspace"] == found
    koinon_command("admin", "keyspaces", "describe", "cart", code=2)
    altered = koinon_command("admin", "keyspaces", "alter", "carts", "--max-value", "3", "--json")
    assert json.loads(altered)["keyspace"]["max_value_bytes"] == 3
    koinon_command("put", "--keyspace", "carts", "u7/shoes", "1234", code=2)
    koinon_command(
        "admin", "keyspaces", "alter", "carts", "--default-ttl", "1d", "--max-ttl", "30d"
    )
    assert "1d, at most 30d" in koinon_command("admin", "keyspaces")
    koinon_command("put", "--keyspace", "carts", "u7/shoes", "2", "--ttl", "31d", code=2)
    koinon_command("admin", "keyspaces", "alter", "carts", "--max-ttl", "1h", code=2)
    altered = koinon_command(
        "admin", "keyspaces", "alter", "carts", "--default-ttl", "none", "--json"
    )
    altered_keyspace = json.loads(altered)["keyspace"]
    assert (altered_keyspace["default_ttl_ms"], altered_keyspace["max_ttl_ms"]) == (
        0,
        30 * 86_400_000,
    )
    limits = ("--max-rows-per-s", "5000", "--max-bytes-per-s", "10MB")
    koinon_command("admin", "keyspaces", "alter", "carts", *limits)
    assert "5,000 rows/s, 10.0 MB/s" in koinon_command("admin", "keyspaces")
    altered = koinon_command(
        "admin", "keyspaces", "alter", "carts", "--max-rows-per-s", "none", "--json"
    )
    altered_keyspace = json.loads(altered)["keyspace"]
    assert (altered_keyspace["max_rows_per_s"], altered_keyspace["max_bytes_per_s"]) == (
        0,
        10_000_000,
    )
    koinon_command("admin", "keyspaces", "alter", "carts", "--max-rows-per-s", "many", code=2)
    koinon_command("admin", "keyspaces", "drop", "carts", "--json", code=2)  # no question is asked
    koinon_command("admin", "keyspaces", "drop", "carts", "--yes")
    koinon_command("get", "--keyspace", "carts", "u7/shoes", code=2)
    koinon_command("admin", "keyspaces", "drop", "default", "--yes", code=2)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["leader", "node"])
def test_creation_use_and_drop_survive_who_is_killed(
    cluster: LocalCluster, admin: Admin, client: Client, victim: str
) -> None:
    """If a process dies, a keyspace is there or it is not, acknowledged rows stay, and a dropped
    one is erased by the node that was down, too, before another gets its partitions.
    """
    name = f"killed-{victim}"
    client.put_many(rows()).raise_for_errors()
    made = admin.keyspaces.create(name, partition_count=8).keyspace
    space = client.keyspace(name)
    space.put_many(rows()).raise_for_errors()
    killed = admin.status().leader_id if victim == "leader" else "n2"
    cluster.kill(killed)
    wait_until(lambda: space.get_many(list(rows())) == list(rows().values()))
    admin.keyspaces.drop(name)
    if victim == "node":
        assert table_of(admin).keyspaces.by_id(made.keyspace_id) is not None  # n2 may hold it
        other = admin.keyspaces.create(f"{name}-2", partition_count=8, replication_factor=2)
        assert other.keyspace.base != made.base
        admin.keyspaces.drop(f"{name}-2")
    cluster.restart(killed)
    wait_for(admin, lambda table: not table.keyspaces.dropping)
    admin.keyspaces.create(name, partition_count=8)
    assert list(client.keyspace(name).scan()) == []
    assert client.get_many(list(rows())) == list(rows().values())
    drop(admin, name)
