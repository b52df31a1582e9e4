"""Closes gRPC connections that flood this process with header blocks.

gRPC's core reads the headers of a call, however many, before Python sees the call, and keeps no
limit on the way (``grpc.absolute_max_metadata_size`` does not help): ten connections that send
blocks of 1 MB fill 300 MB a second.

A call that reaches Python with too much metadata shows its connection. Other blocks never reach
Python: they do not end, or the core still reads them. But the kernel counts what each connection
has received, and the guard counts what it has read in messages. What is left are headers and
frames, which is little on every connection that behaves.

    unexplained = received - messages read - messages under way - a little for each call

The watch costs a look at ``/proc/self/statm`` ten times a second. Only while the process's memory
rises does it look at the connections, in rounds of a second, and close those above their allowance.
Without ``/proc`` (not Linux) it does nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
RISE_BYTES: Final = 16 << 20
"""A rise of the process's memory within a second that is looked into."""
_CALL_BYTES = 512  # headers of a call, whether or not it has sent its message
_WINDOW_BYTES = 64 * 1024  # what a call may send before it is admitted
_SENT_BYTES_A_BYTE = (
    256  # a connection that takes answers sends flow control: 13 bytes for each 32 KiB
)
_LOOK_S, _LOOKS_A_SECOND = 0.1, 10
_ROUND_S, _ROUND_LOOK_S = 1.0, 0.05
_PAGE_BYTES = 4096


@dataclass(slots=True)
class UnderWay:
    """Messages that a connection may be sending and that nobody has read yet."""

    waiting: int = 0  # calls that wait for their admission
    messages: int = 0  # that are being received: of calls that were admitted, and of streams

    @property
    def bytes(self) -> int:
        """The bytes of messages that may have come without being counted."""
        return self.waiting * _WINDOW_BYTES + self.messages * MAX_MESSAGE_BYTES


@dataclass(slots=True)
class _Read:
    """The messages that the guard has read from a connection in this round."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Round:
    """The counts of one round of a watch, by connection; pure."""

    began: dict[Endpoint, Received]
    _read: dict[Endpoint, _Read] = field(default_factory=dict)

    def count(self, peer: Endpoint, message_bytes: int) -> None:
        """Count a message that was read from the connection."""
        read = self._read.setdefault(peer, _Read())
        read.calls += 1
        read.bytes += message_bytes

    def floods(
        self,
        now: Mapping[Endpoint, Received],
        under_way: Callable[[], Mapping[Endpoint, UnderWay]],
    ) -> list[Endpoint]:
        """Return the connections that have sent more than calls explain."""
        unexplained = {peer: self._unexplained(peer, received) for peer, received in now.items()}
        suspects = [peer for peer, size in unexplained.items() if size > ALLOWED_BYTES]
        if not suspects:
            return []
        open_calls = under_way()
        return [
            peer
            for peer in suspects
            if unexplained[peer] - open_calls.get(peer, UnderWay()).bytes > ALLOWED_BYTES
        ]

    def _unexplained(self, peer: Endpoint, received: Received) -> int:
        """Return the bytes that are neither messages nor what goes with calls and answers."""
        before, read = self.began.get(peer, Received()), self._read.get(peer, _Read())
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
        self._reported: set[Endpoint] = set()  # by calls, not reset yet
        self._wake = threading.Event()
        self._is_stopping = False

    def count(self, peer: str, message_bytes: int) -> None:
        """Count a message that was read, by gRPC's name of the peer."""
        current = self._round
        if current is not None and (place := endpoint_of(peer)) is not None:
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
        self._round = Round(received_by_port(self.ports))
        closed, until = self.closed, monotonic() + _ROUND_S
        while monotonic() < until and not self._is_stopping:
            self._wait(_ROUND_LOOK_S)
            self._reset(self._round.floods(received_by_port(self.ports), self._under_way))
        self._round = None
        if self.closed == closed:
            return False
        memory.trim(self._kept_bytes)  # gRPC has freed what it read; the system should have it
        return not self._is_stopping

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
