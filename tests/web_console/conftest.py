"""A console over HTTP whose cluster is a table that tests change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn

from koinon.operate.judge.dashboard import Observation, Overview
from koinon.operate.judge.heat import HotAnswer, hot_answer
from koinon.operate.judge.hotspots import KeySample, RankBy, SampledKey
from koinon.operate.traffic import Survey
from koinon.web_console.application import Console, Questions
from koinon.web_console.broadcast import Broadcast
from koinon.web_console.gate import Gate
from koinon.web_console.journal import Journal
from koinon.web_console.live_state import LiveState, moment_of
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import Table
from tests.client.operate.test_health import status_of, table_of, with_row
from tests.client.operate.test_hotspots import rates_of
from tests.kit.waiting import wait_until

CODE = "the-code-of-this-console"
HOSTILE = b"<script>alert(1)</script>\x1b[31m\xff"


class ServedConsole:
    """A console that runs on a thread. ``take`` hands it a table, as a look at a cluster does."""

    def __init__(self, code: str = "") -> None:
        self.state = LiveState(Journal("test"))
        self.users = {"a_user"}
        self.coordinators_are_up = True
        self.watched: list[bool] = []
        self._overview = Overview()
        self._gate = Gate(names=["ops.example"], code=code)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broadcast = Broadcast(self.state.journal)
        questions = Questions(hot=_hot, is_user=self._is_user)
        console = Console(self.state, self._broadcast, self._gate, questions, self.watched.append)
        self.gate = self._gate
        config = uvicorn.Config(
            console.application(self._alive), log_config=None, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()
        wait_until(lambda: self._server.started)

    @contextlib.asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        yield

    def _is_user(self, token: str) -> bool:
        if not self.coordinators_are_up:
            raise UnavailableError(reason="no coordinator answers")
        return token in self.users

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function on the server's event loop, as what the poller finds is taken there."""

        async def run() -> Any:
            found = function(*arguments)
            self._broadcast.announce()
            return found

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def take(self, table: Table) -> None:
        seen = Observation(at=time.monotonic(), unix_s=time.time(), status=status_of(table))
        view = self._overview.update(seen)
        self.call(self.state.apply_view, view, moment_of(view))

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=30)

    def close(self) -> None:
        self._server.should_exit = True
        with contextlib.suppress(RuntimeError):
            self.call(self._broadcast.close)
        self._thread.join(10)
        self._socket.close()


def _hot(table: Table, seconds: float) -> HotAnswer:
    key = SampledKey(
        partition_id=3, key=HOSTILE, reads_per_second=90.0, writes_per_second=0.0, taken=90
    )
    survey = Survey(
        seconds=seconds, rates=rates_of(0, 0, 0, 100), sample=KeySample(keys=[key]), silent={}
    )
    return hot_answer(survey, table, RankBy.ALL, shown=5, keys=3)


@pytest.fixture
def served() -> Iterator[ServedConsole]:
    """A console without a code, which has seen one version of a table."""
    console = ServedConsole()
    console.take(table_of())
    yield console
    console.close()


@pytest.fixture
def guarded() -> Iterator[ServedConsole]:
    """The same where a code is asked for."""
    console = ServedConsole(CODE)
    console.take(table_of())
    yield console
    console.close()


def changed(table: Table, partition_id: int, primary: Any) -> Table:
    """Return the next version of the table, in which another node leads the partition."""
    version = table.table_version + 1
    after = with_row(table, partition_id, primary=primary, changed_at=version)
    return replace(after, table_version=version)


Event = tuple[str, str, Any]
"""The id of a server-sent event ('': it has none), its name and its data."""


@contextlib.contextmanager
def events(client: httpx.Client, **headers: str) -> Iterator[Iterator[Event]]:
    """Open the stream of events; yields them as they come."""
    with client.stream("GET", "/api/events", headers=headers) as reply:
        assert reply.status_code == 200, reply.status_code
        yield _parsed(reply.iter_lines())


def _parsed(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            if "data" in fields:
                yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}
