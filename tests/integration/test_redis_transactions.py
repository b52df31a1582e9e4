"""Transactions of Redis's clients on real processes: MULTI, EXEC, DISCARD, WATCH."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import hiredis
import pytest
import redis
from redis.cluster import RedisCluster

from koinon.local import LocalCluster, Setup
from koinon_proto.partitioner import slot_of
from tests.integration.copies import is_settled
from tests.integration.rolling import PATIENT
from tests.integration.test_redis_clients import PARTITIONER, TIMEOUT_S, cli, connect, lone
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient

ABORTED = "EXECABORT Transaction discarded because of previous errors."


@pytest.fixture(scope="module")
def slots() -> Iterator[LocalCluster]:
    """Two nodes that route by Redis's slots, all in sync."""
    with running_cluster(
        nodes=2, coordinators=1, setup=Setup(coordinator_flags=[*PARTITIONER, *PATIENT])
    ) as cluster:
        cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all are in sync")
        yield cluster


def node_of(cluster: LocalCluster, key: bytes) -> str:
    """Return the node that serves the key."""
    with cluster.client() as client:
        table = client.table()
        count = table.cluster.partition_count
        primary = table.primary_of(slot_of(key) * count // 16_384)
    assert primary is not None
    return primary.node_id


def free_key(cluster: LocalCluster, name: str, *, other_than: bytes | None = None) -> bytes:
    """Return a tag that n1 serves, in another slot than this one."""
    tags = (b"{%s%d}" % (name.encode(), n) for n in itertools.count())
    taken = None if other_than is None else slot_of(other_than)
    return next(tag for tag in tags if node_of(cluster, tag) == "n1" and slot_of(tag) != taken)


@pytest.fixture
def one(slots: LocalCluster) -> Iterator[RespClient]:
    with RespClient(slots.redis_address("n1")) as client:
        yield client


@pytest.fixture
def other(slots: LocalCluster) -> Iterator[RespClient]:
    with RespClient(slots.redis_address("n1")) as client:
        yield client


@pytest.fixture
def tag(slots: LocalCluster, request: pytest.FixtureRequest) -> bytes:
    return free_key(slots, request.node.name)


def told(reply: Any) -> str:
    assert isinstance(reply, hiredis.ReplyError), reply
    return str(reply)


def test_every_command_is_answered_in_its_place_over_what_those_before_left(
    one: RespClient, tag: bytes
) -> None:
    a, b, n, gone = (tag + name for name in (b"a", b"b", b"n", b"gone"))
    one.call("SET", gone, "v")
    steps: list[tuple[tuple[Any, ...], Any]] = [
        (("SET", a, "1"), b"OK"),
        (("GET", a), b"1"),
        (("INCRBY", n, 5), 5),
        (("MSET", a, "2", b, "3"), b"OK"),
        (("MGET", a, tag + b"missing", b), [b"2", None, b"3"]),
        (("SET", a, "4", "NX"), None),
        (("SET", a, "4", "GET"), b"2"),
        (("APPEND", a, "56"), 3),
        (("STRLEN", a), 3),
        (("EXPIRE", a, 100), 1),
        (("TTL", a), 100),
        (("PERSIST", a), 1),
        (("TTL", a), -1),
        (("DEL", gone, tag + b"missing", b), 2),
        (("EXISTS", a, gone, b), 1),
        (("GETDEL", a), b"456"),
        (("TYPE", a), b"none"),
        (("INCRBYFLOAT", n, "0.5"), b"5.5"),
        (("PING",), b"PONG"),
        (("ECHO", "x"), b"x"),
        (("UNWATCH",), b"OK"),
    ]
    assert one.call("MULTI") == b"OK"
    for arguments, _ in steps:
        assert one.call(*arguments) == b"QUEUED"
    found = one.call("EXEC")
    for (arguments, expected), reply in zip(steps, found, strict=True):
        assert reply == expected, arguments
    assert one.call("GET", n) == b"5.5"


def test_all_records_of_a_transaction_have_one_version(
    slots: LocalCluster, one: RespClient, tag: bytes
) -> None:
    keys = [tag + b"%d" % n for n in range(20)]
    one.call("MULTI")
    for key in keys:
        one.call("SET", key, "v")
    assert one.call("EXEC") == [b"OK"] * len(keys)
    with slots.client() as client:
        entries = client.get_entries(keys)
    assert len({entry.version for entry in entries if entry}) == 1


def test_others_see_nothing_until_exec(one: RespClient, other: RespClient, tag: bytes) -> None:
    one.call("MULTI")
    one.call("SET", tag, "v")
    assert other.call("GET", tag) is None
    assert one.call("EXEC") == [b"OK"]
    assert other.call("GET", tag) == b"v"


def test_command_that_fails_when_carried_out_leaves_the_others(one: RespClient, tag: bytes) -> None:
    one.call("SET", tag, "text")
    one.call("MULTI")
    commands = [("SET", tag + b"a", "1"), ("INCR", tag), ("SET", tag, "v", "EX", "soon")]
    for arguments in (*commands, ("INCR", tag + b"a")):
        assert one.call(*arguments) == b"QUEUED"
    first, second, third, fourth = one.call("EXEC")
    assert (first, fourth) == (b"OK", 2)
    assert told(second) == "ERR value is not an integer or out of range"
    assert told(third) == "ERR value is not an integer or out of range"
    assert one.call("GET", tag) == b"text"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("NO-SUCH", "k"), "ERR unknown command 'NO-SUCH'"),
        (("SET", "k"), "ERR wrong number of arguments for 'set' command"),
        (("MGET", "cross:a", "cross:b"), "CROSSSLOT"),
        (("HELLO", "3"), "not allowed inside a transaction"),
        (("WAIT", "0", "0"), "not allowed inside a transaction"),
        (("MULTI",), "ERR MULTI calls can not be nested"),
        (("WATCH", "k"), "ERR WATCH inside MULTI is not allowed"),
        (("KOINON.GET", "k", "0"), "KOINON"),
        (("GET", ""), "1 to 500 bytes"),
    ],
)
def test_command_that_is_refused_when_queued_spoils_the_transaction(
    one: RespClient, tag: bytes, arguments: tuple[str, ...], words: str
) -> None:
    one.call("MULTI")
    assert one.call("SET", tag, "v") == b"QUEUED"
    assert words in told(one.call(*arguments))
    assert one.call("SET", tag, "w") == b"QUEUED"
    assert told(one.call("EXEC")) == ABORTED
    assert one.call("GET", tag) is None, "and the connection is out of MULTI"


