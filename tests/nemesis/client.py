"""One client process of the workload: reads and writes through the public client, and keeps a
journal of what it asked and what it was told (journal.py).

Every client works on the same few keys, a worker for each: a key that is not served keeps its own
worker waiting and no other. That is what shows a stale read: a reader that is cut off together with
a deposed primary goes on reading its keys through it, while writers elsewhere go on writing them.
Beside them one worker puts, reads and deletes batches of rows of its own, each key once, and some
commit atomic batches and look at what these leave (groups.py).

It runs until its standard input ends. ``--kind`` says through which client: asyncio, or blocking
with a thread for each call.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import koinon
from koinon import aio
from koinon.options import TRANSPORTS, Options, Transport
from koinon_proto.contract.errors import ConditionFailedError, KoinonError, NobodyListensError
from tests.nemesis.groups import GROUPS, Calls, Groups
from tests.nemesis.journal import CONDITION, Call, Journal

KEYS = 10
EXPIRING = frozenset({KEYS - 1})  # the keys of which some records expire
CONNECT_TIMEOUT_MS = 20_000
CONNECT_PAUSE_S = 0.2
BATCH_ROWS = 15
BATCH_TIMEOUT_MS = 1_000
BATCH_PAUSE_S = (0.3, 0.6)
TTL_MS = 1_500


@dataclass(frozen=True)
class Role:
    """``reads``: the share of operations on shared keys that read. ``timeout_ms``: of each.
    ``pause_s``: from one to the next, least and most. ``client_each``: a client for every key.
    """

    reads: float
    timeout_ms: int
    pause_s: tuple[float, float]
    client_each: bool = False


ROLES = {
    # A write that was under way through a primary when that was cut off never completes there, and
    # reads of its key wait for it. So a reader never writes shared keys, writers pause, and one key
    # that waits holds up no other: a client reads the keys of a node in one call at a time.
    # A reader waits for answers that come late, when others lead by then: the client gives each of
    # a read's attempts half of the time that is left.
    "reader": Role(reads=1.0, timeout_ms=16_000, pause_s=(0.03, 0.09), client_each=True),
    "writer": Role(reads=0.2, timeout_ms=1_000, pause_s=(0.1, 0.3)),
    "mixed": Role(reads=0.6, timeout_ms=1_000, pause_s=(0.05, 0.15)),
}

METHODS = ("get_entry", "put", "delete", "get_entries", "put_many", "delete_many")


def key_name(prefix: str, number: int) -> str:
    return f"{prefix}/key/{number}"


async def connect(kind: str, coordinators: str, transport: Transport, keyspace: str) -> Calls:
    """Return the client's methods as coroutines. All coordinators may be down at the moment, which
    a client is told at once.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_MS / 1000
    while True:
        try:
            return await _connect(kind, coordinators, transport, keyspace)
        except NobodyListensError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(CONNECT_PAUSE_S)


