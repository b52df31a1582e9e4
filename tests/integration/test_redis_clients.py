"""Guests: clients of Redis Cluster against a cluster of real processes."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster
from redis.exceptions import LockError

from koinon.local import LocalCluster, Setup
from koinon_proto.partitioner import slot_of
from tests.integration.copies import is_settled
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient

PARTITIONER = ["--partitioner", "crc16", "--partitions", "64"]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def slots() -> Iterator[LocalCluster]:
    """Three nodes that route by Redis's slots, all in sync."""
    with running_cluster(
        nodes=3, coordinators=1, setup=Setup(coordinator_flags=PARTITIONER)
    ) as cluster:
        cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all are in sync")
        yield cluster


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def guest(slots: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    client = connect(slots, protocol=request.param)
    yield client
    client.close()


def connect(cluster: LocalCluster, **options: Any) -> Any:
    host, _, port = cluster.redis_address("n1").rpartition(":")
    return RedisCluster(host=host, port=int(port), **options)


def lone(cluster: LocalCluster, name: str) -> Any:
    """Return a client of one node, which follows no redirection."""
    host, _, port = cluster.redis_address(name).rpartition(":")
    return redis.Redis(host=host, port=int(port))


def raw(cluster: LocalCluster, *arguments: str) -> Any:
    """Return what the first node answers, as it comes."""
    with RespClient(cluster.redis_address("n1")) as client:
        return client.call(*arguments)


Call = Callable[[Any], Any]
COMMANDS: dict[str, list[tuple[Call, Any]]] = {
    "set": [
        (lambda r: r.set("k", "1"), True),
        (lambda r: r.set("k", "2", nx=True), None),
        (lambda r: r.set("k", "3", xx=True, get=True), b"1"),
        (lambda r: r.set("new", "1", xx=True), None),
        (lambda r: r.set("new", "1", nx=True, get=True), None),
        (lambda r: r.get("new"), b"1"),
        (lambda r: r.set("k", "4", ex=100), True),
        (lambda r: r.set("k", "5", keepttl=True), True),
        (lambda r: 95 <= r.ttl("k") <= 100, True),
        (lambda r: r.set("k", "6"), True),
        (lambda r: r.ttl("k"), -1),
        (lambda r: r.set("k", "7", pxat=1), True),
        (lambda r: r.get("k"), None),
        (lambda r: (r.setnx("n", "1"), r.setnx("n", "2")), (True, False)),
        (
            lambda r: (
                r.execute_command("SETEX", "k", 100, "v")
                and r.execute_command("PSETEX", "k", 90_000, "w")
            ),
            True,
        ),
        (lambda r: (85 <= r.ttl("k") <= 90, r.get("k")), (True, b"w")),
    ],
    "get": [
        (lambda r: r.mset({"{t}a": "1", "{t}b": "2"}), True),
        (lambda r: r.mget("{t}a", "{t}missing", "{t}b"), [b"1", None, b"2"]),
        (lambda r: r.exists("{t}a", "{t}a", "{t}missing"), 2),
        (lambda r: r.strlen("{t}a"), 1),
        (lambda r: (r.append("{t}a", "23"), r.get("{t}a")), (3, b"123")),
        (lambda r: (r.getdel("{t}a"), r.getdel("{t}a")), (b"123", None)),
        (lambda r: (r.type("{t}b"), r.type("{t}a")), (b"string", b"none")),
        (lambda r: (r.delete("{t}b"), r.unlink("{t}b")), (1, 0)),
    ],
    "parts": [
        (lambda r: r.getrange("k", 0, -1), b""),
        (lambda r: r.setrange("k", 3, "def"), 6),
        (lambda r: r.get("k"), b"\0\0\0def"),
        (lambda r: (r.setrange("k", 0, "abc"), r.setrange("k", 100, "")), (6, 6)),
        (lambda r: (r.getrange("k", 0, 1), r.getrange("k", 4, 99)), (b"ab", b"ef")),
        (lambda r: (r.getrange("k", -3, -2), r.substr("k", -99, 0)), (b"de", b"a")),
        (lambda r: (r.getrange("k", 3, 2), r.getrange("k", 0, -99)), (b"", b"a")),
        (lambda r: r.setrange("new", 0, ""), 0),
        (lambda r: r.touch("{t}k", "{t}k", "{t}new"), 0),
        (lambda r: (r.set("{t}a", "1"), r.touch("{t}a", "{t}b", "{t}a")), (True, 2)),
    ],
    "all or nothing": [
        (lambda r: (r.getset("k", "1"), r.expire("k", 100)), (None, True)),
        (lambda r: (r.getset("k", "2"), r.get("k"), r.ttl("k")), (b"1", b"2", -1)),
        (lambda r: r.msetnx({"{t}a": "1", "{t}b": "2"}), True),
        (lambda r: r.delete("{t}a"), 1),
        (lambda r: r.msetnx({"{t}a": "3", "{t}b": "4"}), False),
        (lambda r: r.mget("{t}a", "{t}b"), [None, b"2"]),
    ],
    "numbers": [
        (
            lambda r: (r.incr("n"), r.incrby("n", 41), r.decr("n"), r.decrby("n", 40)),
            (1, 42, 41, 1),
        ),
        (lambda r: r.set("n", 10.5) and r.incrbyfloat("n", 0.1), 10.6),
        (lambda r: r.get("n"), b"10.6"),
    ],
    "expiry": [
        (lambda r: r.expire("k", 10), False),
        (lambda r: (r.ttl("k"), r.pttl("k")), (-2, -2)),
        (lambda r: r.set("k", "v") and r.expire("k", 100), True),
        (lambda r: r.expire("k", 200, nx=True), False),
        (lambda r: r.expire("k", 50, gt=True), False),
        (lambda r: r.expire("k", 50, lt=True), True),
        (lambda r: r.pexpire("k", 90_000, xx=True), True),
        (lambda r: 85 <= r.ttl("k") <= 90, True),
        (lambda r: r.expireat("k", 4_000_000_000), True),
        (lambda r: (r.expiretime("k"), r.pexpiretime("k")), (4_000_000_000, 4_000_000_000_000)),
        (lambda r: (r.persist("k"), r.persist("k"), r.ttl("k")), (True, False, -1)),
        (lambda r: (r.getex("k", px=90_000), 85_000 <= r.pttl("k") <= 90_000), (b"v", True)),
        (lambda r: (r.getex("k", persist=True), r.ttl("k")), (b"v", -1)),
        (lambda r: (r.expire("k", -1), r.exists("k")), (True, 0)),
    ],
}


@pytest.mark.parametrize("steps", COMMANDS.values(), ids=COMMANDS.keys())
def test_commands_answer_as_redis_does(guest: Any, steps: list[tuple[Call, Any]]) -> None:
    for key in ("k", "n", "new", "{t}a", "{t}b"):
        guest.delete(key)
    for number, (call, expected) in enumerate(steps):
        assert call(guest) == expected, number


def test_lock_of_redis_py_is_held_by_one_and_released_by_its_holder_only(guest: Any) -> None:
    mine, other = guest.lock("lock", timeout=60), guest.lock("lock", timeout=60)
    assert mine.acquire(blocking=False)
    assert not other.acquire(blocking=False)
    assert mine.extend(60)
    assert 60_000 < guest.pttl("lock") <= 120_000
    assert mine.reacquire()
    assert guest.pttl("lock") <= 60_000
    other.local.token = b"not the holder's"
    for call in (other.release, lambda: other.extend(1), other.reacquire):
        with pytest.raises(LockError):
            call()
        other.local.token = b"not the holder's"
    assert mine.owned()
    mine.release()
    assert not guest.exists("lock")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.set("k", "text") and r.incr("k"), "value is not an integer or out of range"),
        (lambda r: r.incrbyfloat("k", 1), "value is not a valid float"),
        (lambda r: r.set("k", (1 << 63) - 1) and r.incr("k"), "would overflow"),
        (lambda r: r.execute_command("SET", "k", "v", "EX", "0"), "invalid expire time in 'set'"),
        (lambda r: r.execute_command("SET", "k", "v", "NX", "XX"), "syntax error"),
        (lambda r: r.execute_command("SET", "k", "v", "EX", "1", "PX", "1"), "syntax error"),
        (lambda r: r.execute_command("EXPIRE", "k", "1", "NX", "XX"), "NX and XX, GT or LT"),
        (lambda r: r.execute_command("SET", "k"), "wrong number of arguments for 'set'"),
        (lambda r: r.set("k", bytes(1024 * 1024 + 1)), "too long"),
        (lambda r: r.setrange("k", -1, "v"), "offset is out of range"),
        (lambda r: r.setrange("k", 1024 * 1024, "v"), "too long"),
        (lambda r: r.execute_command("GETRANGE", "k", "x", "1"), "not an integer"),
        (lambda r: r.execute_command("MSETNX", "k", "v", "k"), "wrong number.*'msetnx'"),
        (lambda r: r.msetnx({f"{{t}}{n}": "v" for n in range(1_001)}), "1,000 keys"),
    ],
)
def test_what_is_refused_is_said_in_the_words_of_redis(
    slots: LocalCluster, call: Call, words: str
) -> None:
    with connect(slots) as client, pytest.raises(redis.ResponseError, match=words):
        call(client)


