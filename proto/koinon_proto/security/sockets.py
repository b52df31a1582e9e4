"""A port for an asyncio protocol: plain, TLS, or both, by how a process listens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Protocol

from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.security.plain_or_tls import bound, first_byte, is_tls
from koinon_proto.security.transport import Listening

log = logging.getLogger(__name__)

# What asyncio makes room for at each look whether there is more, twice a command. A quarter of a
# megabyte is taken from the system anew each time, which costs as much as all else of TLS together.
SSLProtocol.max_size = 64 * 1024

_HANDSHAKE_S_MAX = 10.0
_HANDSHAKES_MAX = 1_024
_lines = LinesPerSecond(5)
_NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))
_REFUSED_MAX, _PAUSE_S = 64, 0.01
_refused = LinesPerSecond(1)

Factory = Callable[[], asyncio.Protocol]


class Server(Protocol):
    """A port that listens; its connections outlive it."""

    def close(self) -> None: ...


async def serve(address: str, factory: Factory, listening: Listening) -> Server:
    """Listen at ``host:port`` until the result is closed.

    Raises:
        OSError: it cannot be bound.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    found = await loop.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return _Server(
        [bound(family, kind, protocol, place) for family, kind, protocol, _, place in found],
        factory,
        listening,
    )


async def serve_at_chosen(
    address: str, factory: Factory, listening: Listening
) -> tuple[Server, int]:
    """Listen as ``serve``, but at one socket, of the first address of the host; return its port
    too. Port 0 is one that the system chooses; of ``[::]``, IPv4 is taken as well.

    Raises:
        OSError: it cannot be bound.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    found = await loop.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, place = found[0]
    listener = bound(family, kind, protocol, place, takes_both=place[0] == "::")
    chosen = int(listener.getsockname()[1])
    return _Server([listener], factory, listening), chosen


class _Server:
    """Takes connections itself, so that each is begun by the identity of that moment, and so that
    each is refused at once for which this process has no descriptor left: in the kernel's queue it
    would look open, and its client would wait for an answer.
    """

    def __init__(
        self, listeners: list[socket.socket], factory: Factory, listening: Listening
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._factory = factory
        self._listening = listening
        self._listeners = listeners
        self._accepting = [self._loop.create_task(self._accept(one)) for one in listeners]
        self._opening: dict[asyncio.Task[None], None] = {}
        self._spare = _spare()

    def close(self) -> None:
        for task in (*self._accepting, *self._opening):
            task.cancel()
        for listener in self._listeners:
            listener.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._refuse(listener)
                await asyncio.sleep(_PAUSE_S)  # else the peer has gone already
                continue
            if len(self._opening) >= _HANDSHAKES_MAX:  # strangers do not keep others out
                oldest = next(iter(self._opening))
                del self._opening[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._open(sock))
            self._opening[task] = None
            task.add_done_callback(lambda done: self._opening.pop(done, None))

    def _refuse(self, listener: socket.socket) -> None:
        """Close the connections that wait, by the descriptor that is kept for this."""
        count = 0
        with contextlib.suppress(OSError):
            while count < _REFUSED_MAX and self._spare is not None:
                os.close(self._spare)
                self._spare = None
                try:
                    listener.accept()[0].close()
                    count += 1
                finally:
                    self._spare = _spare()
        self._spare = self._spare if self._spare is not None else _spare()
        if _refused.may_log():
            log.warning(
                "File descriptor limit reached: connections are refused count=%d unlogged=%d",
                count,
                _refused.take_unlogged(),
            )

    async def _open(self, sock: socket.socket) -> None:
        peer = ""
        try:
            peer = str(sock.getpeername()[0])
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._listening.takes_tls:
                await self._loop.connect_accepted_socket(self._factory, sock)
                return
            if self._listening.takes_plain:
                async with asyncio.timeout(_HANDSHAKE_S_MAX):
                    first = await first_byte(sock)
                if not is_tls(first):
                    await self._loop.connect_accepted_socket(self._factory, sock)
                    return
            await self._loop.connect_accepted_socket(
                self._factory,
                sock,
                ssl=self._listening.context(certificates_required=False),
                ssl_handshake_timeout=_HANDSHAKE_S_MAX,
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError among them
            with contextlib.suppress(OSError):
                sock.close()
            if _lines.may_log():
                log.warning(
                    "TLS handshake failed peer=%s reason=%s unlogged=%d",
                    peer,
                    str(error) or "no answer in time",
                    _lines.take_unlogged(),
                )
        except BaseException:
            sock.close()
            raise


def _spare() -> int | None:
    """Return a descriptor to keep in reserve; None if there is none left."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