def test_what_is_out_of_place_is_said_and_spoils_nothing(one: RespClient, tag: bytes) -> None:
    assert told(one.call("EXEC")) == "ERR EXEC without MULTI"
    assert told(one.call("DISCARD")) == "ERR DISCARD without MULTI"
    one.call("MULTI")
    assert one.call("EXEC") == []


def test_discard_and_reset_forget_what_is_queued_and_watched(
    one: RespClient, other: RespClient, tag: bytes
) -> None:
    for word in ("DISCARD", "RESET"):
        one.call("WATCH", tag)
        one.call("MULTI")
        one.call("SET", tag, "queued")
        assert one.call(word) in (b"OK", b"RESET")
        other.call("SET", tag, "other")
        one.call("MULTI")
        one.call("GET", tag)
        assert one.call("EXEC") == [b"other"]


# --- WATCH -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [("SET", "new"), ("DEL",), ("EXPIRE", "100"), ("APPEND", "x"), ("PEXPIRE", "1")],
    ids=lambda change: change[0],
)
def test_watched_key_that_has_changed_makes_exec_nil(
    one: RespClient, other: RespClient, tag: bytes, change: tuple[str, ...]
) -> None:
    one.call("SET", tag, "old")
    assert one.call("WATCH", tag + b"quiet", tag) == b"OK"
    assert one.call("GET", tag) == b"old"
    other.call(change[0], tag, *change[1:])
    if change[0] == "PEXPIRE":
        wait_until(lambda: other.call("GET", tag) is None, "it expires")
    one.call("MULTI")
    one.call("SET", tag + b"a", "v")
    assert one.call("EXEC") is None
    assert one.call("GET", tag + b"a") is None
    one.call("MULTI")  # what was watched is forgotten
    one.call("SET", tag + b"a", "v")
    assert one.call("EXEC") == [b"OK"]


