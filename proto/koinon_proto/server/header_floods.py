"""Closes gRPC connections that flood this process with header blocks.

gRPC's core reads the headers of a call, however many, before Python sees the call, and keeps no
limit on the way (``grpc.absolute_max_metadata_size`` does not help): ten connections that send
blocks of 1 MB fill 300 MB a second.

A call that reaches Python with too much metadata shows its connection. Other blocks never reach
Python: they do not end, or the core still reads them. But the kernel counts what each connection
has received, and the guard counts what it has read in messages. What is left are headers, frames,
and the beginnings of messages of calls that Python has yet to see.

    unexplained = received - messages read - a little for each call and for answers taken

A connection that behaves has a window of 64 KiB for each call that is not read yet, and its calls
reach Python soon. So a connection floods if it has sent more than all its windows together, or some
and none of its calls has reached Python in half a second in which the event loop went round.

The watch costs a look at ``/proc/self/statm`` ten times a second. Only while the process's memory
rises does it look at the connections, in rounds of a second, and reset those that flood. Without
``/proc`` (not Linux) it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Final

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.process import memory
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.server.connections import (
    Endpoint,
    Received,
    endpoint_of,
    received_by_port,
    reset_connections,
)

log = logging.getLogger(__name__)
_lines = LinesPerSecond(1)

METADATA_BYTES_MAX: Final = 16 * 1024
"""The most bytes of metadata that a call may have."""
ALLOWED_BYTES: Final = 16 * 1024
"""The bytes of headers and frames that a connection may send in a round beside its calls."""
WINDOWS_BYTES: Final = 24 << 20
"""More than the windows of all calls (256 of 64 KiB) that a connection may have open unread."""
SILENT_S: Final = 0.5
RISE_BYTES: Final = 16 << 20
"""A rise of the process's memory within a second that is looked into."""
_CALL_BYTES = 512  # headers of a call, whether or not it has sent its message
_SENT_BYTES_A_BYTE = 256  # of answers taken, for a byte of flow control (13 for each 32 KiB)
_LOOK_S, _LOOKS_A_SECOND = 0.1, 10
_ROUND_S, _ROUND_LOOK_S = 1.0, 0.05
_PAGE_BYTES = 4096


@dataclass(slots=True)
class UnderWay:
    """The calls of a connection that have reached Python and are not read, and its streams."""

    waiting: int = 0  # for their admission
    messages: int = 0  # that are being received: of calls that were admitted, and of streams
    streams: int = 0


@dataclass(slots=True)
class _Read:
    """The messages that the guard has read from a connection."""

    calls: int = 0
    bytes: int = 0
    lately: int = 0  # of the calls, in this round


class Round:
    """The counts of one round of a watch, by connection; pure."""

    def __init__(self, began: Mapping[Endpoint, Received]) -> None:
        self._began = dict(began)
        self._read: dict[Endpoint, _Read] = {}
        self._silent: dict[Endpoint, float] = {}  # suspects without calls: since when

    def count(self, peer: Endpoint, message_bytes: int) -> None:
        """Count a message that was read from the connection."""
        read = self._read.setdefault(peer, _Read())
        read.calls += 1
        read.bytes += message_bytes
        read.lately += 1

    def floods(
        self,
        now: Mapping[Endpoint, Received],
        under_way: Callable[[], Mapping[Endpoint, UnderWay]],
        progress_s: float,
    ) -> list[Endpoint]:
        """Return the connections that flood. ``progress_s``: the seconds in which the event loop
        went round, from any beginning.
        """
        suspects = self._suspects(now)
        self._silent = {peer: at for peer, at in self._silent.items() if peer in suspects}
        if not suspects:
            return []
        found, calls = [], under_way()
        for peer, unexplained in suspects.items():
            call = calls.get(peer, UnderWay())
            if call != UnderWay() or self._read.get(peer, _Read()).lately:
                self._silent.pop(peer, None)
            else:
                self._silent.setdefault(peer, progress_s)
            is_silent = progress_s - self._silent.get(peer, progress_s) >= SILENT_S
            if is_silent or unexplained > WINDOWS_BYTES + call.messages * MAX_MESSAGE_BYTES:
                found.append(peer)
        return found

    @property
    def is_undecided(self) -> bool:
        """True while a connection may turn out to flood."""
        return bool(self._silent)

    def next(self, now: Mapping[Endpoint, Received]) -> Round:
        """Return the round after this one. What suspects have sent stays counted."""
        following, suspects = Round(now), self._suspects(now)
        for peer in suspects:
            following._began[peer] = self._began.get(peer, Received())
            if (read := self._read.get(peer)) is not None:
                following._read[peer] = _Read(read.calls, read.bytes)
            if peer in self._silent:
                following._silent[peer] = self._silent[peer]
        return following

    def _suspects(self, now: Mapping[Endpoint, Received]) -> dict[Endpoint, int]:
        """Return the unexplained bytes of the connections that have sent more than is allowed."""
        unexplained = {peer: self._unexplained(peer, received) for peer, received in now.items()}
        return {peer: size for peer, size in unexplained.items() if size > ALLOWED_BYTES}

    def _unexplained(self, peer: Endpoint, received: Received) -> int:
        """Return the bytes that are neither messages nor what goes with calls and answers."""
        before, read = self._began.get(peer, Received()), self._read.get(peer, _Read())
        explained = read.bytes + read.calls * _CALL_BYTES
        explained += (received.sent_bytes - before.sent_bytes) // _SENT_BYTES_A_BYTE
        return received.bytes - before.bytes - explained