def test_command_of_another_type_is_unknown_by_its_name(slots: LocalCluster) -> None:
    with lone(slots, "n1") as node, pytest.raises(redis.ResponseError, match=r"unknown.*LPUSH"):
        node.execute_command("LPUSH", "k", "v")


def test_keys_of_several_slots_are_refused_and_change_nothing(slots: LocalCluster) -> None:
    for name in slots.node_names:
        with lone(slots, name) as node, pytest.raises(redis.ResponseError, match="same slot"):
            node.execute_command("MSET", "cross:a", "1", "cross:b", "2")


def test_another_nodes_key_is_moved_to_it_with_the_slot_of_the_key(slots: LocalCluster) -> None:
    answers = set()
    for name in slots.node_names:
        with lone(slots, name) as node:
            try:
                assert node.set("moved", "v")
                served = slots.redis_address(name)
            except redis.exceptions.MovedError as error:
                answers.add((error.slot_id, f"{error.host}:{error.port}"))
    assert answers == {(slot_of(b"moved"), served)}


def test_guests_and_koinons_clients_see_one_anothers_records(
    slots: LocalCluster, guest: Any
) -> None:
    with slots.client() as client:
        guest.set("{both}guest", "from a guest", ex=100)
        entry = client.get_entry(b"{both}guest")
        assert entry is not None
        assert entry.value == b"from a guest"
        assert entry.expires_at_ms == guest.pexpiretime("{both}guest")
        client.put(b"{both}own", b"5")
        assert guest.incr("{both}own") == 6
        assert client.increment(b"{both}own") == 7
        client.delete(b"{both}own")
        assert guest.exists("{both}own") == 0


