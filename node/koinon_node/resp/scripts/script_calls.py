"""Runs a script on the records of its keys, as one step of an atomic batch.

``redis.call`` executes commands of the table of commands on copies of the records, each command on
the result of the ones before. The final copies are the changes. Unlike in Redis, a script that
fails changes nothing, whatever commands it has called before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import sha1

import hiredis

from koinon_node.core.formats.records import Record, encode_record
from koinon_node.core.writes.atomic_batch import Joint, record_of
from koinon_node.core.writes.updates import Change, Decided, Result
from koinon_node.resp import wire
from koinon_node.resp.commands.spec import find
from koinon_node.resp.error_replies import RefusedError, guest
from koinon_node.resp.outcomes import Jointly, Outcome, Read, Row, Write, Written
from koinon_node.resp.scripts.compiler import Script
from koinon_node.resp.scripts.values import (
    Builtin,
    Library,
    LuaError,
    Table,
    Value,
    bytes_of,
    number_of,
    type_of,
)
from koinon_node.resp.session import Session
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import MAX_BATCH_BYTES

CALLS_MAX = 500
_SPARE_BYTES = 64 * 1024
"""The bytes that a script may write beyond its arguments and existing records."""
_REPLY_DEPTH_MAX, _REPLY_PARTS_MAX = 8, 10_000


class ScriptRun(Joint):
    """One execution of a script. ``keys`` are all keys that it may access; the result is its
    reply.
    """

    __slots__ = (
        *("_arguments", "_bytes_left", "_calls", "_keys", "_now_ms", "_records", "_script"),
        "_session",
    )

    def __init__(
        self, session: Session, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes]
    ) -> None:
        self._session = session
        self._script = script
        self._keys = keys
        self._arguments = arguments
        self._records: dict[bytes, Record | None] = {}  # by key, changed by the calls so far
        self._now_ms = 0
        self._calls = 0
        self._bytes_left = MAX_BATCH_BYTES  # budget of record bytes that the calls read and write

    @property
    def parts(self) -> int:
        return len(self._keys) - 1

    @property
    def size(self) -> int:
        return sum(map(len, self._arguments)) + _SPARE_BYTES

    def decide_all(
        self, records: Sequence[Record | None], now_ms: int
    ) -> tuple[Result, Sequence[tuple[int, Decided]]]:
        before = dict(zip(self._keys, records, strict=True))
        self._records, self._now_ms = dict(before), now_ms
        self._calls, self._bytes_left = 0, MAX_BATCH_BYTES
        reply = self.reply()
        changed = [
            (self._keys.index(key), record)
            for key, record in self._records.items()
            if record is not before[key]
        ]
        there = sum(len(record.value) for record in before.values() if record is not None)
        if sum(len(r.value) for _, r in changed if r is not None) > there + self.size:
            raise RefusedError(
                f"ERR a script writes {self.size} bytes at most beyond existing records"
            )
        return reply, [(at, _change(before[self._keys[at]], record)) for at, record in changed]

    def reply(self) -> bytes:
        """Run the script; return its reply.

        Raises:
            RefusedError: the script failed.
        """
        try:
            return _Encoder().encoded(self._script.run(self._names()))
        except LuaError as error:
            value = error.value
            if isinstance(value, Table):
                value = value.get(b"err")
            raise RefusedError(_with_a_kind(bytes_of(value).decode("utf-8", "replace"))) from None

    def _names(self) -> dict[str, Value]:
        return {
            **_BUILTINS,
            "KEYS": Table.of(list(self._keys)),
            "ARGV": Table.of(list(self._arguments)),
            "redis": Table({**_REDIS, b"call": self._call, b"pcall": self._pcall}),
        }

    # --- calls -----------------------------------------------------------------------------

    def _call(self, arguments: list[Value]) -> Value:
        reply = self._pcall(arguments)
        if isinstance(reply, Table) and b"err" in reply:
            raise LuaError(reply)
        return reply

    def _pcall(self, arguments: list[Value]) -> Value:
        self._calls += 1
        if self._calls > CALLS_MAX:
            raise LuaError(b"a script calls %d commands at most" % CALLS_MAX)
        words: list[bytes] = []
        for argument in arguments:
            if not isinstance(argument, bytes | float) or isinstance(argument, bool):
                return _failed("ERR Lua redis lib command arguments must be strings or integers")
            words.append(bytes_of(argument, digits=17))
        try:
            reply = self._command(words)
        except KoinonError as error:
            reply = guest(error, "", "")
        reader = hiredis.Reader()
        reader.feed(reply)
        return _decoded(reader.gets(), is_status=reply[:1] == b"+")

    def _command(self, words: list[bytes]) -> bytes:
        """Execute a command on the present copies of the records; return its reply.

        Raises:
            KoinonError: the command is refused.
        """
        spec = find(words[0]) if words else None
        if spec is None:
            raise RefusedError("ERR Unknown Redis command called from script")
        if not spec.takes(len(words)):
            raise RefusedError("ERR Wrong number of args calling Redis command from script")
        if spec.is_own or "noscript" in spec.flags or spec.counts_keys:
            raise RefusedError("ERR This Redis command is not allowed from script")
        if any(key not in self._records for key in spec.keys_in(words)):
            raise RefusedError("ERR Script attempted to access a key that is not among its KEYS")
        return self._carried_out(spec.handler(self._session, words))

    def _carried_out(self, outcome: Outcome) -> bytes:
        if isinstance(outcome, bytes):
            return outcome
        if isinstance(outcome, Read):
            records = [self._records[key] for key in outcome.keys]
            self._spend(records)
            found = [_stored(record) for record in records]
            if outcome.work is not None:
                self._spend_bytes(outcome.work(found))
            return outcome.reply(found)
        if isinstance(outcome, Write):
            return outcome.reply([self._written(row) for row in outcome.rows])
        if isinstance(outcome, Jointly):
            records = [self._records[key] for key in outcome.keys]
            self._spend(records)
            result, changes = outcome.joint.decide_all(records, self._now_ms)
            for at, change in changes:
                self._store_change(outcome.keys[at], change)
            return outcome.reply(result)
        if hasattr(outcome, "close"):
            outcome.close()  # a coroutine
        raise RefusedError("ERR This Redis command is not allowed from script")

    def _written(self, row: Row) -> Written:
        record = self._records[row.key]
        self._spend([record])
        decided = row.step.decide(record, self._now_ms)
        self._store_change(row.key, decided)
        return row.written(decided.result)

    def _spend(self, records: Sequence[Record | None]) -> None:
        """Count the bytes of the records that a call handles: a short call may copy a megabyte."""
        self._spend_bytes(sum(len(record.value) for record in records if record is not None))

    def _spend_bytes(self, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise RefusedError(f"ERR a script handles {MAX_BATCH_BYTES} bytes of records at most")

    def _store_change(self, key: bytes, decided: Decided) -> None:
        if decided.change is not Change.LEAVE:
            self._records[key] = record_of(decided)


def _stored(record: Record | None) -> bytes | None:
    if record is None:
        return None
    return encode_record(record.sequence, record.value, record.expires_at_ms)


def _change(before: Record | None, after: Record | None) -> Decided:
    if after is None:
        return Decided(Change.LEAVE if before is None else Change.DELETE, None)
    return Decided(Change.PUT, None, after.value, after.expires_at_ms)


# --- replies ------------------------------------------------------------------------------------


def _failed(text: str) -> Table:
    return Table({b"err": text.encode()})


def _with_a_kind(text: str) -> str:
    first = text.partition(" ")[0]
    return text if first.isupper() else f"ERR {text}"


def _decoded(reply: object, *, is_status: bool = False) -> Value:
    """Convert a command's reply to a Lua value; nil becomes false."""
    if isinstance(reply, hiredis.ReplyError):
        return _failed(str(reply))
    if isinstance(reply, list):
        return Table.of([_decoded(part) for part in reply])
    if isinstance(reply, bytes):
        return Table({b"ok": reply}) if is_status else reply
    return float(reply) if isinstance(reply, int) else False