class FloodWatch:
    """Watches the connections of one gRPC server, in a thread of its own: the event loop is late
    when a flood takes the CPU.

    ``under_way`` is called in that thread.
    """

    def __init__(
        self, under_way: Callable[[], Mapping[Endpoint, UnderWay]], kept_bytes: int = 0
    ) -> None:
        """``kept_bytes`` of freed memory are kept after a flood."""
        self.ports: set[int] = set()  # at which the server listens
        self.closed = 0  # connections, since the start
        self._under_way, self._kept_bytes = under_way, kept_bytes
        self._round: Round | None = None
        self._switching = threading.Lock()
        self._reported: set[Endpoint] = set()  # by calls, not reset yet
        self._wake = threading.Event()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._went_round = True  # the loop, since it was asked to say so
        self._progress_s = 0.0  # in which the loop went round

    def count(self, peer: str, message_bytes: int) -> None:
        """Count a message that was read, by gRPC's name of the peer."""
        if self._round is not None and (place := endpoint_of(peer)) is not None:
            with self._switching:
                if self._round is not None:
                    self._round.count(place, message_bytes)

    def check(self, context: Any) -> None:
        """Have the connection of a call with too much metadata reset.

        Raises:
            InvalidArgumentError: it has too much.
        """
        size = sum(map(len, chain.from_iterable(context.invocation_metadata())))
        if size > METADATA_BYTES_MAX:
            if (place := endpoint_of(context.peer())) is not None:
                self._reported.add(place)
                self._wake.set()
            raise InvalidArgumentError(
                field="metadata", reason=f"has {size} bytes, at most {METADATA_BYTES_MAX} may be"
            )

    def start(self) -> None:
        """Watch from now on, beside the running loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="flood-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._is_stopping = True
        self._wake.set()

    def _run(self) -> None:
        lately: deque[int] = deque(maxlen=_LOOKS_A_SECOND)
        while (size := _memory_bytes()) is not None and not self._is_stopping:
            lately.append(size)
            if size - min(lately) > RISE_BYTES:
                while self._look_for_a_round():
                    lately.clear()
                self._round = None
            self._wait(_LOOK_S)

    def _look_for_a_round(self) -> bool:
        """Reset what floods within a second from now; return whether to look on."""
        now = received_by_port(self.ports)
        with self._switching:  # no message may be counted in neither of the rounds
            current = self._round = Round(now) if self._round is None else self._round.next(now)
        closed, until = self.closed, monotonic() + _ROUND_S
        while monotonic() < until and not self._is_stopping:
            self._wait(_ROUND_LOOK_S)
            self._follow_loop()
            now = received_by_port(self.ports)
            self._reset(current.floods(now, self._under_way, self._progress_s))
        if self.closed > closed:
            memory.trim(self._kept_bytes)  # gRPC has freed what it read; the system should have it
        return (self.closed > closed or current.is_undecided) and not self._is_stopping

    def _follow_loop(self) -> None:
        """Count the time between two looks if the loop went round meanwhile."""
        if self._went_round and self._loop is not None:
            self._went_round = False
            self._progress_s += _ROUND_LOOK_S
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._note_round)

    def _note_round(self) -> None:
        self._went_round = True

    def _wait(self, seconds: float) -> None:
        """Wait, or reset the connections of calls with too much metadata, once there are some."""
        if self._wake.wait(seconds):
            self._wake.clear()
            reported, self._reported = self._reported, set()
            self._reset(list(reported))

    def _reset(self, floods: Sequence[Endpoint]) -> None:
        if not floods:
            return
        self.closed += reset_connections(set(floods))
        if _lines.may_log():
            log.warning(
                "connections closed: header blocks without calls hosts=%s closed_so_far=%d",
                ",".join(sorted({str(host) for host, _ in floods})[:5]),
                self.closed,
            )


def _memory_bytes() -> int | None:
    """Return the process's memory without that of files; None where ``/proc`` does not tell."""
    try:
        _, resident, of_files = Path("/proc/self/statm").read_text().split()[:3]
    except OSError:
        return None
    return (int(resident) - int(of_files)) * _PAGE_BYTES
