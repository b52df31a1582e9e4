"""Nodes that pass commands on (``--resp-proxy``), asked by clients that know one server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from koinon.local import LocalCluster, Setup
from koinon_proto.contract.access import Action, Effect, Grant, Role, User, make_token
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    NotPrimaryError,
    PermissionDeniedError,
)
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import Dialing
from tests.integration.copies import is_settled
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient, packed, typed

FLAGS = ["--partitioner", "crc16", "--partitions", "64"]
TIMEOUT_S = 120.0
KEYS = 120


@pytest.fixture(scope="module")
def proxies() -> Iterator[LocalCluster]:
    """Three nodes, each of which serves every key."""
    with running_cluster(
        nodes=3, coordinators=1, setup=Setup(coordinator_flags=FLAGS, node_flags=["--resp-proxy"])
    ) as cluster:
        cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all are in sync")
        yield cluster


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def plain(proxies: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    host, _, port = proxies.redis_address("n1").rpartition(":")
    with redis.Redis(host=host, port=int(port), protocol=request.param) as client:
        client.flushdb()
        yield client


def test_one_node_serves_every_key(plain: Any) -> None:
    for n in range(KEYS):
        assert plain.set(f"any:{n}", n, ex=1_000)
        assert plain.incr(f"any:{n}") == n + 1
        assert plain.get(f"any:{n}") == b"%d" % (n + 1)
        assert 0 < plain.ttl(f"any:{n}") <= 1_000
        assert plain.copy(f"any:{n}", f"{{any:{n}}}copy", replace=True)
        found = plain.mget(f"any:{n}", f"{{any:{n}}}copy", f"{{any:{n}}}no")
        assert found == [b"%d" % (n + 1), b"%d" % (n + 1), None]
        assert plain.getdel(f"{{any:{n}}}none") is None


def test_errors_are_those_of_the_command(plain: Any) -> None:
    for n in range(12):
        plain.set(f"text:{n}", "x")
        with pytest.raises(redis.ResponseError, match="not an integer"):
            plain.incr(f"text:{n}")
        with pytest.raises(redis.ResponseError, match="hash to the same slot"):
            plain.mget(f"text:{n}", f"other:{n}")


def test_pipeline_keeps_the_order_of_each_key(plain: Any) -> None:
    keys = [f"order:{n}" for n in range(12)]
    pipeline = plain.pipeline(transaction=False)
    for turn in range(10):
        for key in keys:
            pipeline.set(key, turn)
            pipeline.append(key, "!")
            pipeline.get(key)
    replies = pipeline.execute()
    assert replies[2::3] == [b"%d!" % turn for turn in range(10) for _ in keys]


def test_scripts_locks_and_transactions_on_any_slot(plain: Any) -> None:
    script = plain.register_script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    for n in range(12):
        assert script(keys=[f"script:{n}"], args=[5]) == 5
        lock = plain.lock(f"lock:{n}", timeout=60)
        assert lock.acquire()
        lock.extend(10)
        lock.release()
        with plain.pipeline(transaction=True) as pipeline:
            pipeline.set(f"{{batch:{n}}}a", 1)
            pipeline.incr(f"{{batch:{n}}}a")
            pipeline.get(f"{{batch:{n}}}none")
            assert pipeline.execute() == [True, 2, None]


def test_watch_of_a_key_of_another_node_is_refused(proxies: LocalCluster) -> None:
    replies = set()
    for name in proxies.node_names:
        with RespClient(proxies.redis_address(name)) as client:
            for n in range(12):
                replies.add(str(client.call("WATCH", f"watched:{n}")))
                client.call("UNWATCH")
    assert replies == {
        "b'OK'",
        "ERR a key that another node serves cannot be watched: use a client of clusters",
    }


def test_command_that_was_passed_on_goes_no_further(proxies: LocalCluster) -> None:
    """Two nodes that disagree about the table would else send it to each other."""
    answers = []
    for name in proxies.node_names:
        with RespClient(proxies.redis_address(name)) as client:
            answers.append(client.call("KOINON.PASSED", "", "GET", "one"))
            error, _ = typed(client.call("KOINON.PASSED", "", "KOINON.PASSED", "", "GET", "one"))
            assert isinstance(error, InvalidArgumentError)
            passed = client.call("KOINON.PASSED", "", "EXEC", 3, "SET", "one", "x", 9, "GET")
            assert isinstance(typed(passed)[0], InvalidArgumentError)
    refused = [typed(answer)[0] for answer in answers if isinstance(answer, Exception)]
    assert [type(error) for error in refused] == [NotPrimaryError] * 2


class Counter(threading.Thread):
    """Counts up a key of its own at one node."""

    def __init__(self, address: str, key: str, stop: threading.Event) -> None:
        super().__init__()
        host, _, port = address.rpartition(":")
        self._client = redis.Redis(host=host, port=int(port), socket_timeout=60)
        self.key = key
        self.tried = self.acknowledged = 0
        self.errors: list[str] = []
        self._stop_all = stop

    def run(self) -> None:
        while not self._stop_all.is_set():
            self.tried += 1
            try:
                self._client.set(self.key, self.tried)
                self.acknowledged = self.tried
            except redis.RedisError as error:
                self.errors.append(str(error))
        self._client.close()


@pytest.mark.parametrize("is_planned", [True, False])
def test_another_node_ends_and_nothing_acknowledged_is_lost(
    proxies: LocalCluster, is_planned: bool
) -> None:
    stop = threading.Event()
    address = proxies.redis_address("n1")
    counters = [Counter(address, f"count:{is_planned}:{n}", stop) for n in range(8)]
    for counter in counters:
        counter.start()
    try:
        _wait_for_progress(counters)
        (proxies.terminate if is_planned else proxies.kill)("n2")
        _wait_for_progress(counters)
        proxies.restart("n2")
        proxies.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all are in sync")
    finally:
        stop.set()
        for counter in counters:
            counter.join()
    with proxies.client() as own:
        for counter in counters:
            found = int(own.get(counter.key.encode()) or b"0")
            assert counter.acknowledged <= found <= counter.tried
    if is_planned:
        assert [counter.errors for counter in counters] == [[]] * len(counters)
    assert not any("MOVED" in error for counter in counters for error in counter.errors)


def _wait_for_progress(counters: list[Counter]) -> None:
    before = [counter.acknowledged for counter in counters]
    wait_until(
        lambda: all(c.acknowledged > b + 20 for c, b in zip(counters, before, strict=True)),
        "every counter goes on",
    )


def test_commands_behind_one_that_is_passed_on_are_answered_in_order(
    proxies: LocalCluster,
) -> None:
    commands: list[tuple[object, ...]] = [("SET", f"mixed:{n}", n) for n in range(40)]
    commands += [*[("GET", f"mixed:{n}") for n in range(40)], ("PING",)]
    with RespClient(proxies.redis_address("n1")) as client:
        client.send_bytes(b"".join(packed(*command) for command in commands))
        replies = [client.reply() for _ in commands]
    assert replies == [b"OK"] * 40 + [b"%d" % n for n in range(40)] + [b"PONG"]


def over_tls(cluster: LocalCluster, name: str, *token: str) -> RespClient:
    """Connect as root to a node, or as who has the token."""
    client = RespClient(cluster.redis_address(name))
    context = Dialing(BundleFile(cluster.tls_bundle)).context()
    assert context is not None
    client.socket = context.wrap_socket(client.socket, server_hostname=ANY_SERVER)
    if token:
        assert client.call("AUTH", *token) == b"OK"
    return client


def test_rights_of_the_clients_user_hold_at_every_node() -> None:
    grant = Grant(effect=Effect.ALLOW, actions=(Action.READ, Action.WRITE), prefix=b"app:")
    with LocalCluster(
        nodes=3,
        coordinators=1,
        tls=True,
        setup=Setup(coordinator_flags=FLAGS, node_flags=["--resp-proxy"]),
    ) as cluster:
        token, text = make_token("app", created_s=0)
        with cluster.admin() as admin:
            admin.access.put_role(Role(name="app", grants=(grant,)))
            admin.access.put_user(User(name="app", roles=("app",)))
            admin.access.add_token(token)
            with over_tls(cluster, "n1", text) as app, over_tls(cluster, "n1") as root:
                for n in range(12):
                    assert app.call("SET", f"app:{n}", n) == b"OK"
                    assert app.call("GET", f"app:{n}") == b"%d" % n
                    for denied in (app.call("SET", f"b:{n}", n), app.call("GET", f"b:{n}")):
                        assert str(denied).startswith("NOPERM user app may not")
                refused = {str(root.call("GET", f"app:{n}")) for n in range(12)}
                refused = {text for text in refused if not text.startswith("b'")}
                assert all(text.startswith("NOPERM user root may not reach") for text in refused)
                assert refused
                for client in (app, root):  # only nodes pass commands on
                    error, _ = typed(client.call("KOINON.PASSED", "app", "GET", "app:1"))
                    assert isinstance(error, PermissionDeniedError)
                admin.access.put_role(Role(name="app"))
                for n in range(12):
                    assert str(app.call("GET", f"app:{n}")).startswith("NOPERM")
