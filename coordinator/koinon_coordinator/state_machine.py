"""The state machine that the Raft group replicates: applies encoded commands to a
``ClusterState``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from koinon_coordinator.core.cluster.commands import Result
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.wire.rows import RowForms
from koinon_coordinator.wire.state_codec import command_from_bytes, image_from_bytes, image_to_bytes
from koinon_proto.contract.table import ClusterConfig

log = logging.getLogger(__name__)


_let_go = partial(time.sleep, 0)  # of the interpreter's lock, which the event loop may wait for


class ReplicatedState:
    """Implements the Raft driver's ``StateMachine``. A restore replaces ``state``: keep a reference
    to this object, not to the state.
    """

    def __init__(self, on_config: Callable[[ClusterConfig], None] = lambda _: None) -> None:
        """``on_config`` is called with each cluster configuration that comes into force here."""
        self.state = ClusterState()
        self._on_config = on_config
        self.row_forms = RowForms()
        self._config: ClusterConfig | None = None
        self._watchers: dict[asyncio.Event, None] = {}  # woken in the order in which they came

    @property
    def group_id(self) -> str:
        """The cluster's id; "" before the cluster is created."""
        config = self.state.config
        return config.cluster_id if config is not None else ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set now, and again whenever an entry was applied or the state
        restored.

        A waiter clears the event before it reads the state, and so sees the newest state however
        many changes it missed.
        """
        event = asyncio.Event()
        event.set()
        self._watchers[event] = None
        try:
            yield event
        finally:
            del self._watchers[event]

    def wake(self) -> None:
        """Wake all watchers."""
        for event in self._watchers:
            event.set()

    def apply(self, index: int, command: bytes) -> Result:
        """Apply one committed entry.

        Raises:
            UnsupportedVersionError: an entry of a format or kind unknown here; the member stops.
        """
        decoded = command_from_bytes(command)
        result = self.state.apply(decoded, index)
        log.debug("command applied index=%d command=%s result=%s", index, decoded, result)
        self._note_config()
        self.wake()
        return result

    def capture(self) -> Callable[[], bytes]:
        """Return a function that encodes the present state as a snapshot. Any thread may call it:
        an image is immutable.
        """
        return partial(image_to_bytes, self.state.image(), self.row_forms, _let_go)

    def restore(self, snapshot: bytes) -> None:
        self.state = ClusterState(image_from_bytes(snapshot))
        self._note_config()
        self.wake()

    def _note_config(self) -> None:
        config = self.state.config
        if config is not None and config is not self._config:
            self._config = config
            self._on_config(config)
