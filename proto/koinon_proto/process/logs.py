"""Sets up logging: an event phrase, then ``key=value``, on stderr; or JSON lines.

Code logs with the standard library: ``log.info("node fenced node=%s epoch=%d", node_id, epoch)``.
The template itself says which values are fields, so one call serves both formats:

    2026-03-01T10:00:00.123Z INFO koinon_coordinator.leader.membership node fenced node=n1 epoch=3
    {"time": "...", "level": "INFO", "logger": "...", "event": "node fenced", "node": "n1", ...}

What is logged while a request is handled ends with its id, ``request_id=5f0c9a1e-2b call=1``. JSON
also says whose process it is.
"""

from __future__ import annotations

import json
import logging
import re
import textwrap
import time
from collections.abc import Mapping
from typing import Any, Literal

from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process.printable import printable, printable_lines, stream_of

LogFormat = Literal["text", "json"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FIELD = re.compile(r"\s*\b(\w+)=(%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_PLACEHOLDER = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_PLAIN = re.compile(r"[^\s\"=]+")
OWN_KEYS = frozenset(
    {
        *("time", "level", "logger", "event", "exception"),
        *("component", "component_id", "request_id", "call"),
    }
)
"""Names that fields of a call must not have; in JSON such a field gets a ``_`` behind its name."""


def configure_logging(
    log_format: LogFormat | str = "text",
    level: str = "INFO",
    *,
    component: str = "",
    component_id: str = "",
) -> None:
    """Send all logging of this process to stderr in ``log_format``, from ``level`` up. JSON records
    carry ``component`` and ``component_id`` where they are given.

    Raises:
        ConfigurationError: the format or the level is not one that exists.
    """
    if log_format not in ("text", "json"):
        raise ConfigurationError(reason=f"log-format {log_format!r}: must be text or json")
    if level.upper() not in _LEVELS:
        raise ConfigurationError(reason=f"log-level {level!r}: must be one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(stream_of(stderr=True))
    identity = {"component": component, "component_id": component_id} if component else {}
    handler.setFormatter(JsonFormatter(identity) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_few_of_callers)


class TextFormatter(logging.Formatter):
    """One line a record; a value with spaces, quotes or equal signs in it is quoted, and what is
    not printable escaped. The lines of a traceback follow, indented: none can pass for a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        event, fields = event_and_fields(record)
        fields = {**fields, **request_ids.log_fields()}
        pairs = "".join(f" {key}={_text(value)}" for key, value in fields.items())
        line = printable(f"{_time(record)} {record.levelname:<7} {record.name} {event}{pairs}")
        if record.exc_info:
            shown = printable_lines(self.formatException(record.exc_info))
            line += "\n" + textwrap.indent(shown, "  ", lambda _: True)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, whose process it is (``identity``), event, the
    fields, the request's id, and an exception's text.
    """

    def __init__(self, identity: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._identity = dict(identity or {})

    def format(self, record: logging.LogRecord) -> str:
        event, fields = event_and_fields(record)
        document: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            **self._identity,
            "event": event,
        }
        for key, value in fields.items():
            document[f"{key}_" if key in OWN_KEYS else key] = value
        document |= request_ids.log_fields()
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def add_flags(parser: Any) -> None:
    """Add the flags of a server's log to its parser."""
    parser.add_argument("--log-format", default="text", help="text or json (%(default)s)")
    parser.add_argument(
        "--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR (%(default)s)"
    )


def event_and_fields(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return the record's event phrase and its fields, in the template's order.

    A template whose placeholders are not all ``key=%x`` is an event as it stands.
    """
    args = record.args
    template = record.msg if isinstance(record.msg, str) else str(record.msg)
    if not isinstance(args, tuple) or not args:
        return record.getMessage(), {}
    names = _FIELD.findall(template)
    if len(names) != len(args) or len(_PLACEHOLDER.findall(template)) != len(args):
        return record.getMessage(), {}
    fields = {name: _value(spec, value) for (name, spec), value in zip(names, args, strict=True)}
    return _FIELD.sub("", template).replace("%%", "%").strip(), fields


class LinesPerSecond:
    """Bounds how often an event is logged, so that a burst is reported without filling the log."""

    def __init__(self, lines_max: int) -> None:
        self.unlogged = 0
        """The number of lines left out since the last one that was logged."""
        self._lines_max = lines_max
        self._second = 0.0
        self._lines = 0

    def may_log(self) -> bool:
        """Return whether one more line may be logged; if not, count it as left out."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._lines = now, 0
        if self._lines >= self._lines_max:
            self.unlogged += 1
            return False
        self._lines += 1
        return True

    def take_unlogged(self) -> int:
        """Return the number of lines left out since the last call."""
        unlogged, self.unlogged = self.unlogged, 0
        return unlogged


_OF_CALLERS = ("Invalid encoding", "ExecuteBatchError")
"""Beginnings of gRPC's lines about its callers: their metadata is no text, or they gave a call up
while its answer was being sent.
"""
_lines_of_callers = LinesPerSecond(1)


def _few_of_callers(record: logging.LogRecord) -> bool:
    """Limit gRPC's lines about errors that callers cause, and drop their tracebacks."""
    if not str(record.msg).startswith(_OF_CALLERS):
        return True
    record.exc_info = None
    return _lines_of_callers.may_log()


def _value(spec: str, value: Any) -> Any:
    if spec[-1] in "sdr":
        return value
    shown = spec % value
    return float(shown) if spec[-1] in "efg" else shown


def _text(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