class _Encoder:
    """Encodes a script's value as a reply. Its bounds end cyclic tables."""

    def __init__(self) -> None:
        self._parts_left = _REPLY_PARTS_MAX
        self._bytes_left = MAX_BATCH_BYTES

    def encoded(self, value: Value, depth: int = 0) -> bytes:
        """Return the reply. Numbers lose their fraction; an array ends at its first nil.

        Raises:
            LuaError: the reply is too large.
        """
        self._parts_left -= 1
        self._bytes_left -= len(value) if isinstance(value, bytes) else 0
        if depth > _REPLY_DEPTH_MAX or min(self._parts_left, self._bytes_left) < 0:
            raise LuaError(b"the reply is too large, or nested too deep")
        if isinstance(value, bytes):
            return wire.bulk(value)
        if value is True:
            return wire.ONE
        if isinstance(value, float) and math.isfinite(value) and abs(value) < 2**63:
            return wire.integer(int(value))
        if not isinstance(value, Table):
            return wire.NIL
        if b"err" in value:
            return wire.error(bytes_of(value[b"err"]).decode("utf-8", "replace"))
        if b"ok" in value:
            return wire.simple(bytes_of(value[b"ok"]).decode("utf-8", "replace"))
        return wire.array([self.encoded(part, depth + 1) for part in value.array()])