async def _connect(kind: str, coordinators: str, transport: Transport, keyspace: str) -> Calls:
    options: Options = {
        "timeout_ms": CONNECT_TIMEOUT_MS,
        "transport": transport,
        "keyspace": keyspace,
    }
    if kind == "asyncio":
        client = await aio.connect(coordinators, **options)
        calls = {name: getattr(client, name) for name in METHODS}
        return calls | {"commit": partial(_commit, client)}
    blocking = koinon.connect(coordinators, **options)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(KEYS + GROUPS + 2))

    def on_a_thread(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        return lambda *arguments, **options: asyncio.to_thread(method, *arguments, **options)

    methods = {name: getattr(blocking, name) for name in METHODS}
    methods["commit"] = partial(_commit, blocking)
    return {name: on_a_thread(method) for name, method in methods.items()}


def _commit(
    client: Any,
    routing_key: bytes,
    rows: Mapping[bytes, bytes | None],
    checks: Sequence[tuple[bytes, int]],
    **options: Any,
) -> Any:
    """Commit an atomic batch; of the asyncio client: return the work. No value is a delete."""
    batch = client.batch(routing_key)
    for key, version in checks:
        batch.check(key, version)
    for key, value in rows.items():
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    return batch.commit(**options)


class Worker:
    """Reads and writes one shared key."""

    def __init__(
        self,
        number: int,
        prefix: str,
        name: str,
        role: Role,
        calls: Calls,
        journal: Journal,
    ) -> None:
        self._number = number
        self._name = name
        self._role = role
        self._calls = calls
        self._journal = journal
        self._choice = random.Random(f"{prefix}/{name}/{number}")
        self._key = key_name(prefix, number)
        self._version: int | None = None  # what it last knew to be there
        self._count = 0

    async def run(self) -> None:
        while True:
            self._count += 1
            action = self._choice.random()
            if action < self._role.reads:
                await self._read()
            else:
                await self._write(self._choice.random())
            await asyncio.sleep(self._choice.uniform(*self._role.pause_s))

    async def _read(self) -> None:
        call = self._journal.invoke(self._number, "read", self._key, None)
        ended, entry = await self._ask(call, "get_entry")
        if ended:
            self._version = entry.version if entry else 0
            call.ok(value=entry.value.decode() if entry else None, version=self._version)

    async def _write(self, action: float) -> None:
        value = f"{self._name}/{self._number}/{self._count}"
        condition = self._version if action < 0.3 else None
        options = {} if condition is None else {"if_version": condition}
        f = "write" if condition is None else "cas"
        if action < 0.08 or action > 0.85:
            call = self._journal.invoke(
                self._number, f if options else "delete", self._key, None, **options
            )
            ended, found = await self._ask(call, "delete", **options)
            if ended:
                self._version = 0
                call.ok(found=found)
            return
        if self._number in EXPIRING and action > 0.6:
            options["ttl_ms"] = TTL_MS
        call = self._journal.invoke(self._number, f, self._key, value, **options)
        ended, version = await self._ask(call, "put", value.encode(), **options)
        if ended:
            self._version = version
            call.ok(version=version)

    async def _ask(self, call: Call, method: str, *rest: Any, **options: Any) -> tuple[bool, Any]:
        """Return whether it was done, and the answer; note how it ended if it was not."""
        try:
            answer = await self._calls[method](
                self._key.encode(), *rest, **options, timeout_ms=self._role.timeout_ms
            )
        except ConditionFailedError as error:
            self._version = error.current_version
            call.fail(CONDITION, version=error.current_version)
        except KoinonError as error:
            self._version = None
            text = f"{type(error).__name__}: {error}"
            if error.maybe_applied:
                call.info(text)
            else:
                call.fail(text)
        else:
            return True, answer
        return False, None


class Batches:
    """Puts rows under new keys, reads them back, deletes some: a logical process for each row."""

    def __init__(
        self, prefix: str, name: str, first_worker: int, calls: Calls, journal: Journal
    ) -> None:
        self._prefix = f"{prefix}/once/{name}"
        self._first_worker = first_worker
        self._calls = calls
        self._journal = journal
        self._choice = random.Random(f"{prefix}/{name}/batches")
        self._written: list[list[str]] = []  # keys of batches of which every row was acknowledged

    async def run(self) -> None:
        number = 0
        while True:
            number += 1
            await self._put([f"{self._prefix}/{number}/{row}" for row in range(BATCH_ROWS)])
            if self._written:
                await self._read(self._choice.choice(self._written))
            if len(self._written) > 2 and self._choice.random() < 0.5:
                await self._delete(self._written.pop(self._choice.randrange(len(self._written))))
            await asyncio.sleep(self._choice.uniform(*BATCH_PAUSE_S))

    def _invoke(self, f: str, keys: list[str], values: list[str | None]) -> dict[bytes, Call]:
        return {
            key.encode(): self._journal.invoke(self._first_worker + row, f, key, values[row])
            for row, key in enumerate(keys)
        }

    async def _put(self, keys: list[str]) -> None:
        values = [f"value of {key}" for key in keys]
        calls = self._invoke("write", keys, list(values))
        rows = dict(zip(calls, (value.encode() for value in values), strict=True))
        result = await self._ask(calls, "put_many", rows)
        if result is not None and not self._failed(calls, result):
            self._written.append(keys)
        for call in calls.values():
            call.ok()

    async def _read(self, keys: list[str]) -> None:
        calls = self._invoke("read", keys, [None] * len(keys))
        entries = await self._ask(calls, "get_entries", list(calls))
        for call, entry in zip(calls.values(), entries or (), strict=True):
            value = entry.value.decode() if entry else None
            call.ok(value=value, version=entry.version if entry else 0)

    async def _delete(self, keys: list[str]) -> None:
        calls = self._invoke("delete", keys, [None] * len(keys))
        result = await self._ask(calls, "delete_many", list(calls))
        if result is None:
            return
        self._failed(calls, result)
        for call in calls.values():
            if result.absent:  # of rows that were all acknowledged: the final reads say which
                call.info(f"{result.absent} rows were not there")
            else:
                call.ok(found=True)

    async def _ask(self, calls: dict[bytes, Call], method: str, argument: Any) -> Any:
        """Return the answer; None if there is none, the calls ended and taken out then."""
        try:
            return await self._calls[method](argument, timeout_ms=BATCH_TIMEOUT_MS)
        except KoinonError as error:
            for call in calls.values():
                if error.maybe_applied or method != "get_entries":
                    call.info(str(error))  # of a whole batch, some rows may have been written
                else:
                    call.fail(str(error))
            calls.clear()
            return None

    @staticmethod
    def _failed(calls: dict[bytes, Call], result: koinon.WriteResult) -> bool:
        """Note the rows that failed, and take their calls out; return whether there were any."""
        for failure in result.refused:
            calls.pop(failure.key).fail(str(failure.error))
        for failure in result.unknown:
            calls.pop(failure.key).info(str(failure.error))
        return not result.ok


async def work(options: argparse.Namespace) -> None:
    how = options.kind, options.coordinators, options.transport, options.keyspace
    calls = await connect(*how)
    journal = Journal(options.journal, options.first_process)
    role = ROLES[options.role]
    tasks = []
    for number in range(KEYS):
        if role.client_each and number:
            own = await connect(*how)
        else:
            own = calls
        worker = Worker(number, options.prefix, options.name, role, own, journal)
        tasks.append(worker.run())
    for number in range(GROUPS):
        own = await connect(*how) if role.client_each else calls
        group = Groups(
            number,
            prefix=options.prefix,
            name=options.name,
            first_worker=KEYS + BATCH_ROWS,
            reads=role.reads,
            timeout_ms=role.timeout_ms,
            pause_s=role.pause_s,
            calls=own,
            journal=journal,
        )
        tasks.append(group.run())
    batches = Batches(options.prefix, options.name, KEYS, calls, journal).run()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    running = [asyncio.ensure_future(task) for task in (*tasks, batches)]
    done, _ = await asyncio.wait([ended, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # raises what ended a worker


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis.client", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--keyspace", required=True)
    parser.add_argument("--prefix", required=True, help="of all keys")
    parser.add_argument("--kind", choices=["asyncio", "blocking"], required=True)
    parser.add_argument("--transport", choices=TRANSPORTS, required=True)
    parser.add_argument("--role", choices=list(ROLES), required=True)
    parser.add_argument("--coordinators", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--first-process", type=int, required=True)
    parser.add_argument("--defect", help="plant this into the client")
    options = parser.parse_args()
    if options.defect:
        from tests.nemesis.defects import defect  # it imports what nodes are made of

        defect(options.defect).plant()
    asyncio.run(work(options))


if __name__ == "__main__":
    main()
