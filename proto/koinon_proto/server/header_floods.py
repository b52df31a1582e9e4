"""Closes gRPC connections that flood this process with header blocks.

gRPC's core reads the headers of a call, however many, before Python sees the call, and keeps no
limit on the way (``grpc.absolute_max_metadata_size`` does not help): ten connections that send
blocks of 1 MB fill 300 MB a second.

A call that reaches Python with too much metadata shows its connection. Other blocks never reach
Python: they do not end, or the core still reads them. But a block of more than 16 KiB needs
CONTINUATION frames (RFC 9113, 6.10), which no caller with metadata within the limit sends, and the
kernel shows what it has received and the core has not read yet. And the kernel counts what each
connection has received, and the guard counts what it has read in messages.

    unexplained = received - messages read - a little for each call and for answers taken

So a connection floods if some of its bytes are unexplained and CONTINUATION frames wait in the
kernel; or if more is unexplained than a caller may send before its messages are read, a window of
64 KiB for each call: 32 windows if none of its calls has reached Python in this round, else more
than all that it may have.

The watch costs a look at ``/proc/self/statm`` ten times a second. Only while the process's memory
rises does it look at the connections, in rounds of a second, and reset those that flood. Without
``/proc`` (not Linux) it does nothing; of TLS it sees the counts only.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    peeked,
    received_by_port,
    reset_connections,
)

log = logging.getLogger(__name__)
_lines = LinesPerSecond(1)

METADATA_BYTES_MAX: Final = 16 * 1024
"""The most bytes of metadata that a call may have."""
ALLOWED_BYTES: Final = 16 * 1024
"""The bytes of headers and frames that a connection may send in a round beside its calls."""
SILENT_BYTES: Final = 2 << 20
"""The windows of 32 calls, of which none has reached Python."""
WINDOWS_BYTES: Final = 24 << 20
"""More than the windows of all calls (256 of 64 KiB) that a connection may have open unread."""
RISE_BYTES: Final = 16 << 20
"""A rise of the process's memory within a second that is looked into."""
_CALL_BYTES = 512  # headers of a call, whether or not it has sent its message
_SENT_BYTES_A_BYTE = 256  # of answers taken, for a byte of flow control (13 for each 32 KiB)
_LOOK_S, _LOOKS_A_SECOND = 0.1, 10
_ROUND_S, _ROUND_LOOK_S = 1.0, 0.05
_PAGE_BYTES = 4096
_PEEKED_BYTES = 256 * 1024
# Length (up to the 16 KiB that a frame may have), type, flags: none but END_HEADERS, stream.
_CONTINUATION = re.compile(rb"(?=\x00[\x00-\x40].\x09[\x00\x04][\x00-\x7f].{3})", re.DOTALL)


@dataclass(slots=True)
class _Read:
    """The messages that the guard has read from a connection."""

    calls: int = 0
    bytes: int = 0


class Round:
    """The counts of one round of a watch, by connection; pure."""

    def __init__(self, began: Mapping[Endpoint, Received]) -> None:
        self._began = began
        self._read: dict[Endpoint, _Read] = {}

    def count(self, peer: Endpoint, message_bytes: int) -> None:
        """Count a message that was read from the connection."""
        read = self._read.setdefault(peer, _Read())
        read.calls += 1
        read.bytes += message_bytes

    def suspects(self, now: Mapping[Endpoint, Received]) -> dict[Endpoint, int]:
        """Return the unexplained bytes of the connections that have sent more than is allowed."""
        unexplained = {peer: self._unexplained(peer, received) for peer, received in now.items()}
        return {peer: size for peer, size in unexplained.items() if size > ALLOWED_BYTES}

    def most(self, peer: Endpoint, receiving: int) -> int:
        """Return how many unexplained bytes the connection may have sent, which may be sending so
        many messages.
        """
        if receiving or peer in self._read:
            return WINDOWS_BYTES + receiving * MAX_MESSAGE_BYTES
        return SILENT_BYTES

    def _unexplained(self, peer: Endpoint, received: Received) -> int:
        """Return the bytes that are neither messages nor what goes with calls and answers."""
        before, read = self._began.get(peer, Received()), self._read.get(peer, _Read())
        explained = read.bytes + read.calls * _CALL_BYTES
        explained += (received.sent_bytes - before.sent_bytes) // _SENT_BYTES_A_BYTE
        return received.bytes - before.bytes - explained


def has_continuations(data: bytes) -> bool:
    """Return whether the data has a CONTINUATION frame and the header of the next one of the same
    stream, wherever the first one begins. A message has such bytes only if somebody put them there
    on purpose.
    """
    for found in _CONTINUATION.finditer(data):
        at = found.start()
        following = at + 9 + int.from_bytes(data[at : at + 3], "big")
        same_stream = data[at + 5 : at + 9] == data[following + 5 : following + 9]
        if same_stream and _CONTINUATION.match(data, following):
            return True
    return False


class FloodWatch:
    """Watches the connections of one gRPC server, in a thread of its own: the event loop is late
    when a flood takes the CPU.
    """

    def __init__(
        self, receiving: Callable[[], Mapping[Endpoint, int]], kept_bytes: int = 0
    ) -> None:
        """``receiving`` returns how many messages a connection may be sending, of calls that were
        admitted; it is called in the watch's thread. ``kept_bytes`` of freed memory are kept after
        a flood.
        """
        self.ports: set[int] = set()  # at which the server listens
        self.closed = 0  # connections, since the start
        self._receiving, self._kept_bytes = receiving, kept_bytes
        self._round: Round | None = None
        self._reported: set[Endpoint] = set()  # by calls, not reset yet
        self._wake = threading.Event()
        self._is_stopping = False

    def count(self, peer: str, message_bytes: int) -> None:
        """Count a message that was read, by gRPC's name of the peer."""
        if self._round is not None and (place := endpoint_of(peer)) is not None:
            current = self._round
            if current is not None:
                current.count(place, message_bytes)

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
        """Watch from now on."""
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
            self._wait(_LOOK_S)

    def _look_for_a_round(self) -> bool:
        """Reset what floods within a second from now; return whether something did."""
        self._round = current = Round(received_by_port(self.ports))
        closed, until = self.closed, monotonic() + _ROUND_S
        while monotonic() < until and not self._is_stopping:
            self._wait(_ROUND_LOOK_S)
            if suspects := current.suspects(received_by_port(self.ports)):
                self._reset(self._floods(current, suspects))
        self._round = None
        if self.closed > closed:
            memory.trim(self._kept_bytes)  # gRPC has freed what it read; the system should have it
        return self.closed > closed and not self._is_stopping

    def _floods(self, current: Round, suspects: Mapping[Endpoint, int]) -> list[Endpoint]:
        """Return those of the connections that flood."""
        receiving = self._receiving()
        waiting = peeked(suspects, _PEEKED_BYTES)
        return [
            peer
            for peer, unexplained in suspects.items()
            if unexplained > current.most(peer, receiving.get(peer, 0))
            or has_continuations(waiting.get(peer, b""))
        ]

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
