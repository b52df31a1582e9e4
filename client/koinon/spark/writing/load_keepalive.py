"""Keeps a load open while a job works on it: the coordinators' leader aborts a load that is not
touched for its timeout.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from koinon.spark.cluster import loads_of
from koinon.spark.options import WriteOptions
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import KoinonError

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
TIMES_IN_TIMEOUT: Final = 4
"""The touches within a timeout: one or two may be lost or late."""
CALL_TIMEOUT_S: Final = 3.0


class LoadKeepalive:
    """A thread that touches a load at once, and then regularly until this object or the load is
    closed.
    """

    def __init__(
        self,
        options: WriteOptions,
        load_id: int,
        *,
        attempt: int = 0,
        staged: Callable[[], tuple[int, int]] = lambda: (0, 0),
        on_closed: Callable[[LoadClosedError], None] = lambda error: None,
    ) -> None:
        """``staged`` returns the rows and bytes that the attempt (0: the job itself) has staged;
        ``on_closed`` is called once if the load has ended meanwhile.
        """
        self._options = options
        self._every_s = min(EVERY_S, options.load_timeout_ms / 1000 / TIMES_IN_TIMEOUT)
        self._load_id = load_id
        self._attempt = attempt
        self._staged = staged
        self._on_closed = on_closed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="koinon-touch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop touching the load."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with loads_of(self._options, CALL_TIMEOUT_S) as loads:
            while True:
                rows, size_bytes = self._staged()
                try:
                    loads.touch(
                        self._load_id, attempt=self._attempt, rows=rows, size_bytes=size_bytes
                    )
                except LoadClosedError as closed:
                    self._on_closed(closed)
                    return
                except KoinonError as error:
                    log.warning("load not touched load_id=%d error=%s", self._load_id, error)
                if self._ended.wait(self._every_s):
                    return
