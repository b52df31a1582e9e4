"""A connection of the Redis protocol over a transport that only takes notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from koinon_node.partition.batches import ScanAnswer, ScanPage
from koinon_node.resp import connection as connections
from koinon_node.resp import listener
from koinon_node.resp.commands import accounting, scans
from koinon_node.resp.commands.spec import COMMANDS, Spec
from koinon_node.resp.memory_budget import MemoryBudget
from koinon_node.resp.outcomes import Arguments, Outcome, Switch, Write
from koinon_node.resp.session import Session
from koinon_node.resp.slow_log import ENTRIES_MAX, SlowLog
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
        self.is_paused = False
        self.has_ended = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

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
        self.slow_log = SlowLog()
        self.passing = None

    def now_ms(self) -> int:
        return 5_000

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
        self.cut: list[Any] = []
        self.budget = MemoryBudget(lambda: 0.0, lambda *cut: self.cut.append(cut))

    @property
    def held(self) -> int:
        return self.budget.held_bytes

    def opened(self, connection: connections.Connection) -> bool:
        return True

    def closed(self, connection: connections.Connection) -> None:
        self.budget.release(connection)

    def not_understood(self) -> None: ...


def opened(owner: Owner) -> tuple[connections.Connection, NotedTransport]:
    connection, transport = connections.Connection(owner, 1), NotedTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def defective(session: Session, arguments: Arguments) -> Outcome:
    raise ValueError("a defect")


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("BAD", 1, defective, "", Method("Redis", "BAD", stream=False))
    monkeypatch.setitem(COMMANDS, b"BAD", spec)


@pytest.mark.usefixtures("bad")
async def test_handler_that_fails_is_answered_in_its_place_and_holds_up_no_other() -> None:
    owner = Owner()
    connection, transport = opened(owner)
    sent = [("SET", "k", "v"), ("PING",), ("BAD",), ("PING",)]
    connection.data_received(b"".join(packed(*command) for command in sent))
    (done,) = owner.service.done
    done([b"+OK\r\n"])  # as one of several connections whose writes were one batch
    replies = transport.written.split(b"\r\n")
    assert [reply[:4] for reply in replies] == [b"+OK", b"+PON", b"-ERR", b"+PON", b""]


async def test_reply_that_cannot_be_made_closes_the_connection_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Owner()
    connection, transport = opened(owner)
    connection.data_received(packed("SET", "k", "v"))
    monkeypatch.setattr(accounting, "ended", defective)
    owner.service.done[0]([b"+OK\r\n"])
    assert transport.aborted


async def test_replies_that_do_not_leave_count_before_they_end_what_is_executed() -> None:
    owner = Owner()
    connection, transport = opened(owner)
    assert transport.high * listener.CONNECTIONS_MAX <= 1 << 30
    for waiting, answered in ((100_000, True), (500_000, True), (2_000_000, False)):
        transport.waiting, transport.written = waiting, b""
        connection.pause_writing()
        connection.data_received(packed("PING"))
        assert (transport.written == b"+PONG\r\n") is answered
        assert waiting <= owner.held < waiting + 1_000
    transport.waiting = 0
    connection.resume_writing()
    await asyncio.sleep(0)
    assert (transport.written, owner.held) == (b"+PONG\r\n", 0)


async def test_what_is_queued_counts_until_it_is_discarded() -> None:
    owner = Owner()
    connection, transport = opened(owner)
    command = packed("SET", "k", b"v" * 100_000)
    connection.data_received(packed("MULTI") + command * 3)
    await asyncio.sleep(0)
    assert transport.written == b"+OK\r\n" + b"+QUEUED\r\n" * 3
    assert owner.held >= 300_000
    connection.data_received(packed("DISCARD"))
    assert owner.held == 0


async def test_command_that_is_coming_in_counts_also_behind_another() -> None:
    owner = Owner()
    connection, _ = opened(owner)
    begun = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$200000\r\n" + b"v" * 50_000
    connection.data_received(packed("PING") + begun)
    assert owner.held >= 50_000
    connection.data_received(b"v" * 150_000 + b"\r\n")
    assert owner.held == 0


async def test_dbsize_lets_others_have_their_turn_between_pages() -> None:
    class Led(Served):
        def led(self) -> list[int]:
            return [0]

    class Pages:
        async def scan(self, page: ScanPage) -> ScanAnswer:
            turns_at.append(turns)
            more = len(turns_at) < 5
            return ScanAnswer(keys=[b"k"], next_cursor=(0, b"k") if more else None)

    turns, turns_at = 0, list[int]()

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    turn()
    session: Any = SimpleNamespace(service=Pages(), served=Led())
    assert await scans._dbsize(session) == b":5\r\n"
    assert turns_at == sorted(set(turns_at))


async def test_slow_commands_are_noted_by_name_without_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounting, "SLOWER_THAN_S", 0.0)
    owner = Owner()
    connection, _ = opened(owner)
    connection.data_received(packed("CLIENT", "SETNAME", "me"))
    for _ in range(ENTRIES_MAX + 1):
        connection.data_received(packed("SET", "k", "secret"))
        owner.service.done.pop()([b"+OK\r\n"])
    entries = owner.service.slow_log.entries
    assert len(entries) == ENTRIES_MAX
    assert entries[0].number == ENTRIES_MAX
    assert (entries[0].unix_s, entries[0].command, entries[0].client_name) == (5, b"set", b"me")


async def test_connection_lost_before_it_becomes_a_stream_begins_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[asyncio.Protocol] = []

    def begin() -> asyncio.Protocol:
        begun.append(asyncio.Protocol())
        return begun[-1]

    def switch(session: Session, arguments: Arguments) -> Outcome:
        return Switch(begin)

    spec = Spec("BECOME", 1, switch, "", Method("Redis", "BECOME", stream=False))
    monkeypatch.setitem(COMMANDS, b"BECOME", spec)

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


async def test_socket_is_read_ahead_of_a_command_under_way_within_a_bound() -> None:
    owner = Owner()
    connection, transport = opened(owner)
    command = packed("SET", "k", b"v" * 900)
    sent = 0
    while not transport.is_paused:
        connection.data_received(command * 20)  # the first is under way, and stays so
        sent += len(command * 20)
    assert sent <= connections.READ_AHEAD_BYTES + len(command * 20)
    assert owner.held >= sent
    while owner.service.done:
        done = owner.service.done.pop()
        done([b"+OK\r\n"] * len(connection._under_way))
    assert not transport.is_paused
    assert owner.held == 0


async def test_large_argument_without_room_is_not_read_until_there_is_some() -> None:
    owner = Owner()
    begun = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16000000\r\n"
    pairs = [opened(owner) for _ in range(6)]
    for connection, _ in pairs:
        connection.data_received(begun)
    assert [transport.is_paused for _, transport in pairs] == [False] * 4 + [True] * 2
    pairs[1][0].connection_lost(None)
    assert [transport.is_paused for _, transport in pairs] == [False] * 5 + [True]


async def test_what_follows_a_refused_length_is_thrown_away_uncounted_and_within_a_bound() -> None:
    owner = Owner()
    connection, transport = opened(owner)
    connection.data_received(packed("PING") + b"*2\r\n$3\r\nGET\r\n$536870912\r\n")
    assert transport.written.startswith(b"+PONG\r\n-ERR Protocol error: invalid bulk length")
    assert transport.has_ended
    pieces = 0
    while not transport.aborted:
        connection.data_received(bytes(1_000_000))
        pieces += 1
        assert owner.held == 0
    assert 17 < pieces < 100, "more than a command of the largest size, and not all"


async def test_nil_is_of_the_version_that_the_client_speaks() -> None:
    owner = Owner()
    connection, transport = opened(owner)
    connection.data_received(packed("HELLO", "3"))
    transport.written = b""
    connection.data_received(packed("CLIENT", "GETNAME"))
    assert transport.written == b"_\r\n"
