"""The audit log: who did what, and who was refused, as JSON lines.

One line is one call: administration, bulk loads being opened and ended, members that come and go,
and refusals always; reads and writes of data one in so many, by choice. No line has keys or values.
``seq`` counts within one process (``process``), so that a gap shows. A thread of their own writes
the lines, since a disk that hangs must not stop a server; where there is no room for one it is left
out, and so is its number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from koinon_proto.contract.errors import ConfigurationError, PermissionDeniedError
from koinon_proto.contract.keyspaces import NAME_CHARS_MAX
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.process.private_files import opener

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 64 * 1024 * 1024
FILES_MAX = 8  # with the one that is being written
_WAITING_MAX = 10_000
_REFUSALS_MAX = 200
"""A second: a stranger may be refused as often as it likes, and is not to fill the disk."""

_ALWAYS = (
    *("/koinon.v1.Admin/", "/koinon.v1.Membership/Register", "/koinon.v1.Membership/Leave"),
    *("/koinon.v1.Loads/OpenLoad", "/koinon.v1.Loads/CommitLoad", "/koinon.v1.Loads/AbortLoad"),
    *("/koinon.v1.Loads/EmptyKeyspace", "redis:FLUSHDB", "redis:FLUSHALL"),
    *("/koinon.v1.Groups/RaiseGeneration", "/koinon.v1.Groups/DeleteGroup"),
    *("/koinon.v1.Cursors/Reset", "/koinon.v1.Cursors/Delete"),
    "/koinon.v1.Backup/ReleaseCut",  # a backup's data is read from then on
)
_SEEN_OFTEN = ("/koinon.v1.Admin/GetStatus", "/koinon.v1.Admin/GetMoves")
_DATA = ("/koinon.v1.KeyValue/", "/koinon.v1.Bulk/", "redis:")
OK = "ok"
REFUSED = ("unauthenticated", "permission_denied")


class Audit:
    """Writes to one file, which is rotated. ``every``: one in so many calls for data; 0: none."""

    def __init__(
        self, path: str = "", every: int = 0, *, now: Callable[[], float] = time.time
    ) -> None:
        """Open the file; '': nothing is written.

        Raises:
            ConfigurationError: it cannot be written.
        """
        self._now = now
        self._every = every
        self._process = secrets.token_hex(4)
        self._lock = threading.Lock()  # of the numbers
        self._sequence = 0
        self._data_calls = 0
        self._refusals = LinesPerSecond(_REFUSALS_MAX)
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING_MAX)
        self._reopens = False  # before the next line
        self._thread: threading.Thread | None = None
        if not path:
            return
        try:
            self._file = _Rotating(path)
        except OSError as error:
            raise ConfigurationError(
                reason=f"audit-log {path}: {error.strerror or error}"
            ) from None
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        return self._thread is not None

    def note(
        self,
        who: str,
        peer: str,
        method: str,
        outcome: str,
        request_id: str = "",
        error: Exception | None = None,
        keyspace: str = "",
    ) -> None:
        """Write how a call ended. ``method`` is its path, or ``redis:`` and a command's name; of
        an ``error`` that refuses it, what was not allowed and on how many rows: keys are not named.
        ``keyspace``: the one that it is about, if that is known.
        """
        with self._lock:
            self._sequence += 1
            facts: dict[str, Any] = {
                "seq": self._sequence,
                "process": self._process,
                "time": round(self._now(), 3),
                "who": who,
                "peer": peer,
                "method": method,
                "outcome": outcome,
            }
            if request_id:
                facts["request_id"] = request_id
            if keyspace:
                facts["keyspace"] = keyspace[:NAME_CHARS_MAX]  # of one that is wished for, any text
            if isinstance(error, PermissionDeniedError):
                facts["action"] = error.action
                if error.rows:
                    facts["rows_refused"] = len(error.rows)
            if outcome in REFUSED and (unlogged := self._refusals.take_unlogged()):
                facts["refusals_left_out"] = unlogged
            with contextlib.suppress(queue.Full):  # the number is gone, which says so
                self._lines.put_nowait(json.dumps(facts))

    def reopen(self) -> None:
        """Have the next line open the file by its name: another program may have moved it away."""
        self._reopens = True

    def close(self) -> None:
        """Write the waiting lines, and end."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join()

    def wants(self, method: str, outcome: str, count: int = 1) -> bool:
        """Return whether a call with this outcome is to be noted, or one of ``count`` such calls.
        Ask once a call: it is counted.
        """
        if self._thread is None:
            return False
        if outcome in REFUSED:
            return self._refusals.may_log()
        if method.startswith(_ALWAYS):
            return method not in _SEEN_OFTEN
        if method.startswith(_DATA):
            before, self._data_calls = self._data_calls, self._data_calls + count
            return bool(self._every) and before // self._every != self._data_calls // self._every
        return False

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._reopens:
                self._reopens = False
                self._file.let_go()
            self._file.emit(
                logging.LogRecord("audit", logging.INFO, "", 0, "%s", (line,), exc_info=None)
            )
        with contextlib.suppress(OSError):  # it was told of that line
            self._file.close()


class _Rotating(logging.handlers.RotatingFileHandler):
    """Rotated files that are private to the user."""

    def __init__(self, path: str) -> None:
        super().__init__(
            Path(path), maxBytes=FILE_BYTES_MAX, backupCount=FILES_MAX - 1, encoding="utf-8"
        )
        self._failures = LinesPerSecond(1)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A line could not be written: its number is missing, and the process's own log says why.
        The next one may be.
        """
        del record
        if self._failures.may_log():
            unlogged = self._failures.take_unlogged()
            log.exception("audit log cannot be written unlogged=%d", unlogged)

    def let_go(self) -> None:
        """Close the file; the next line opens it again."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=opener)


NO_AUDIT = Audit()


def add_flags(parser: Any) -> None:
    """Give a server's parser the flags of its audit log."""
    parser.add_argument(
        "--audit-log",
        default="",
        metavar="FILE",
        help="where to write who did what, JSON lines (nowhere)",
    )
    parser.add_argument(
        "--audit-data-every",
        type=int,
        default=0,
        metavar="N",
        help="of calls that read or write data, note one in N; 0: none (%(default)s)",
    )
