"""A connection of the Redis protocol over a transport that only takes notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from koinon_node.resp import connection as connections
from koinon_node.resp import errors, listener
from koinon_node.resp.commands import scans, table
from koinon_node.resp.commands.table import Arguments, Outcome, Spec, Write
from koinon_node.resp.session import Session
from koinon_node.serving.batches import ScanAnswer, ScanPage
from koinon_proto.contract.keyspaces import Keyspace, default_keyspace
from koinon_proto.contract.table import Table
from koinon_proto.security.audit import NO_AUDIT
from koinon_proto.security.authentication import open_gate
from koinon_proto.server.requests import Method
from tests.kit.tables import config_of, node_of, row_of, table_with
from tests.node.kit.resp_client import packed


class NotedTransport:
    """Takes what is written, and is told nothing by a kernel."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False
        self.waiting = 0  # bytes that do not leave

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def set_protocol(self, protocol: asyncio.Protocol) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> Any:
        known = {"socket": Socket(), "peername": ("127.0.0.1", 1)}
        return known.get(name)


class Socket:
    def setsockopt(self, *_: int) -> None: ...


class Served:
    """A keyspace that is there."""

    keyspace_id = 0

    def keyspace(self, table_version: int = 0) -> Keyspace:
        return default_keyspace(config_of(1, max_value_bytes=1_000))

    def check_served(self, key: bytes) -> None: ...


class Service:
    """Writes end when the test says so."""

    def __init__(self) -> None:
        self.done: list[Callable[[list[Any]], None]] = []

    def table(self) -> Table:
        return table_with([row_of(0, 1)], [node_of(1)])

    def served(self, keyspace_id: int) -> Served:
        return Served()

    def weigh(self, served: Served, write: Write) -> int:
        return 1

    def write(
        self, served: Served, writes: Sequence[Write], done: Callable[[list[Any]], None]
    ) -> None:
        self.done.append(done)


class Owner:
    def __init__(self) -> None:
        self.service: Any = Service()
        self.gate = open_gate()
        self.audit = NO_AUDIT
        self.held = 0

    def opened(self, connection: connections.Connection) -> bool:
        return True

    def closed(self, connection: connections.Connection) -> None: ...
    def not_understood(self) -> None: ...

    def holds(self, connection: connections.Connection, size: int) -> None:
        self.held = connection.held_bytes = size


def opened(owner: Owner) -> tuple[connections.Connection, NotedTransport]:
    connection, transport = connections.Connection(owner, 1), NotedTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def defective(session: Session, arguments: Arguments) -> Outcome:
    raise ValueError("a defect")


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("BAD", 1, defective, errors.guest, Method("Redis", "BAD", stream=False))
    monkeypatch.setitem(table.COMMANDS, b"BAD", spec)


@pytest.mark.usefixtures("bad")
def test_handler_that_fails_is_answered_in_its_place_and_holds_up_no_other_connection() -> None:
    async def run() -> None:
        owner = Owner()
        connection, transport = opened(owner)
        sent = [("SET", "k", "v"), ("PING",), ("BAD",), ("PING",)]
        connection.data_received(b"".join(packed(*command) for command in sent))
        (done,) = owner.service.done
        done([b"+OK\r\n"])  # as one of several connections whose writes were one batch
        replies = transport.written.split(b"\r\n")
        assert [reply[:4] for reply in replies] == [b"+OK", b"+PON", b"-ERR", b"+PON", b""]

    asyncio.run(run())


def test_reply_that_cannot_be_made_closes_the_connection_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        owner = Owner()
        connection, transport = opened(owner)
        connection.data_received(packed("SET", "k", "v"))
        monkeypatch.setattr(connections.Connection, "_ended", defective)
        owner.service.done[0]([b"+OK\r\n"])
        assert transport.aborted

    asyncio.run(run())


def test_replies_that_do_not_leave_count_before_they_end_what_is_executed() -> None:
    async def run() -> None:
        owner = Owner()
        connection, transport = opened(owner)
        assert transport.high * listener.CONNECTIONS_MAX <= 1 << 30
        for waiting, answered in ((100_000, True), (500_000, True), (2_000_000, False)):
            transport.waiting, transport.written = waiting, b""
            connection.pause_writing()
            connection.data_received(packed("PING"))
            assert (transport.written == b"+PONG\r\n") is answered
            assert owner.held == waiting
        transport.waiting = 0
        connection.resume_writing()
        assert (transport.written, owner.held) == (b"+PONG\r\n", 0)

    asyncio.run(run())


def test_what_is_queued_counts_until_it_is_discarded() -> None:
    async def run() -> None:
        owner = Owner()
        connection, transport = opened(owner)
        command = packed("SET", "k", b"v" * 100_000)
        connection.data_received(packed("MULTI") + command * 3)
        await asyncio.sleep(0)
        assert transport.written == b"+OK\r\n" + b"+QUEUED\r\n" * 3
        assert owner.held >= 300_000
        connection.data_received(packed("DISCARD"))
        assert owner.held == 0

    asyncio.run(run())


def test_command_that_is_coming_in_counts_also_behind_another() -> None:
    async def run() -> None:
        owner = Owner()
        connection, _ = opened(owner)
        begun = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$200000\r\n" + b"v" * 50_000
        connection.data_received(packed("PING") + begun)
        assert owner.held >= 50_000
        connection.data_received(b"v" * 150_000 + b"\r\n")
        assert owner.held == 0

    asyncio.run(run())


def test_dbsize_lets_others_have_their_turn_between_pages() -> None:
    class Led(Served):
        def led(self) -> list[int]:
            return [0]

    class Pages:
        async def scan(self, page: ScanPage) -> ScanAnswer:
            turns_at.append(turns)
            more = len(turns_at) < 5
            return ScanAnswer(keys=[b"k"], next_cursor=(0, b"k") if more else None)

    turns, turns_at = 0, list[int]()

    async def run() -> None:
        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        turn()
        session: Any = SimpleNamespace(service=Pages(), served=Led())
        assert await scans._dbsize(session) == b":5\r\n"
        assert turns_at == sorted(set(turns_at))

    asyncio.run(run())


def test_connection_lost_before_it_becomes_a_stream_begins_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[asyncio.Protocol] = []

    def begin() -> asyncio.Protocol:
        begun.append(asyncio.Protocol())
        return begun[-1]

    def switch(session: Session, arguments: Arguments) -> Outcome:
        return table.Switch(begin)

    spec = Spec("BECOME", 1, switch, errors.own, Method("Redis", "BECOME", stream=False))
    monkeypatch.setitem(table.COMMANDS, b"BECOME", spec)

    async def run() -> None:
        for is_lost in (True, False):
            owner = Owner()
            connection, transport = opened(owner)
            connection.data_received(packed("SET", "k", "v") + packed("BECOME"))
            assert not begun, "the write before it is under way"
            if is_lost:
                transport.abort()
                connection.connection_lost(None)
            owner.service.done[0]([b"+OK\r\n"])
            assert bool(begun) is not is_lost

    asyncio.run(run())