def test_watched_key_that_has_appeared_makes_exec_nil_in_resp3_too(
    one: RespClient, other: RespClient, tag: bytes
) -> None:
    one.call("HELLO", "3")
    one.call("WATCH", tag)
    other.call("SET", tag, "v")
    one.call("MULTI")
    one.send("EXEC")
    assert one.socket.recv(64).endswith(b"_\r\n")


def test_own_write_counts_and_unwatch_forgets(one: RespClient, tag: bytes) -> None:
    one.call("WATCH", tag)
    one.call("SET", tag, "mine")
    one.call("MULTI")
    assert one.call("EXEC") is None
    one.call("WATCH", tag)
    one.call("SET", tag, "again")
    one.call("UNWATCH")
    one.call("MULTI")
    one.call("GET", tag)
    assert one.call("EXEC") == [b"again"]


def test_pipelined_commands_keep_their_order(
    one: RespClient, other: RespClient, tag: bytes
) -> None:
    """UNWATCH after WATCH, a write after WATCH: in one packet as one by one."""
    before = [("WATCH", tag), ("UNWATCH",), ("SET", tag, "1"), ("MULTI",), ("EXEC",)]
    for command in before:
        one.send(*command)
    assert [one.reply() for _ in range(5)] == [b"OK", b"OK", b"OK", b"OK", []]
    commands = [("GET", tag), ("WATCH", tag), ("GET", tag), ("SET", tag, "2"), ("MULTI",)]
    for command in (*commands, ("GET", tag), ("EXEC",), ("GET", tag)):
        one.send(*command)
    found = [one.reply() for _ in range(8)]
    assert found == [b"1", b"OK", b"1", b"OK", b"OK", b"QUEUED", None, b"2"]


