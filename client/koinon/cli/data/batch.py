"""batch: carries out operations of a file of JSON lines on keys with the same routing bytes, all or
none.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from koinon.cli.console import output
from koinon.cli.console.command import Session, command
from koinon.cli.console.reply import Reply
from koinon.cli.data.reading import STANDARD_INPUT, open_whole, read_whole
from koinon.operate.wording import count, listed
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_ATOMIC_BYTES
from koinon_proto.partitioner import partitioner_of
from koinon_proto.process.printable import printable_bytes

if TYPE_CHECKING:
    from koinon.driver.batch import Batch
    from koinon_proto.contract.keyspaces import Keyspace

root = typer.Typer()
_FIELDS = {
    "check": {"version"},
    "put": {"value", "ttl_ms"},
    "delete": set[str](),
    "increment": {"by", "ttl_ms"},
}
"""The operations, and the fields that a line may have beside the key."""
FILE_BYTES_MAX = 8 * MAX_ATOMIC_BYTES
"""JSON needs six characters at most for a byte of a key or a value, ``\u0000``."""


@command(
    root,
    panel="Data",
    keyed=True,
    examples=[
        "batch order.jsonl",
        'batch - <<< \'{"increment": "visits"}\'',
        "batch order.jsonl --dry-run",
    ],
)
def batch(
    session: Session,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSON, one operation a line (-: standard input).")
    ],
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the file, and that its keys lie together; no more."),
    ] = False,
) -> Reply:
    """Carry out operations on keys that lie together in one step: all of them, or none.

    A line is one of {"check": KEY, "version": N} (0: there is no record), {"put": KEY, "value":
    VALUE, "ttl_ms": N}, {"delete": KEY}, {"increment": KEY, "by": N, "ttl_ms": N}; ttl_ms and by
    may be left out. KEY and VALUE are text, or {"base64": "…"}. All keys must have the same routing
    bytes ('koinon where KEY' shows them). Exit code 1 if a check does not hold; then, as after any
    other refusal, nothing was written.
    """
    source = STANDARD_INPUT if file == "-" else file
    lines = _lines(file)
    with session.connect() as client:
        built = _built(client.batch, lines, source)
        if dry_run:
            return _checked(built, client.table().keyspaces.named(session.keyspace))
        result = built.commit()
    done = f"the batch was acknowledged (version {result.version}), but its result"
    if not session.json:
        with output.telling(done):
            for operation, outcome in zip(built.operations, result.results, strict=True):
                if operation.name == "increment":
                    output.write_line(f"{printable_bytes(operation.key)}\t{outcome}")
    return Reply({"version": result.version, "results": result.results}, done=done)


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers."""
    with open_whole(file) as opened:
        data = read_whole(opened, FILE_BYTES_MAX, field="FILE", what="the text of a batch")
    return ((n, line) for n, line in enumerate(data.splitlines(), 1) if line.strip())


def _built(
    begin: Callable[[bytes], Batch], lines: Iterator[tuple[int, bytes]], source: str
) -> Batch:
    """Build the batch of the lines; the first line's key routes it.

    Raises:
        InvalidArgumentError: a line is no operation or cannot join the batch; the error names the
            line.
    """
    built: Batch | None = None
    for number, line in lines:
        try:
            name, key, more = _parsed(line)
            built = built or begin(key)
            getattr(built, name)(key, **more)
        except (InvalidArgumentError, TypeError) as error:
            if not isinstance(error, InvalidArgumentError):
                error = InvalidArgumentError(field="operation", reason=str(error))
            field = f"{source}, line {number}: {error.field}"
            raise replace(error, field=field) from None
    if built is None:
        raise InvalidArgumentError(field=source, reason="has no operations")
    return built


def _parsed(line: bytes) -> tuple[str, bytes, dict[str, Any]]:
    """Parse a line; return the operation's name, its key, and its further arguments."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field="operation", reason=f"is no JSON: {error}") from None
    names = sorted(_FIELDS.keys() & fields.keys()) if isinstance(fields, dict) else []
    if len(names) != 1:
        _refuse("operation", f"must be an object with one of {', '.join(_FIELDS)}")
    name = names[0]
    key = _bytes_of(name, fields.pop(name))
    if unknown := sorted(fields.keys() - _FIELDS[name]):
        _refuse(unknown[0], f"is unknown; {name} takes {_listed(_FIELDS[name])}")
    for required in {"version", "value"} & _FIELDS[name]:
        if required not in fields:
            _refuse(required, f"is missing: {name} needs it")
    if "value" in fields:
        fields["value"] = _bytes_of("value", fields["value"])
    return name, key, fields


def _bytes_of(field: str, given: Any) -> bytes:
    """Return the bytes of a text or of ``{"base64": …}``, the form that ``json_bytes`` writes."""
    if isinstance(given, dict) and given.keys() == {"base64"}:
        try:
            return base64.b64decode(given["base64"], validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            _refuse(field, f"is no base64: {error}")
    if not isinstance(given, str):
        _refuse(field, 'must be text or {"base64": "…"}')
    try:
        return given.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, "\ud800"
        _refuse(field, 'is no text; {"base64": "…"} takes any bytes')


def _listed(names: set[str]) -> str:
    return listed(sorted(names)) or "nothing but a key"


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidArgumentError(field=field, reason=reason)


def _checked(built: Batch, keyspace: Keyspace) -> Reply:
    known = partitioner_of(keyspace)
    shared = known.routing_bytes(built.operations[0].key)
    partition_id = known.partition_of_routing(shared)
    return Reply(
        {"operations": len(built), "routing_bytes": shared, "partition_id": partition_id},
        f"{count(len(built), 'operation')} on keys that are routed by "
        f"{printable_bytes(shared)}, in partition {partition_id}: nothing was written.",
    )
