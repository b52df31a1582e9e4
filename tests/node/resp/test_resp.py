"""The listener of the Redis protocol, in a real node: what is answered, in which order, and what
strangers, slow readers and a node that leaves make of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import hiredis
import pytest

from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    NotANumberError,
    NotPrimaryError,
    PartitionOfflineError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.v1 import kv_pb2
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient, packed, typed
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import PARTITIONS, NodeProcess, partitions_of, refusal, running_node

NOT_OURS = 5
OFFLINE = 6
VALUE_BYTES_MAX = 1024 * 1024


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    script = Script(primaries={NOT_OURS: 2, OFFLINE: 0}, max_value_bytes=VALUE_BYTES_MAX)
    with ScriptedCoordinator(script) as running:
        yield running


@pytest.fixture(scope="module")
def address() -> str:
    return free_address()


@pytest.fixture(scope="module")
def node(
    coordinator: ScriptedCoordinator, address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("resp") / "n1"
    with running_node(data, coordinator, "--redis-listen", address) as running:
        yield running


@pytest.fixture
def client(node: NodeProcess, address: str) -> Iterator[RespClient]:
    with RespClient(address) as connected:
        yield connected


def key_in(partition_id: int, tag: str) -> bytes:
    return next(
        key
        for n in range(10_000)
        if partitions_of([key := b"%s%d" % (tag.encode(), n)])[0] == partition_id
    )


def put(key: bytes, value: bytes, *, ttl_ms: int = 0, if_version: str = "") -> tuple[object, ...]:
    return "KOINON.PUT", key, value, 0, ttl_ms, if_version, 0


# --- Koinon's own commands ---------------------------------------------------------------------


def test_put_get_entry_and_delete_tell_versions(client: RespClient) -> None:
    key = key_in(0, "roundtrip")
    assert client.call("KOINON.GET", key, 0) is None
    assert client.call("KOINON.ENTRY", key, 0) is None
    first = int(client.call(*put(key, b"v")))
    assert client.call("KOINON.GET", key, 0) == b"v"
    assert client.call("KOINON.ENTRY", key, 0) == [b"v", b"%d" % first, b"0"]
    assert int(client.call(*put(key, b"", if_version=str(first)))) > first
    assert client.call("KOINON.GET", key, 0) == b""
    assert client.call("KOINON.DELETE", key, 0, "", 0) == 1
    assert client.call("KOINON.DELETE", key, 0, "", 0) == 0


def test_updates_tell_what_became_of_the_record(client: RespClient) -> None:
    key = key_in(0, "updates")
    assert client.call("KOINON.EXISTS", key, 0) == 0
    assert client.call("KOINON.TOUCH", key, 0, 0, 0) == 0
    assert client.call("KOINON.INCREMENT", key, 7, 60_000, 0, 0) == 7
    assert client.call("KOINON.INCREMENT", key, -9, 0, 0, 0) == -2
    assert client.call("KOINON.EXISTS", key, 0) == 1
    assert int(client.call("KOINON.ENTRY", key, 0)[2]) > 0  # as it was made
    assert client.call("KOINON.TOUCH", key, 0, 0, 0) == 1
    assert int(client.call("KOINON.ENTRY", key, 0)[2]) == 0
    assert client.call("KOINON.GETORPUT", key, b"new", 0, 0, 0) == b"-2"
    client.call(*put(key, b"text"))
    error, _ = typed(client.call("KOINON.INCREMENT", key, 1, 0, 0, 0, "mine-2"))
    assert isinstance(error, NotANumberError)
    fresh = key_in(0, "fresh")
    assert client.call("KOINON.GETORPUT", fresh, b"new", 0, 0, 0) is None
    assert client.call("KOINON.GET", fresh, 0) == b"new"


def test_record_that_has_expired_is_not_shown(client: RespClient) -> None:
    key = key_in(0, "expiring")
    client.call(*put(key, b"v", ttl_ms=60_000))
    value, _, expires_at_ms = client.call("KOINON.ENTRY", key, 0)
    assert (value, int(expires_at_ms) > 0) == (b"v", True)
    client.call(*put(key, b"w", ttl_ms=1))
    wait_until(lambda: client.call("KOINON.GET", key, 0) is None, "it expires")


def test_errors_come_whole_with_the_id_of_the_request(client: RespClient) -> None:
    error, request_id = typed(client.call("KOINON.GET", key_in(NOT_OURS, "elsewhere"), 0, "mine-1"))
    assert isinstance(error, NotPrimaryError)
    assert (error.partition_id, request_id) == (NOT_OURS, "mine-1")
    error, request_id = typed(client.call(*put(key_in(OFFLINE, "offline"), b"v")))
    assert isinstance(error, PartitionOfflineError)
    assert request_id
    key = key_in(0, "conditional")
    version = int(client.call(*put(key, b"v")))
    error, _ = typed(client.call(*put(key, b"w", if_version="0")))
    assert isinstance(error, ConditionFailedError)
    assert error.current_version == version


@pytest.mark.parametrize(
    "arguments",
    [
        ("KOINON.GET", b"", 0),
        ("KOINON.GET", b"k" * 501, 0),
        ("KOINON.GET", b"k", "many"),
        ("KOINON.PUT", b"k", b"v" * (VALUE_BYTES_MAX + 1), 0, 0, "", 0),
        ("KOINON.PUT", b"k", b"v", 0, 10**15, "", 0),
        ("KOINON.PUT", b"k", b"v", 0, 0, "x", 0),
        ("KOINON.PUT", b"k", b"v", 0, 0, 2**64, 0),
        ("KOINON.PUT", b"k", b"v", 0, 0, "", 7),
        ("KOINON.DELETE", b"", 0, "", 0),
        ("KOINON.INCREMENT", b"k", 2**63, 0, 0, 0),
        ("KOINON.INCREMENT", b"k", "1.5", 0, 0, 0),
        ("KOINON.INCREMENT", b"", 1, 0, 0, 0),
        ("KOINON.TOUCH", b"k", 10**15, 0, 0),
        ("KOINON.GETORPUT", b"k", b"v" * (VALUE_BYTES_MAX + 1), 0, 0, 0),
    ],
)
def test_arguments_beyond_a_limit_are_refused_by_name(
    client: RespClient, arguments: tuple[object, ...]
) -> None:
    error, _ = typed(client.call(*arguments))
    assert isinstance(error, InvalidArgumentError)
    assert client.call("PING") == b"PONG"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix": b"page/1", "want_versions": True},
        {"prefix": b"page/", "limit": 7, "want_versions": True},
        {"prefix": b"page/", "limit": 7, "reverse": True, "keys_only": True},
        {"start": b"page/2", "cursor": kv_pb2.ScanCursor(partition_id=3, after_key=b"page/25")},
        {"partition_ids": [0, NOT_OURS, OFFLINE], "table_version": 1 << 40},
        {"partition_ids": []},
    ],
)
def test_page_of_a_scan_is_that_which_grpc_gives(
    node: NodeProcess, client: RespClient, options: dict[str, object]
) -> None:
    keys = [b"page/%d" % n for n in range(40)]
    for key in keys:
        if partitions_of([key])[0] not in (NOT_OURS, OFFLINE):
            client.call(*put(key, b"v" * len(key), ttl_ms=600_000 * (key < b"page/2")))
    request = kv_pb2.ScanRequest(**{"partition_ids": range(PARTITIONS)} | options)  # type: ignore[arg-type]
    found = kv_pb2.ScanResponse.FromString(client.call("KOINON.SCAN", request.SerializeToString()))
    assert found == node.kv.Scan(request)
    if "limit" in options:
        assert (len(found.keys), found.HasField("next")) == (7, True)
    else:
        assert bool(found.refusals) is (options.get("partition_ids") != [])


@pytest.mark.parametrize(
    "request_",
    [
        kv_pb2.ScanRequest(prefix=b"p" * 501),
        kv_pb2.ScanRequest(start=b"s" * 501),
        kv_pb2.ScanRequest(partition_ids=[2, 1]),
        kv_pb2.ScanRequest(partition_ids=[PARTITIONS]),
        kv_pb2.ScanRequest(cluster_id="another"),
    ],
)
def test_page_that_grpc_refuses_is_refused_alike(
    node: NodeProcess, client: RespClient, request_: kv_pb2.ScanRequest
) -> None:
    error, _ = typed(client.call("KOINON.SCAN", request_.SerializeToString()))
    expected = refusal(lambda: node.kv.Scan(request_))
    assert convert.error_to_proto(error) == convert.error_to_proto(expected)


@pytest.mark.parametrize(
    "message", [b"\xff", b"garbage", kv_pb2.ScanRequest(keyspace_id=9).SerializeToString()]
)
def test_page_that_is_no_message_or_of_another_keyspace_is_refused(
    client: RespClient, message: bytes
) -> None:
    error, _ = typed(client.call("KOINON.SCAN", message))
    assert isinstance(error, InvalidArgumentError)
    assert client.call("PING") == b"PONG"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"want_versions": True},
        {"keys_only": True},
        {"want_versions": True, "keys_only": True, "table_version": 1 << 40},
        {"keys": [], "partition_ids": []},
    ],
)
def test_rows_are_those_which_grpc_gives(
    node: NodeProcess, client: RespClient, options: dict[str, object]
) -> None:
    keys = [b"rows/%d" % n for n in range(40)]
    for n, key in enumerate(keys):
        if n % 3 and partitions_of([key])[0] not in (NOT_OURS, OFFLINE):
            client.call(*put(key, b"v" * n, ttl_ms=600_000 * (n % 2)))
    asked = {"keys": keys, "partition_ids": partitions_of(keys)} | options
    request = kv_pb2.BatchGetRequest(**asked)  # type: ignore[arg-type]
    reply = client.call("KOINON.GETMANY", request.SerializeToString())
    found = kv_pb2.BatchGetResponse.FromString(reply)
    assert found == node.kv.BatchGet(request)
    assert len(found.values) == len(request.keys)
    assert bool(found.refusals) is bool(found.missing) is bool(request.keys)


@pytest.mark.parametrize(
    "request_",
    [
        kv_pb2.BatchGetRequest(keys=[b"k" * 501], partition_ids=[0]),
        kv_pb2.BatchGetRequest(keys=[b""], partition_ids=[0]),
        kv_pb2.BatchGetRequest(keys=[b"k"]),
        kv_pb2.BatchGetRequest(keys=[b"k"], partition_ids=[PARTITIONS]),
        kv_pb2.BatchGetRequest(keys=[key_in(0, "astray")], partition_ids=[1]),
        kv_pb2.BatchGetRequest(cluster_id="another"),
    ],
)
def test_rows_that_grpc_refuses_are_refused_alike(
    node: NodeProcess, client: RespClient, request_: kv_pb2.BatchGetRequest
) -> None:
    error, _ = typed(client.call("KOINON.GETMANY", request_.SerializeToString()))
    expected = refusal(lambda: node.kv.BatchGet(request_))
    assert convert.error_to_proto(error) == convert.error_to_proto(expected)


@pytest.mark.parametrize(
    "message", [b"\xff", b"garbage", kv_pb2.BatchGetRequest(keyspace_id=9).SerializeToString()]
)
def test_rows_that_are_no_message_or_of_another_keyspace_are_refused(
    client: RespClient, message: bytes
) -> None:
    error, _ = typed(client.call("KOINON.GETMANY", message, "order-7/1"))
    assert isinstance(error, InvalidArgumentError)
    assert client.call("PING") == b"PONG"


def test_pages_keep_their_place_among_other_commands(client: RespClient) -> None:
    key = key_in(0, "between")
    request = kv_pb2.ScanRequest(partition_ids=[0], prefix=key).SerializeToString()
    commands = [put(key, b"1"), ("KOINON.SCAN", request), ("KOINON.GET", key, 0)]
    commands += [("KOINON.DELETE", key, 0, "", 0), ("KOINON.SCAN", request), ("PING",)]
    client.send_bytes(b"".join(packed(*command) for command in commands))
    replies = [client.reply() for _ in commands]
    pages = [kv_pb2.ScanResponse.FromString(replies[at]) for at in (1, 4)]
    assert [list(page.values) for page in pages] == [[b"1"], []]
    assert (replies[2], replies[3], replies[5]) == (b"1", 1, b"PONG")


def test_hello_refuses_another_cluster_and_another_protocol(
    client: RespClient, coordinator: ScriptedCoordinator
) -> None:
    error, _ = typed(client.call("KOINON.HELLO", 2, "another", 0))
    assert isinstance(error, WrongClusterError)
    error, _ = typed(client.call("KOINON.HELLO", 3, ""))
    assert isinstance(error, UnsupportedVersionError)
    error, _ = typed(client.call("KOINON.HELLO", 2, ""))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "keyspace_id"
    assert client.call("KOINON.HELLO", 2, "", 0).startswith(b"n1 ")


# --- order, and what several connections do ----------------------------------------------------


def test_commands_of_a_connection_take_effect_in_their_order(client: RespClient) -> None:
    key = key_in(1, "ordered").decode()
    for number in range(50):
        client.send("GET", key)
        client.send("SET", key, number)
        client.send("GET", key)
        client.send("DEL", key)
        client.send("GET", key)
    replies = [client.reply() for _ in range(250)]
    assert replies == [reply for n in range(50) for reply in (None, b"OK", b"%d" % n, 1, None)]


def test_writes_of_many_connections_are_all_there(node: NodeProcess, address: str) -> None:
    keys = [key_in(p, "many") for p in range(4)]

    def write(number: int) -> None:
        with RespClient(address) as client:
            for key in keys:
                assert client.call("SET", key + b"-%d" % number, b"%d" % number) == b"OK"

    good = [n for n in range(200) if all(served(key + b"-%d" % n) for key in keys)][:40]
    threads = [threading.Thread(target=write, args=(number,)) for number in good]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with RespClient(address) as client:
        for number in good:
            assert [client.call("GET", key + b"-%d" % number) for key in keys] == [
                b"%d" % number
            ] * len(keys)


def served(key: bytes) -> bool:
    return partitions_of([key])[0] not in (NOT_OURS, OFFLINE)


def test_a_reply_that_is_refused_stays_in_its_place(client: RespClient) -> None:
    here, elsewhere = key_in(1, "here"), key_in(NOT_OURS, "there")
    for command in (("SET", here, "1"), ("SET", elsewhere, "2"), ("SET", here, "3"), ("NO",)):
        client.send(*command)
    client.send("GET", here)
    ok, refused, again, unknown, found = [client.reply() for _ in range(5)]
    assert (ok, again, found) == (b"OK", b"OK", b"3")
    assert isinstance(refused, hiredis.ReplyError)
    assert str(unknown) == "ERR unknown command 'NO'"


def test_quit_is_answered_also_right_after_a_read(client: RespClient) -> None:
    client.send_bytes(packed("GET", key_in(1, "last")) + packed("QUIT") + packed("PING"))
    assert [client.reply(), client.reply()] == [None, b"OK"]
    assert client.is_closed()


@pytest.mark.parametrize("cursor", ["0" * 5_000, "x", "-1", str(1 << 64)])
def test_cursor_that_is_none_is_refused(client: RespClient, cursor: str) -> None:
    assert str(client.call("SCAN", cursor)) == "ERR invalid cursor"
    assert client.call("PING") == b"PONG"


@pytest.mark.parametrize("cut", [8_192, 1_000_003])
def test_a_pipeline_is_sent_whole_before_a_reply_is_read(client: RespClient, cut: int) -> None:
    """Commands and replies are larger than the sockets' buffers, and more than a node executes
    while nobody reads.
    """
    value = b"v" * 60_000
    ours = key_in(0, "pipeline")
    client.call("SET", ours, value)
    echoed = [b"%d" % number + b"e" * 20_000 for number in range(800)]
    pipeline = b"".join(packed("GET", ours) + packed("ECHO", text) for text in echoed)
    client.socket.settimeout(60.0)
    for at in range(0, len(pipeline), cut):
        client.send_bytes(pipeline[at : at + cut])
    for text in echoed:
        assert client.reply() == value
        assert client.reply() == text
    client.send_bytes(pipeline)
    client.socket.shutdown(socket.SHUT_WR)  # all are answered, then the connection ends
    for text in echoed:
        assert client.reply() == value
        assert client.reply() == text
    assert client.is_closed()


def test_updates_of_large_records_fit_into_a_pipeline(client: RespClient) -> None:
    keys = [key_in(p, "long") for p in range(4)]
    for key in keys:
        assert client.call("SET", key, b"v" * 900_000) == b"OK"
    for _ in range(10):
        for key in keys:
            client.send("APPEND", key, "w")
    assert [client.reply() for _ in range(40)] == [900_001 + n // 4 for n in range(40)]


def test_what_came_before_the_end_of_a_connection_is_executed(
    node: NodeProcess, address: str
) -> None:
    key = key_in(1, "half-closed")
    with RespClient(address) as client:
        for command in (("SET", key, "1"), ("GET", key), ("SET", key, "2"), ("GET", key)):
            client.send(*command)
        client.socket.shutdown(socket.SHUT_WR)
        assert [client.reply() for _ in range(4)] == [b"OK", b"1", b"OK", b"2"]
        assert client.is_closed()


def test_protocol_error_is_told_after_what_was_under_way(client: RespClient, address: str) -> None:
    key = key_in(1, "garbled")
    with RespClient(address) as stranger:
        stranger.send_bytes(packed("INCR", key) + packed("INCR", key) + b"*1\r\n:1\r\n")
        assert [stranger.reply(), stranger.reply()] == [1, 2]
        assert str(stranger.reply()).startswith("ERR Protocol error: expected '$'")
        assert stranger.is_closed()
    assert client.call("GET", key) == b"2"


@pytest.mark.parametrize(
    "options",
    [("EX", 10, "KEEPTTL"), ("KEEPTTL", "EX", 10), ("EX", 10, "PX", 10), ("EX",)],
)
def test_set_takes_one_option_of_expiry(client: RespClient, options: tuple[object, ...]) -> None:
    assert str(client.call("SET", key_in(1, "options"), "v", *options)) == "ERR syntax error"


def test_info_has_the_sections_that_tools_for_monitoring_read(client: RespClient) -> None:
    key = key_in(1, "info")
    client.call("SET", key, "v")
    client.call("GET", key)
    before = info_of(client)
    for line in ("used_memory", "maxmemory", "uptime_in_seconds", "total_connections_received"):
        assert int(before[line]) >= 0
    assert before["db0"].startswith("keys=")
    client.call("GET", key)
    client.call("GET", key_in(1, "absent"))
    after = info_of(client)
    for line in ("keyspace_hits", "keyspace_misses"):
        assert int(after[line]) == int(before[line]) + 1
    assert int(after["total_commands_processed"]) > int(before["total_commands_processed"])
    assert "cmdstat_get" not in after
    assert info_of(client, "commandstats")["cmdstat_get"].startswith("calls=")
    assert info_of(client, "memory").keys() >= {"used_memory", "used_memory_peak"}
    assert "role" not in info_of(client, "memory")


def info_of(client: RespClient, *sections: str) -> dict[str, str]:
    lines = client.call("INFO", *sections).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def test_slowlog_is_there_and_bounded(client: RespClient) -> None:
    assert client.call("SLOWLOG", "RESET") == b"OK"
    assert client.call("SLOWLOG", "LEN") <= 1
    assert len(client.call("SLOWLOG", "GET")) <= 10
    assert str(client.call("SLOWLOG", "GET", -2)).startswith("ERR count should be")


# --- strangers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage", [b"POST / HTTP/1.1\r\n\r\n", b"*-\r\n", b"*1000000000\r\n", b"*1\r\n:1\r\n"]
)
def test_garbage_is_told_so_and_closed(client: RespClient, address: str, garbage: bytes) -> None:
    with RespClient(address) as stranger:
        stranger.send_bytes(garbage)
        assert str(stranger.reply()).startswith("ERR Protocol error")
        assert stranger.is_closed()
    assert client.call("PING") == b"PONG"


def test_config_looks_at_some_patterns_only(client: RespClient) -> None:
    assert client.call("CONFIG", "GET", "save", "time*") == [b"save", b"", b"timeout", b"0"]
    for patterns in ([f"*{n}" for n in range(5_000)], ["a" * 1_000_000]):
        assert str(client.call("CONFIG", "GET", *patterns)).startswith("ERR too many patterns")


def test_client_that_takes_no_replies_is_closed_once_it_holds_too_much(
    client: RespClient, address: str
) -> None:
    key = key_in(2, "large")
    assert client.call("SET", key, b"v" * 500_000) == b"OK"
    with RespClient(address) as stranger:
        stranger.socket.settimeout(60.0)
        gets = packed("GET", key) * 200_000
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100:  # 700 MB of commands
                stranger.send_bytes(gets)
                sent += 1
                assert client.call("PING") == b"PONG"
        assert 5 < sent < 50
    assert client.call("PING") == b"PONG"


def test_client_that_holds_most_is_closed_where_all_hold_too_much(
    client: RespClient, address: str
) -> None:
    begun = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16000000\r\n" + b"v" * 15_000_000
    strangers = [RespClient(address) for _ in range(10)]
    try:
        closed = 0
        for stranger in strangers:
            try:
                stranger.send_bytes(begun)
            except OSError:
                closed += 1

        def some_are_closed() -> bool:
            return closed + sum(is_gone(stranger) for stranger in strangers) >= 1

        wait_until(some_are_closed, "one that holds most is closed")
        assert client.call("PING") == b"PONG"
    finally:
        for stranger in strangers:
            stranger.close()


def is_gone(stranger: RespClient) -> bool:
    stranger.socket.settimeout(0.01)
    try:
        return stranger.socket.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


# --- leaving -----------------------------------------------------------------------------------


def test_node_that_leaves_tells_who_attends_and_waits_for_its_end(
    tmp_path: Path,
) -> None:
    address, key = free_address(), key_in(3, "leaving")
    with (
        ScriptedCoordinator(Script()) as coordinator,
        running_node(tmp_path / "n1", coordinator, "--redis-listen", address) as node,
    ):
        attending, guest = RespClient(address), RespClient(address)
        assert attending.call("KOINON.HELLO", 2, "", 0).startswith(b"n1 ")
        assert guest.call("SET", key, "1") == b"OK"
        stopped: list[int] = []
        stopping = threading.Thread(target=lambda: stopped.append(node.stop()))
        stopping.start()
        assert attending.reply() == [b"koinon.leaving"]
        # What arrives now is answered as ever: the node waits for the end of this connection.
        assert attending.call("KOINON.GET", key, 0) == b"1"
        assert not stopped
        attending.close()
        stopping.join()
        assert stopped == [0]
        assert guest.is_closed()
        guest.close()


def test_digest_of_large_values_is_that_of_what_was_sent(client: RespClient) -> None:
    key, value = key_in(2, "bytes"), hashlib.sha256(b"x").digest() * 30_000
    assert client.call("SET", key, value) == b"OK"
    assert client.call("GET", key) == value