def test_counters_by_watch_lose_nothing(slots: LocalCluster, tag: bytes) -> None:
    """Four clients read, add one and write back, each by a transaction that has to hold."""
    rounds, clients = 40, 4
    conflicts = []

    def count() -> None:
        with RespClient(slots.redis_address("n1")) as client:
            done = 0
            while done < rounds:
                client.call("WATCH", tag)
                value = int(client.call("GET", tag) or 0)
                client.call("MULTI")
                client.call("SET", tag, value + 1)
                if client.call("EXEC") is None:
                    conflicts.append(value)
                else:
                    done += 1

    threads = [threading.Thread(target=count) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with RespClient(slots.redis_address("n1")) as client:
        assert client.call("GET", tag) == b"%d" % (rounds * clients)
    assert conflicts, "they have met"


# --- slots -------------------------------------------------------------------------------------


def test_keys_of_two_slots_are_refused_by_exec_and_nothing_is_written(
    slots: LocalCluster, one: RespClient, tag: bytes
) -> None:
    apart = free_key(slots, "apart", other_than=tag)
    one.call("MULTI")
    assert one.call("SET", tag, "v") == b"QUEUED"
    assert one.call("SET", apart, "v") == b"QUEUED", "this node serves both, as in Redis"
    assert told(one.call("EXEC")).startswith("CROSSSLOT")
    one.call("WATCH", apart)
    one.call("MULTI")
    one.call("SET", tag, "v")
    assert told(one.call("EXEC")).startswith("CROSSSLOT")
    assert one.call("GET", tag) is None
    assert one.call("GET", apart) is None


def test_another_nodes_key_is_moved_when_queued_and_when_watched(
    slots: LocalCluster, one: RespClient, tag: bytes
) -> None:
    tags = (b"{there%d}" % n for n in itertools.count())
    there = next(key for key in tags if node_of(slots, key) == "n2")
    moved = f"MOVED {slot_of(there)} {slots.redis_address('n2')}"
    assert told(one.call("WATCH", there)) == moved
    one.call("MULTI")
    assert told(one.call("SET", there, "v")) == moved
    assert told(one.call("EXEC")) == ABORTED


# --- bounds ------------------------------------------------------------------------------------


def test_transaction_is_bounded_in_operations_bytes_and_answers(
    one: RespClient, tag: bytes
) -> None:
    one.call("MULTI")
    for _ in range(1_000):
        assert one.call("INCR", tag) == b"QUEUED"
    assert "1,000 operations" in told(one.call("INCR", tag))
    assert told(one.call("EXEC")) == ABORTED
    value = b"x" * 1024 * 1024
    one.call("MULTI")
    for _ in range(3):
        assert one.call("SET", tag, value) == b"QUEUED"
    assert "4 MiB" in told(one.call("SET", tag, value))
    assert told(one.call("EXEC")) == ABORTED
    one.call("MULTI")
    one.call("SET", tag, value)
    for _ in range(20):
        one.call("GET", tag)
    assert "BUSY" in told(one.call("EXEC"))
    assert one.call("GET", tag) is None, "nothing of it was written"
    assert "watches 1,000 keys" in told(one.call("WATCH", *(tag + b"%d" % n for n in range(1_001))))


# --- clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
def test_plain_client_of_redis_py(slots: LocalCluster, tag: bytes, protocol: int) -> None:
    host, _, port = slots.redis_address("n1").rpartition(":")
    key = tag.decode()
    with redis.Redis(host=host, port=int(port), protocol=protocol) as client:
        with client.pipeline(transaction=True) as pipe:
            found = pipe.delete(key).set(key, 1).incr(key).get(key).mget(key, key + "x").execute()
        assert found[1:] == [True, 2, b"2", [b"2", None]]

        def double(pipe: Any) -> None:
            value = int(pipe.get(key))
            pipe.multi()
            pipe.set(key, 2 * value)

        assert client.transaction(double, key) == [True]
        assert client.get(key) == b"4"
        with client.pipeline() as pipe:
            pipe.watch(key)
            client.set(key, "other")
            pipe.multi()
            pipe.set(key, "mine")
            with pytest.raises(redis.WatchError):
                pipe.execute()
        with client.pipeline() as pipe:
            pipe.incr(key)
            with pytest.raises(redis.ResponseError, match="not an integer"):
                pipe.execute()
        with client.pipeline() as pipe:
            pipe.execute_command("LPUSH", key, "v")
            with pytest.raises(redis.ResponseError, match="unknown command 'LPUSH'"):
                pipe.execute()


def test_cluster_client_of_redis_py_goes_to_the_slots_node(slots: LocalCluster) -> None:
    if not hasattr(redis.cluster, "TransactionStrategy"):
        pytest.skip("this redis-py has no transactions for clusters")
    client = connect(slots)
    try:
        for n in range(10):
            a, b = f"{{rp{n}}}a", f"{{rp{n}}}b"
            with client.pipeline(transaction=True) as pipe:
                pipe.set(a, n)
                pipe.incr(a)
                pipe.set(b, "x")
                assert pipe.execute()[1] == n + 1
            with client.pipeline(transaction=True) as pipe:
                pipe.watch(a)
                client.set(a, "changed")
                pipe.multi()
                pipe.set(b, "lost")
                with pytest.raises(redis.WatchError):
                    pipe.execute()
            assert client.get(b) == b"x"
    finally:
        client.close()
    assert isinstance(client, RedisCluster)


def test_redis_cli_carries_out_a_transaction(slots: LocalCluster, tag: bytes) -> None:
    _, _, port = slots.redis_address("n1").rpartition(":")
    key = tag.decode()
    script = f"MULTI\nSET {key} 1\nINCR {key}\nEXEC\n"
    shown = cli("redis-cli", "-p", port, typed=script).split("\n")
    assert [line.strip() for line in shown if line.strip()] == ["OK", "QUEUED", "QUEUED", "OK", "2"]


def test_plain_client_of_a_cluster_with_another_router() -> None:
    """Keys with the same routing bytes lie together there; slots mean nothing."""
    with (
        running_cluster(nodes=1, coordinators=1, setup=Setup(router="until:2f")) as cluster,
        lone(cluster, "n1") as client,
        client.pipeline(transaction=True) as pipe,
    ):
        assert pipe.set("shop/a", 1).incr("shop/n").get("shop/a").execute() == [True, 1, b"1"]
        pipe.set("shop/a", 2).set("bar/a", 2)
        with pytest.raises(redis.ResponseError, match="same slot"):
            pipe.execute()
        assert client.get("shop/a") == b"1"