def test_scan_of_every_node_shows_every_key_once_it_is_there(
    slots: LocalCluster, guest: Any
) -> None:
    with slots.client() as client:
        keys = {b"scan:%d" % n for n in range(3_000)} | {b"{scan}%d" % n for n in range(3_000)}
        client.put_many(dict.fromkeys(keys, b"v"))
        assert set(guest.scan_iter(match="*scan*", count=100)) == keys
        assert set(guest.scan_iter(match="scan:1*", count=100)) == {
            key for key in keys if key.startswith(b"scan:1")
        }
        assert guest.dbsize(target_nodes=RedisCluster.PRIMARIES) >= len(keys)
        slot = slot_of(b"{scan}")
        assert guest.cluster_countkeysinslot(slot) == 3_000
        client.delete_many(guest.scan_iter(match="*scan*"))
        assert list(guest.scan_iter(match="*scan*")) == []


def test_topology_covers_every_slot_in_every_form(slots: LocalCluster) -> None:
    addresses = {slots.redis_address(name) for name in slots.node_names}
    with lone(slots, "n1") as node:
        spans = [(int(span[0]), int(span[1])) for span in raw(slots, "CLUSTER", "SLOTS")]
        covered = [slot for first, last in spans for slot in range(first, last + 1)]
        assert sorted(covered) == list(range(16_384))
        nodes = node.execute_command("CLUSTER NODES")
        assert set(nodes) == addresses
        assert node.execute_command("CLUSTER MYID").decode() in str(nodes)
        assert node.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
        assert node.execute_command("CLUSTER KEYSLOT", "{a}b") == slot_of(b"a")
        assert len(raw(slots, "CLUSTER", "SHARDS")) == 3


