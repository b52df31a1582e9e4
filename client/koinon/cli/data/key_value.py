"""put, get, delete, scan."""

from __future__ import annotations

import base64
import binascii
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import DONE, NOT_FOUND, Session, command, duration_ms
from koinon.cli.console.reply import Reply
from koinon.cli.console.units import INT64_MAX, UINT64_MAX
from koinon.cli.data.reading import open_whole, read_whole
from koinon.operate.json_form import IF_KNOWN, json_of
from koinon.operate.wording import count
from koinon.types import Entry
from koinon_proto.contract.errors import KoinonError
from koinon_proto.process.printable import (
    encodes,
    flush,
    goes_to_terminal,
    printable_bytes,
    write_bytes,
)

root = typer.Typer()
PANEL = "Data"

Key = Annotated[str, typer.Argument(help="The key, as text.")]
Hex = Annotated[bool, typer.Option("--hex", help="Key and value are given in hexadecimal.")]
Base64 = Annotated[bool, typer.Option("--base64", help="Key and value are given in base64.")]
IfVersion = Annotated[
    int | None,
    typer.Option(
        "--if-version",
        min=0,
        max=UINT64_MAX,
        help="Only if the record has this version (0: only if there is none).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The encoding of keys and values on the command line; text by default."""

    hexadecimal: Hex = False
    base_64: Base64 = False

    def decode(self, text: str, what: str) -> bytes:
        """Decode an argument; ``what`` names it in the error."""
        if self.hexadecimal and self.base_64:
            raise typer.BadParameter("--hex and --base64 exclude each other")
        try:
            if self.hexadecimal:
                if len("".join(text.split())) % 2:
                    raise ValueError("an odd number of hexadecimal digits")
                return bytes.fromhex(text)
            if self.base_64:
                return base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error) as error:
            raise typer.BadParameter(f"{what} {text!r}: {error}") from error
        return os.fsencode(text)


@dataclass(frozen=True, kw_only=True)
class PrefixEncoding(Encoding):
    """The form of --prefix on the command line."""

    hexadecimal: Annotated[bool, typer.Option("--hex", help="--prefix is hexadecimal.")] = False
    base_64: Annotated[bool, typer.Option("--base64", help="--prefix is base64.")] = False


@command(
    root,
    panel=PANEL,
    keyed=True,
    examples=[
        "put greeting hello",
        "put session:7 token --ttl 30m",
        "put photo --value-file cat.jpg",
        "put counter 1 --if-version 0     (only if it is new)",
    ],
)
def put(
    session: Session,
    key: Key,
    value: Annotated[str | None, typer.Argument(help="The value, as text.")] = None,
    *,
    value_file: Annotated[
        str | None,
        typer.Option(help="Read the value from this file (-: standard input), byte by byte."),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="Let it expire after 500ms, 30s, 5m, 2h, 1d.")
    ] = None,
    if_version: IfVersion = None,
    encoding: Encoding,
) -> Reply:
    """Write a record. When this returns, it is durable."""
    if (value is None) == (value_file is None):
        raise typer.BadParameter("give either a VALUE or --value-file")
    key_bytes = encoding.decode(key, "KEY")
    data = b"" if value is None else encoding.decode(value, "VALUE")
    ttl_ms = duration_ms(ttl) if ttl else None
    with ExitStack() as opened:
        source = opened.enter_context(open_whole(value_file)) if value_file is not None else None
        client = opened.enter_context(session.connect())
        if source is not None:
            limit = client.table().keyspaces.named(session.keyspace).max_value_bytes
            data = read_whole(source, limit, field="--value-file", what="a value")
        version = client.put(key_bytes, data, ttl_ms=ttl_ms, if_version=if_version)
    done = f"the put was acknowledged (version {version}), but its result"
    return Reply({"key": key_bytes, "version": version}, done=done)


@command(
    root,
    panel=PANEL,
    keyed=True,
    examples=["get greeting", "get photo --raw > cat.jpg"],
)
def get(
    session: Session,
    key: Key,
    *,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Exactly the value's bytes, without a line's end (not to a terminal)."
        ),
    ] = False,
    encoding: Encoding,
) -> Reply | int:
    """Read a record. Exit code 1 if there is none."""
    key_bytes = encoding.decode(key, "KEY")
    with session.connect() as client:
        entry = client.get_entry(key_bytes)
    if entry is None:
        return _not_found(session, key_bytes)
    if session.json:
        return Reply({"found": True, **json_of(_answer(entry))})
    if raw:
        _write_raw(entry.value)
    else:
        _print_value(entry.value, "--raw gives the exact bytes")
    return DONE


