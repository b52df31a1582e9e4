"""Histories as JSON lines, one event of an operation a line, as Jepsen's tools read them.

    {"index": 7, "time": 81230411, "process": 3, "type": "invoke", "f": "write", "key": "key/4",
     "value": "w1/3/17"}
    {"index": 9, "time": 84116770, "process": 3, "type": "ok", "f": "write", "key": "key/4",
     "value": "w1/3/17", "version": 1099511627781}

``index``    position in the file, from 0
``time``     nanoseconds since the schedule began, on one clock for all processes
``process``  a logical process: one operation at a time; after an ``info`` its number never comes
             again. "nemesis" for a fault, whose lines are all of type ``info``
``type``     ``invoke``, and then one of ``ok``: it was done, ``fail``: it certainly had no effect,
             ``info``: not known, it takes effect at any time from then on, or never. An
             operation that is never completed is the same as one of ``info``
``f``        ``read``, ``write``, ``delete``, and ``cas``: a write or delete with a condition
``key``      text; operations of different keys are independent of one another
``value``    what is written, or what a read found; null: no record (a ``cas`` of null deletes)
``version``  of what was written or found; 0: no record; of a ``fail`` with the error "condition"
             the one that was there instead. Absent where the answer does not name it
``if_version``  of a ``cas``: the version that must be there (0: no record)
``found``    of a delete's ``ok``: whether there was a record
``ttl_ms``   of a write: the record may go by itself after so long
``error``    of a ``fail`` or an ``info``: what the client said

Each client process appends to a file of its own while it runs, without ``index``; ``merge`` makes
one history of them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.checkers.history import ABSENT_VERSION, Kind, Operation, Outcome

Line = dict[str, Any]

NEMESIS = "nemesis"
CONDITION = "condition"  # the error of a refused condition
GENERATION = 1_000  # what is added to a process's number after an info
_UNSEEN_VERSION = 1
_KINDS = {"read": Kind.GET, "write": Kind.PUT, "delete": Kind.DELETE}


class Call:
    """One operation under way; exactly one of ``ok``, ``fail`` and ``info`` ends it."""

    def __init__(self, journal: Journal, worker: int, process: int, fields: Line) -> None:
        self._journal = journal
        self._worker = worker
        self._process = process
        self._fields = fields

    def ok(self, **fields: Any) -> None:
        self._end("ok", fields)

    def fail(self, error: str, **fields: Any) -> None:
        self._end("fail", {"error": error, **fields})

    def info(self, error: str) -> None:
        self._journal.crashed(self._worker)
        self._end("info", {"error": error})

    def _end(self, kind: str, fields: Line) -> None:
        self._journal.append({"process": self._process, "type": kind, **self._fields, **fields})


class Journal:
    """Appends lines to a file; each is there, whole, before the call that made it returns. Its
    workers are numbered from 0, fewer than ``GENERATION``; their processes from ``first`` on.
    """

    def __init__(self, path: Path, first: int = 0) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._first = first
        self._lock = threading.Lock()
        self._generations: dict[int, int] = {}

    def invoke(self, worker: int, f: str, key: str, value: str | None, **fields: Any) -> Call:
        """Note that a worker's operation begins now."""
        process = self._first + worker + GENERATION * self._generations.get(worker, 0)
        described = {"f": f, "key": key, "value": value, **fields}
        self.append({"process": process, "type": "invoke", **described})
        return Call(self, worker, process, described)

    def note(self, f: str, value: Any) -> None:
        """Note what the nemesis does."""
        self.append({"process": NEMESIS, "type": "info", "f": f, "value": value})

    def crashed(self, worker: int) -> None:
        """The worker goes on as another process."""
        self._generations[worker] = self._generations.get(worker, 0) + 1

    def append(self, fields: Line) -> None:
        with self._lock:  # times of a file never fall
            line = json.dumps({"time": time.monotonic_ns(), **fields})
            os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def merge(paths: Iterable[Path], began_at_ns: int = 0) -> list[Line]:
    """Return the lines of several journals as one history, its times since ``began_at_ns``."""
    lines = [line for path in paths for line in _whole_lines(path)]
    lines.sort(key=lambda line: int(line["time"]))
    return [
        {"index": index, **line, "time": line["time"] - began_at_ns}
        for index, line in enumerate(lines)
    ]


def _whole_lines(path: Path) -> list[Line]:
    """The last line may be torn where its process was killed."""
    texts = path.read_text().split("\n")
    return [json.loads(text) for text in texts[:-1]]


def write_history(path: Path, lines: Iterable[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_history(path: Path) -> list[Line]:
    return _whole_lines(path)


# --- as operations that the checker judges --------------------------------------------------------


def operations(lines: Iterable[Line]) -> list[Operation]:
    """Return a history's operations for ``checkers.linearizability``; times in seconds.

    A batch's answer names no versions. Its keys are written by one process and once, so that the
    version of whatever read has found a value is that of the write; where none has, any will do.
    """
    found: list[Operation] = []
    open_calls: dict[int, int] = {}
    versions: dict[tuple[bytes, bytes | None], int] = {}
    for line in lines:
        process = line["process"]
        if process == NEMESIS:
            continue
        if line["type"] == "invoke":
            open_calls[process] = len(found)
            found.append(_invoked(line, len(found)))
            continue
        number = open_calls.pop(process)
        found[number] = ended = _ended(found[number], line)
        if ended.kind is Kind.GET and ended.version:
            versions[ended.key, ended.value] = ended.version
    return [_with_version(operation, versions) for operation in found]


def _invoked(line: Line, number: int) -> Operation:
    value = line["value"]
    kind = _KINDS.get(line["f"]) or (Kind.DELETE if value is None else Kind.PUT)
    return Operation(
        number=number,
        caller=str(line["process"]),
        kind=kind,
        key=line["key"].encode(),
        invoked_at=line["time"] / 1e9,
        value=value.encode() if kind is Kind.PUT else None,
        condition=line.get("if_version"),
        expires="ttl_ms" in line,
    )


def _ended(operation: Operation, line: Line) -> Operation:
    if line["type"] == "info":
        return operation
    version = line.get("version")
    outcome = Outcome.OK
    if line["type"] == "fail":
        outcome = Outcome.REFUSED if line["error"] == CONDITION else Outcome.FAILED
    elif operation.kind is Kind.DELETE and version is None and not line["found"]:
        version = ABSENT_VERSION
    value = operation.value
    if operation.kind is Kind.GET and line["value"] is not None:
        value = line["value"].encode()
    ended_at = line["time"] / 1e9
    return replace(operation, outcome=outcome, version=version, value=value, completed_at=ended_at)


def _with_version(
    operation: Operation, versions: dict[tuple[bytes, bytes | None], int]
) -> Operation:
    done = operation.outcome is Outcome.OK and operation.kind is Kind.PUT
    if not done or operation.version is not None:
        return operation
    version = versions.get((operation.key, operation.value), _UNSEEN_VERSION)
    return replace(operation, version=version)
