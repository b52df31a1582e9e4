"""The state machine that the Raft group replicates: bytes in, ``ClusterState`` behind it."""

from __future__ import annotations

import logging

from .convert import command_from_bytes, image_from_bytes, image_to_bytes
from .core.commands import Result
from .core.state import ClusterState

log = logging.getLogger(__name__)


class ReplicatedState:
    """Implements the Raft driver's ``StateMachine``. ``state`` is replaced by a restore: hold this
    object, not the state.
    """

    def __init__(self) -> None:
        self.state = ClusterState()

    def apply(self, index: int, command: bytes) -> Result:
        """Apply one committed entry.

        Raises:
            UnsupportedVersionError: an entry of a format or kind unknown here; the member stops.
        """
        decoded = command_from_bytes(command)
        result = self.state.apply(decoded)
        log.debug("command applied index=%d command=%s result=%s", index, decoded, result)
        return result

    def snapshot(self) -> bytes:
        return image_to_bytes(self.state.image())

    def restore(self, snapshot: bytes) -> None:
        self.state = ClusterState(image_from_bytes(snapshot))