def _not_found(session: Session, key: bytes, done: str = "") -> Reply:
    if not session.json:
        output.problem(f"not found: {printable_bytes(key)}")
    return Reply({"key": key, "found": False}, code=NOT_FOUND, done=done)


def _write_raw(value: bytes) -> None:
    """Write the value's exact bytes; refuse a terminal, which might obey control sequences in a
    record.
    """
    if goes_to_terminal():
        _print_value(value, "a pipe or a file gets the exact bytes")
    else:
        write_bytes(value)


def _print_value(value: bytes, hint: str) -> None:
    """Print plain text as it is, with its lines; anything else escaped, with a hint."""
    shown = "\n".join(printable_bytes(line) for line in value.split(b"\n"))
    output.write_line(shown, flush=True)
    if shown.encode() != value or not encodes(shown):
        output.note(f"(not plain text, shown with escapes; {hint})")


@command(root, panel=PANEL, keyed=True, examples=["delete greeting"])
def delete(
    session: Session,
    key: Key,
    *,
    if_version: IfVersion = None,
    encoding: Encoding,
) -> Reply:
    """Delete a record. Exit code 1 if there was none."""
    key_bytes = encoding.decode(key, "KEY")
    with session.connect() as client:
        found = client.delete(key_bytes, if_version=if_version)
    done = "the record was deleted" if found else "there was no record to delete"
    if not found:
        return _not_found(session, key_bytes, f"{done}, but this result")
    return Reply({"key": key_bytes, "found": True}, done=f"{done}, but this result")


@command(
    root,
    panel=PANEL,
    keyed=True,
    examples=["scan --prefix session: --limit 10", "scan --json | jq .key"],
)
def scan(
    session: Session,
    *,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    start: Annotated[
        str, typer.Option(help="Only this key and greater ones; with --reverse, lesser ones.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, max=INT64_MAX, help="At most this many records.")
    ] = None,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="Inside each partition, the greatest key first.")
    ] = False,
    keys_only: Annotated[bool, typer.Option("--keys-only", help="Keys without values.")] = False,
    hexadecimal: Annotated[
        bool, typer.Option("--hex", help="--prefix and --start are hexadecimal.")
    ] = False,
    base_64: Annotated[bool, typer.Option("--base64", help="--prefix and --start are base64.")] = (
        False
    ),
) -> None:
    """List records: one per line, key, tab, value; with --json one JSON object per line.

    Records come by partition and then by key, not in one global order.
    """
    encoding = Encoding(hexadecimal=hexadecimal, base_64=base_64)
    prefix_bytes = encoding.decode(prefix, "--prefix")
    start_bytes = encoding.decode(start, "--start")
    shown = 0
    with session.connect() as client:
        entries = client.scan(
            prefix=prefix_bytes,
            start=start_bytes,
            limit=limit,
            reverse=reverse,
            keys_only=keys_only,
        )
        try:
            for entry in entries:
                shown += 1
                _print_entry(entry, keys_only=keys_only, as_json=session.json)
        except KoinonError:
            flush()
            output.note(f"the listing is incomplete: it breaks off after {count(shown, 'record')}")
            raise
    if not session.json and goes_to_terminal(stderr=True):
        output.note(count(shown, "record"))


@dataclass(frozen=True, kw_only=True)
class EntryAnswer:
    """A record; ``value`` is left out of a listing of keys."""

    key: bytes
    value: bytes | None = field(metadata=IF_KNOWN)
    version: int
    expires_at_ms: int | None


def _answer(entry: Entry, *, keys_only: bool = False) -> EntryAnswer:
    return EntryAnswer(
        key=entry.key,
        value=None if keys_only else entry.value,
        version=entry.version,
        expires_at_ms=entry.expires_at_ms,
    )


def _print_entry(entry: Entry, *, keys_only: bool, as_json: bool) -> None:
    if as_json:
        output.write_line(output.json_text(json_of(_answer(entry, keys_only=keys_only))))
        return
    value = "" if keys_only else f"\t{printable_bytes(entry.value)}"
    output.write_line(f"{printable_bytes(entry.key)}{value}")
