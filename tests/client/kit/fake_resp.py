"""The RESP side of a fake node: commands of one buffer are answered by its ``BatchGet`` and
``BatchWrite``, a run of reads or of writes by one call, in order; messages by the methods that take
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from base64 import b64encode
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

import hiredis

from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    ReplyTooLargeError,
    UnknownKeyspaceError,
    WrongClusterError,
)
from koinon_proto.contract.request_ids import Handling, handling
from koinon_proto.v1 import kv_pb2

READS = (b"KOINON.GET", b"KOINON.ENTRY", b"KOINON.EXISTS")
WRITES = (b"KOINON.PUT", b"KOINON.DELETE")  # all others are updates
GET_MANY, SCAN = b"KOINON.GETMANY", b"KOINON.SCAN"
LEAVING = b">1\r\n$14\r\nkoinon.leaving\r\n"

Command = list[bytes]
Batch = Callable[[Any, Any], Awaitable[Any]]


class Context:
    """A call, as handlers see it; no deadline comes with a command."""

    @staticmethod
    def time_remaining() -> float:
        return math.inf


class FakeResp:
    """The listener of one node. ``partition_of`` is the cluster's."""

    def __init__(
        self,
        node_id: str,
        partition_of: Callable[[bytes], int],
        get: Batch,
        write: Batch,
        update: Batch,
        scan: Batch,
    ) -> None:
        self.cluster_id = "fake"
        self.address = ""
        self.connections = 0  # that were let in, ever
        self.refused = 0  # that named a keyspace
        self.commands = 0  # that came, but for the first of a connection
        self.pages = 0  # that were asked for
        self.batches = 0  # of reads, that were asked for
        self.knows = {GET_MANY, SCAN}  # of the commands that bring a message
        self.clock_ms = 1_000_000  # as clients are told it; commands are taken up at any time
        self.answer: Callable[[bytes], bytes] = bytes  # what is said instead of an answer
        self._node_id = node_id.encode()
        self._partition_of = partition_of
        self._get, self._write, self._update, self._scan = get, write, update, scan
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._welcome: dict[asyncio.StreamWriter, None] = {}  # that were let in, in turn

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening and reset every connection."""
        assert self._server is not None
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Cut every connection, and go on listening."""
        for writer in self._writers:
            writer.transport.abort()

    def cut_newest(self) -> None:
        """Cut the connection that was let in last."""
        list(self._welcome)[-1].transport.abort()

    async def leave(self) -> None:
        """Let in no more clients, say that the node leaves, and wait until all have closed."""
        assert self._server is not None
        self._server.close()
        for writer in self._welcome:
            writer.write(LEAVING)
        while self._writers:  # noqa: ASYNC110 (of a test)
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        parser = hiredis.Reader()
        try:
            while received := await reader.read(1 << 20):
                parser.feed(received)
                commands: list[Command] = []
                while (command := parser.gets()) is not False:
                    commands.append(_without_deadline(command))
                for _, run in groupby(commands, _sort_of):
                    for answer in await self._answers(list(run), writer):
                        writer.write(self.answer(answer))
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            self._welcome.pop(writer, None)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _answers(self, run: list[Command], writer: asyncio.StreamWriter) -> list[bytes]:
        if run[0][0] == b"KOINON.HELLO":
            return [self._hello(run[0], writer)]
        self.commands += len(run)
        handling.set(Handling(run[0][-1].decode()))
        carry_out = (self._reads, self._writes, self._updates, self._messages)[_sort_of(run[0])]
        try:
            return await carry_out(run)
        except ReplyTooLargeError as error:
            half = len(run) // 2
            if not half:
                return [error_reply(error, run[0])]
            return [
                *await self._answers(run[:half], writer),
                *await self._answers(run[half:], writer),
            ]
        except Exception as error:
            return [error_reply(error, command) for command in run]

    def _hello(self, command: Command, writer: asyncio.StreamWriter) -> bytes:
        """Let a client of the keyspace ``default`` in."""
        if command[3] != b"0":
            self.refused += 1
            return error_reply(UnknownKeyspaceError(keyspace=command[3].decode()), None)
        if command[2].decode() != self.cluster_id:
            return error_reply(
                WrongClusterError(
                    expected_cluster_id=self.cluster_id, actual_cluster_id=command[2].decode()
                ),
                None,
            )
        self.connections += 1
        self._welcome[writer] = None
        return _bulk(b"%b %d" % (self._node_id, self.clock_ms))

    async def _reads(self, run: list[Command]) -> list[bytes]:
        keys = [command[1] for command in run]
        request = kv_pb2.BatchGetRequest(
            table_version=int(run[0][2]),
            keys=keys,
            partition_ids=map(self._partition_of, keys),
            want_versions=True,
        )
        reply = await self._get(request, Context)
        refused = {r.partition_id: convert.error_from_proto(r.error) for r in reply.refusals}
        answers = []
        for row, command in enumerate(run):
            error = refused.get(request.partition_ids[row])
            if error is not None:
                answers.append(error_reply(error, command))
            elif command[0] == b"KOINON.GET":
                missing = row in reply.missing
                answers.append(b"$-1\r\n" if missing else _bulk(reply.values[row]))
            elif command[0] == b"KOINON.EXISTS":
                answers.append(b":%d\r\n" % (row not in reply.missing))
            elif row in reply.missing:
                answers.append(b"*-1\r\n")
            else:
                version, expiry = reply.versions[row], reply.expires_at_ms[row]
                answers.append(
                    b"*3\r\n%b:%d\r\n:%d\r\n" % (_bulk(reply.values[row]), version, expiry)
                )
        return answers

    async def _messages(self, run: list[Command]) -> list[bytes]:
        return [await self._message(command) for command in run]

    async def _message(self, command: Command) -> bytes:
        name, message = command[:2]
        if name not in self.knows:
            return b"-ERR unknown command '%b'\r\n" % name
        if name == SCAN:
            self.pages += 1
            page = await self._scan(kv_pb2.ScanRequest.FromString(message), Context)
            return _bulk(page.SerializeToString())
        self.batches += 1
        rows = await self._get(kv_pb2.BatchGetRequest.FromString(message), Context)
        return _bulk(rows.SerializeToString())

    async def _writes(self, run: list[Command]) -> list[bytes]:
        answers = []
        for _, group in groupby(run, lambda command: command[-2]):
            answers += await self._write_batch(list(group))
        return answers

    async def _write_batch(self, run: list[Command]) -> list[bytes]:
        keys = [command[1] for command in run]
        puts = [command[0] == b"KOINON.PUT" for command in run]
        conditions = [command[-3] for command in run]
        request = kv_pb2.BatchWriteRequest(
            table_version=int(run[0][-5 if puts[0] else -4]),
            keys=keys,
            values=[command[2] if put else b"" for command, put in zip(run, puts, strict=True)],
            partition_ids=map(self._partition_of, keys),
            deletes=[row for row, put in enumerate(puts) if not put],
            ttl_ms=[int(command[4]) if put else 0 for command, put in zip(run, puts, strict=True)],
            conditions=[
                kv_pb2.Condition(row=row, if_version=int(condition))
                for row, condition in enumerate(conditions)
                if condition
            ],
            durability=int(run[0][-2]),  # type: ignore[arg-type]
        )
        reply = await self._write(request, Context)
        refused = {r.partition_id: convert.error_from_proto(r.error) for r in reply.refusals}
        by_row = {e.row: convert.error_from_proto(e.error) for e in reply.row_errors}
        answers = []
        for row, command in enumerate(run):
            error = refused.get(request.partition_ids[row]) or by_row.get(row)
            if error is not None:
                answers.append(error_reply(error, command))
            elif puts[row]:
                answers.append(_bulk(b"%d" % reply.versions[row]))
            else:
                answers.append(b":%d\r\n" % (row not in reply.absent))
        return answers

    async def _updates(self, run: list[Command]) -> list[bytes]:
        answers = []
        for _, group in groupby(run, lambda command: command[-2]):
            answers += await self._update_batch(list(group))
        return answers

    async def _update_batch(self, run: list[Command]) -> list[bytes]:
        keys = [command[1] for command in run]
        request = kv_pb2.BatchUpdateRequest(
            table_version=int(run[0][-3]),
            keys=keys,
            partition_ids=map(self._partition_of, keys),
            updates=map(_update_of, run),
            durability=int(run[0][-2]),  # type: ignore[arg-type]
        )
        reply = await self._update(request, Context)
        refused = {r.partition_id: convert.error_from_proto(r.error) for r in reply.refusals}
        by_row = {e.row: convert.error_from_proto(e.error) for e in reply.row_errors}
        answers = []
        for row, (command, result) in enumerate(zip(run, reply.results, strict=True)):
            error = refused.get(request.partition_ids[row]) or by_row.get(row)
            if error is not None:
                answers.append(error_reply(error, command))
            elif command[0] == b"KOINON.INCREMENT":
                answers.append(b":%d\r\n" % result.number)
            elif command[0] == b"KOINON.TOUCH":
                answers.append(b":%d\r\n" % result.found)
            else:
                answers.append(_bulk(result.value) if result.found else b"$-1\r\n")
        return answers


def _without_deadline(command: Command) -> Command:
    """Return a command without the time by which a write is to be taken up: here it is any time."""
    named = command[0] in (*READS, GET_MANY, SCAN, b"KOINON.HELLO")
    return command if named else command[:-1]


def _sort_of(command: Command) -> int:
    if command[0] in (GET_MANY, SCAN):
        return 3
    return 0 if command[0] in READS else 1 if command[0] in WRITES else 2


def _update_of(command: Command) -> kv_pb2.Update:
    ttl_ms = int(command[-4])
    if command[0] == b"KOINON.INCREMENT":
        return kv_pb2.Update(increment=kv_pb2.Increment(by=int(command[2]), ttl_ms=ttl_ms))
    if command[0] == b"KOINON.TOUCH":
        return kv_pb2.Update(touch=kv_pb2.Touch(ttl_ms=ttl_ms))
    return kv_pb2.Update(get_or_put=kv_pb2.GetOrPut(value=command[2], ttl_ms=ttl_ms))


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def error_reply(error: Exception, command: Command | None) -> bytes:
    request_id = command[-1] if command is not None else b"own"
    whole = b64encode(convert.error_to_proto(error).SerializeToString())
    return b"-KOINON %b %b\r\n" % (whole, request_id)