# --- builtins
# --------------------------------------------------------------------------------------


def _at(arguments: list[Value], place: int) -> Value:
    return arguments[place] if place < len(arguments) else None


def _number(arguments: list[Value], place: int = 0) -> float:
    number = number_of(_at(arguments, place))
    if number is None:
        raise LuaError(b"bad argument #%d: number expected" % (place + 1))
    return number


def _string(arguments: list[Value]) -> bytes:
    value = _at(arguments, 0)
    if not isinstance(value, bytes | float):
        raise LuaError(f"bad argument #1: string expected, got {type_of(value)}".encode())
    return bytes_of(value)


def _rows(arguments: list[Value], *, is_array: bool) -> Table:
    table = _at(arguments, 0)
    if not isinstance(table, Table):
        raise LuaError(f"bad argument #1: table expected, got {type_of(table)}".encode())
    rows = list(enumerate(table.array(), 1)) if is_array else list(table.items())
    pairs = [(float(k) if isinstance(k, int) else k, v) for k, v in rows]
    return Table.of([Table.of(list(pair)) for pair in pairs])


def _tonumber(arguments: list[Value]) -> Value:
    if len(arguments) > 1 and arguments[1] != 10.0:
        raise LuaError(b"tonumber takes no other base than 10 here")
    return number_of(_at(arguments, 0))


def _error(arguments: list[Value]) -> Value:
    raise LuaError(_at(arguments, 0))


def _insert(arguments: list[Value]) -> Value:
    table = _at(arguments, 0)
    if not isinstance(table, Table) or isinstance(table, Library) or len(arguments) != 2:
        raise LuaError(b"table.insert takes a table and a value here")
    table[float(len(table.array()) + 1)] = arguments[1]
    return None


def _sub(arguments: list[Value]) -> Value:
    text = _string(arguments)
    first = int(_number(arguments, 1))
    last = int(_number(arguments, 2)) if len(arguments) > 2 else -1
    first = max(1, len(text) + first + 1 if first < 0 else first)
    last = len(text) + last + 1 if last < 0 else last
    return text[first - 1 : max(last, 0)]


def _numeric(function: Callable[..., float]) -> Builtin:
    return lambda arguments: float(
        function(*(_number(arguments, at) for at in range(len(arguments))))
    )


_BUILTINS: dict[str, Value] = {
    "tonumber": _tonumber,
    "tostring": lambda arguments: bytes_of(_at(arguments, 0)),
    "type": lambda arguments: type_of(_at(arguments, 0)).encode(),
    "ipairs": lambda arguments: _rows(arguments, is_array=True),
    "pairs": lambda arguments: _rows(arguments, is_array=False),
    "error": _error,
    "math": Library(
        {
            b"floor": _numeric(math.floor),
            b"ceil": _numeric(math.ceil),
            b"abs": _numeric(abs),
            b"max": _numeric(lambda *numbers: max(numbers)),
            b"min": _numeric(lambda *numbers: min(numbers)),
        }
    ),
    "string": Library(
        {
            b"len": lambda arguments: float(len(_string(arguments))),
            b"lower": lambda arguments: _string(arguments).lower(),
            b"upper": lambda arguments: _string(arguments).upper(),
            b"sub": _sub,
        }
    ),
    "table": Library({b"insert": _insert}),
}
_REDIS: dict[Value, Value] = {
    b"error_reply": lambda arguments: _failed(_with_a_kind(_string(arguments).decode("latin-1"))),
    b"status_reply": lambda arguments: Table({b"ok": _string(arguments)}),
    b"sha1hex": lambda arguments: (
        sha1(_string(arguments), usedforsecurity=False).hexdigest().encode()
    ),
    b"log": lambda _: None,
}
for _level, _name in enumerate((b"LOG_DEBUG", b"LOG_VERBOSE", b"LOG_NOTICE", b"LOG_WARNING")):
    _REDIS[_name] = float(_level)
