"""Sums up a failed Spark job in one sentence: by a worker's typed error, if Spark's long text
contains one.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

from koinon_proto.contract.errors import (
    ConfigurationError,
    InvalidArgumentError,
    KoinonError,
    UnknownKeyspaceError,
)

_OURS = re.compile(r"^(?:.*?: )?((?:koinon|koinon_proto)(?:\.\w+)*)\.(\w+Error): (.+)$", re.M)
_MALFORMED = (
    re.compile(r"\[MALFORMED_CSV_RECORD\] Malformed CSV record: (.*?)(?: SQLSTATE.*)?$", re.M),
    re.compile(r"\[MALFORMED_RECORD_IN_PARSING[.\w]*\] [\w ]+: (.*?)\.?$", re.M),
)
_KEYSPACE = re.compile(r"keyspace '([^']*)'")
_CONDITION = re.compile(r"^(?:.*?: )?(\[[A-Z_]+(?:\.[A-Z_]+)*\] .+)$", re.M)
_PYTHONS = re.compile(r"^(\w+Error: .+)$", re.M)
FLAGS = {
    "keyColumn": "--key",
    "keyEncoding": "--key-encoding",
    "valueColumn": "--value",
    "valueEncoding": "--encoding",
    "ttlColumn": "--ttl-column",
    "deleteColumn": "--delete-column",
    "orderBy": "--order-by",
    "badRecordsPath": "--bad-records",
    "maxBytesPerSecond": "--max-rate",
}
"""The command-line names of options of the Spark format."""
REASON_CHARS_MAX = 600
ROW_CHARS_MAX = 200


@dataclass(kw_only=True, eq=False)
class JobRefusedError(ConfigurationError):
    """The input or an option breaks a rule; no row of the job became readable."""


@dataclass(kw_only=True, eq=False)
class JobFailedError(KoinonError):
    """The Spark job failed; ``reason`` says why."""

    reason: str


def explained(error: BaseException) -> KoinonError:
    """Return the Koinon error that explains an exception of Spark's."""
    if isinstance(error, ConfigurationError):
        return JobRefusedError(reason=_as_flags(error.reason))
    if isinstance(error, KoinonError):
        return error
    text = str(error)
    if malformed := next(filter(None, (form.search(text) for form in _MALFORMED)), None):
        row = malformed[1][:ROW_CHARS_MAX]
        return JobRefusedError(
            reason=f"a malformed row: {row}; --bad-records DIR keeps such rows apart"
        )
    if ours := list(_OURS.finditer(text)):
        module, name, said = ours[0].groups()
        return _told(_class_of(module, name), said)
    condition = _CONDITION.search(text) or _PYTHONS.search(text)
    said = condition[1] if condition else (text.strip().splitlines() or [type(error).__name__])[0]
    return JobFailedError(reason=f"the job failed: {said[:REASON_CHARS_MAX]}")


def of_commit(error: KoinonError) -> KoinonError:
    """Return the error to report for a job whose commit ended with ``error``."""
    return _told(type(error), str(error))


def _told(kind: type[KoinonError] | None, said: str) -> KoinonError:
    if kind is UnknownKeyspaceError and (name := _KEYSPACE.search(said)):
        return UnknownKeyspaceError(keyspace=name[1])
    if kind is not None and issubclass(kind, InvalidArgumentError | ConfigurationError):
        return JobRefusedError(reason=_as_flags(said)[:REASON_CHARS_MAX])
    return JobFailedError(reason=f"the job failed: {said[:REASON_CHARS_MAX]}")


def _class_of(module: str, name: str) -> type[KoinonError] | None:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, KoinonError) else None


def _as_flags(text: str) -> str:
    """Return a text with the options of the Spark format replaced by their command-line names."""
    for option, flag in FLAGS.items():
        text = re.sub(rf"(?:\boption )?\b{option}\b", flag, text)
    return text
