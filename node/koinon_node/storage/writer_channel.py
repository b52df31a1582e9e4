"""The channel from the event loop to the writer process, which applies commit groups."""

from __future__ import annotations

import asyncio
import marshal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from koinon_node.core.formats.writer_frames import GroupFrame, without_large
from koinon_node.storage.log_files import Stretch
from koinon_node.storage.store import Store
from koinon_node.storage.writer_process import GROUP, LENGTHS, LOG_STRETCHES
from koinon_proto.process.child_python import module_command

_STOP_TIMEOUT_S = 30.0

Answer = tuple[int, dict[int, str], int]
"""(group number, {index of a ticket that found no room: reason}, used bytes of the store)."""


class WriterChannel(Protocol):
    """A channel to a party that applies groups in order: the process, or a simulated store."""

    async def open(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        """Start. Each sent group gets one answer, in order, unless the channel is lost."""

    def send(self, group: GroupFrame) -> None: ...

    async def close(self) -> bool:
        """End once all groups are answered; return whether the other side ended cleanly."""

    def kill(self) -> None:
        """Kill the other side, since it does not answer."""

    async def settle(self) -> None:
        """Wait until the store itself has all groups that were answered.

        Raises:
            UnavailableError: the store has no room, or its disk does not answer.
        """


class StoreChannel(WriterChannel, Protocol):
    """A channel whose store can also take over records of a write-ahead log."""

    def take_over(self, life: int, position: int, stretches: list[Stretch]) -> None:
        """Take over the records of this life in the stretches, up to the position. The answer has
        the form of a group's: (position, {} or {0: the lack of room}, used bytes).
        """


class ProcessChannel:
    """A channel to the writer process (writer_process.py) of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def open(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        lock = self._store.lock_descriptor
        self._process = subprocess.Popen(  # noqa: ASYNC220  # blocks only the node's start
            module_command("koinon_node.storage.writer_process", str(theirs.fileno())),
            pass_fds=(theirs.fileno(), lock),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024 * 1024)
        loop = asyncio.get_running_loop()
        protocol = _AnswerProtocol(on_answer, on_lost)
        transport, _ = await loop.create_unix_connection(lambda: protocol, sock=ours)
        self._transport = transport
        config = self._store.config
        self.send_frame({**asdict(config), "directory": str(config.directory)})

    def send(self, group: GroupFrame) -> None:
        group, large = without_large(group)
        self.send_frame((GROUP, group), large)

    def take_over(self, life: int, position: int, stretches: list[Stretch]) -> None:
        self.send_frame((LOG_STRETCHES, (life, position, stretches)))

    def send_frame(self, message: Any, large: Sequence[bytes] = ()) -> None:
        """Send a frame, with large values behind it."""
        assert self._transport is not None
        body = marshal.dumps(message)
        head = LENGTHS.pack(len(body), sum(map(len, large)))
        self._transport.writelines((head, body, *large))

    async def settle(self) -> None:
        """Return at once: this channel answers after the store has the group."""

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def close(self) -> bool:
        """End the process; return whether it ended cleanly."""
        process, transport = self._process, self._transport
        if process is None or transport is None:
            return True
        transport.close()
        loop = asyncio.get_running_loop()
        try:
            code = await loop.run_in_executor(None, process.wait, _STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return code == 0


class _AnswerProtocol(asyncio.Protocol):
    """Splits the stream into answers."""

    def __init__(self, on_answer: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._buffer = bytearray()
        self._on_answer = on_answer
        self._on_lost = on_lost

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTHS.size:
            end = LENGTHS.size + LENGTHS.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            answer = marshal.loads(memoryview(self._buffer)[LENGTHS.size : end])
            del self._buffer[:end]
            self._on_answer(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