def test_command_describes_every_command(slots: LocalCluster) -> None:
    with lone(slots, "n1") as node:
        described = node.command()
        assert node.command_count() == len(described)
        assert described["set"]["arity"] == -3
        assert described["mset"]["step_count"] == 2
    assert raw(slots, "COMMAND", "GETKEYS", "MSET", "a", "1", "b", "2") == [b"a", b"b"]


def test_cluster_of_another_partitioner_says_how_to_make_one_that_fits(
    cluster: LocalCluster,
) -> None:
    with lone(cluster, "n1") as node, pytest.raises(redis.ResponseError, match="partitioner crc16"):
        node.execute_command("CLUSTER SLOTS")


def cli(*arguments: str, typed: str | None = None) -> str:
    found = shutil.which(arguments[0])
    if found is None:
        pytest.skip(f"{arguments[0]} is not installed")
    run = subprocess.run(
        [found, *arguments[1:]],
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return run.stdout


def test_redis_cli_follows_redirections_and_finds_the_cluster_well(slots: LocalCluster) -> None:
    host, _, port = slots.redis_address("n1").rpartition(":")
    for n in range(5):
        assert cli("redis-cli", "-c", "-p", port, "set", f"cli{n}", "v").strip() == "OK"
        assert cli("redis-cli", "-c", "-p", port, "get", f"cli{n}").strip() == "v"
    text = cli("redis-cli", "--cluster", "check", f"{host}:{port}")
    assert "All nodes agree about slots configuration" in text
    assert "All 16384 slots covered" in text


def test_redis_benchmark_runs_against_the_cluster(slots: LocalCluster) -> None:
    host, _, port = slots.redis_address("n1").rpartition(":")
    work = ["--cluster", "-t", "set,get,incr", "-n", "300", "-c", "10", "--csv"]
    text = cli("redis-benchmark", "-h", host, "-p", port, *work)
    assert all(name in text for name in ("SET", "GET", "INCR"))


# --- FLUSHDB and FLUSHALL ----------------------------------------------------------------------


def test_flush_of_a_client_of_clusters_empties_the_keyspace(guest: Any) -> None:
    for method in (guest.flushdb, guest.flushall):
        for n in range(200):
            guest.set(f"flushed:{n}", "v", ex=None if n % 2 else 1_000)
        assert set(method(asynchronous=True).values()) == {True}
        assert guest.dbsize() == 0
        assert guest.get("flushed:1") is None
        guest.set("flushed:1", "again")
        assert guest.get("flushed:1") == b"again"


def test_flush_by_one_node_empties_what_all_lead_though_another_is_killed(
    slots: LocalCluster,
) -> None:
    client = connect(slots, socket_timeout=30)
    for n in range(300):
        client.set(f"flushed:{n}", "v")
    slots.kill("n3")
    assert raw(slots, "FLUSHDB") == b"OK"
    assert [n for n in range(300) if client.get(f"flushed:{n}") is not None] == []
    slots.restart("n3")
    slots.wait_for(is_settled, timeout_s=2 * TIMEOUT_S, what="all are in sync")
    assert client.dbsize() == 0
    client.close()


def test_flush_is_refused_with_other_words_and_in_a_transaction(slots: LocalCluster) -> None:
    with slots.client() as own:
        own.put(b"kept", b"1")
    for words in (("NOW",), ("ASYNC", "SYNC")):
        assert "syntax error" in str(raw(slots, "FLUSHDB", *words))
    with RespClient(slots.redis_address("n1")) as client:
        client.call("MULTI")
        assert "not allowed inside a transaction" in str(client.call("FLUSHALL"))
        assert str(client.call("EXEC")).startswith("EXECABORT")
    with slots.client() as own:
        assert own.get(b"kept") == b"1"


# --- failover ----------------------------------------------------------------------------------


class Guest(threading.Thread):
    """Writes rising numbers to a key of its own and reads them back. ``written`` is the last that
    was told to be written; what a read shows never lies below it, nor below what a read has shown.
    """

    def __init__(self, client: Any, key: str, stop: threading.Event) -> None:
        super().__init__()
        self.key = key
        self.written = 0
        self.tried = 0
        self.errors: list[redis.RedisError] = []
        self.wrong: list[str] = []
        self._client = client
        self._stop_all = stop

    def run(self) -> None:
        seen = 0
        while not self._stop_all.is_set():
            self.tried += 1
            try:
                if self._client.set(self.key, self.tried):
                    self.written = self.tried
            except redis.RedisError as error:
                self.errors.append(error)
            try:
                found = int(self._client.get(self.key) or 0)
            except redis.RedisError as error:
                self.errors.append(error)
                continue
            if not max(seen, self.written) <= found <= self.tried:
                self.wrong.append(f"{found} after {seen}, written {self.written}")
            seen = found


def test_guest_through_kills_is_told_ok_for_nothing_that_is_lost(slots: LocalCluster) -> None:
    stop = threading.Event()
    client = connect(slots, socket_timeout=10)
    guests = [Guest(client, f"failover:{n}", stop) for n in range(8)]
    for guest in guests:
        guest.start()
    try:
        for name in ("n2", "n3"):
            wait_for_progress(guests)
            slots.kill(name)
            wait_for_progress(guests)
            slots.restart(name)
            slots.wait_for(is_settled, timeout_s=2 * TIMEOUT_S, what="all are in sync")
    finally:
        stop.set()
        for guest in guests:
            guest.join()
        client.close()
    assert [guest.wrong for guest in guests] == [[]] * len(guests)
    with slots.client() as own:
        for guest in guests:
            found = int(own.get(guest.key.encode()) or b"0")
            assert guest.written <= found <= guest.tried


class Simple(threading.Thread):
    """A client that follows MOVED, goes on elsewhere when a connection ends, and takes every other
    error as the end of a command.
    """

    def __init__(self, addresses: Sequence[str], key: str, stop: threading.Event) -> None:
        super().__init__()
        self.written = 0
        self.errors: list[str] = []
        self._addresses = deque(addresses)
        self._key = key
        self._stop_all = stop

    def run(self) -> None:
        while not self._stop_all.is_set():
            try:
                with RespClient(self._addresses[0]) as client:
                    self._write_on(client)
            except OSError:
                self._addresses.rotate()

    def _write_on(self, client: RespClient) -> None:
        while not self._stop_all.is_set():
            for command in (("SET", self._key, "v"), ("GET", self._key)):
                reply = client.call(*command)
                if str(reply).startswith("MOVED"):
                    address = str(reply).split()[2]
                    self._addresses.rotate(-self._addresses.index(address))
                    return
                if isinstance(reply, Exception):
                    self.errors.append(str(reply))
            self.written += 1


def test_planned_hand_over_shows_no_error_to_a_client_that_only_follows_moved(
    slots: LocalCluster,
) -> None:
    stop = threading.Event()
    addresses = [slots.redis_address(name) for name in slots.node_names]
    clients = [Simple(addresses, f"planned:{n}", stop) for n in range(16)]
    for client in clients:
        client.start()
    try:
        for name in ("n2", "n3"):
            wait_for_progress(clients)
            slots.terminate(name)
            wait_for_progress(clients)
            slots.restart(name)
            slots.wait_for(is_settled, timeout_s=2 * TIMEOUT_S, what="all are in sync")
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert [client.errors for client in clients] == [[]] * len(clients)


def wait_for_progress(guests: Sequence[Guest | Simple]) -> None:
    """Wait until every one of them has written more."""
    before = [guest.written for guest in guests]
    wait_until(
        lambda: all(g.written > b + 3 for g, b in zip(guests, before, strict=True)),
        "guests write on",
        timeout_s=2 * TIMEOUT_S,
    )
