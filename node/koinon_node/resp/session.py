"""What a connection has said of itself, and what its commands may ask of the node."""

from __future__ import annotations

from collections.abc import Callable

from koinon_node.resp.service import RedisService


class Session:
    """One connection's. ``tell`` sends a message that answers no command."""

    def __init__(
        self, service: RedisService, number: int, peer: str, tell: Callable[[bytes], None]
    ) -> None:
        self.service = service
        self.number = number  # CLIENT ID
        self.peer = peer
        self.tell = tell
        self.name = b""  # as the client calls itself
        self.library: dict[bytes, bytes] = {}  # lib-name and lib-ver, as it says
        self.resp3 = False
        self.closing = False  # after the reply that is made now
        self._end_attendance: Callable[[], None] | None = None

    def attend(self, on_leaving: Callable[[], None]) -> None:
        """Have ``on_leaving`` called when the node is about to stop; the node then waits for the
        end of this connection.

        Raises:
            ResourceExhaustedError: too many attend.
        """
        if self._end_attendance is None:
            self._end_attendance = self.service.drain.attend(self.peer, on_leaving)

    def end(self) -> None:
        """The connection is gone."""
        if self._end_attendance is not None:
            self._end_attendance()
