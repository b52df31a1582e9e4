"""watch: prints changes as they are written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.command import DONE, USAGE, RefusedError, Session, command
from koinon.cli.data.key_value import PANEL, PrefixEncoding
from koinon.core.feeds import Change, ChangeBatch, FeedPositions
from koinon.core.group_options import Start
from koinon.driver.group import GroupBatch
from koinon.operate.json_form import json_of
from koinon_proto.contract.errors import InvalidArgumentError, StaleGenerationError
from koinon_proto.process.printable import flush, printable_bytes

root = typer.Typer()


@command(
    root,
    panel=PANEL,
    keyed=True,
    examples=[
        "watch --prefix session:",
        "watch --since start --json | jq .key",
        "watch --state orders.pos --json     (continues where it stopped)",
        "watch --group billing --json        (shares the partitions with others of the group)",
    ],
)
def watch(
    session: Session,
    *,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    since: Annotated[
        str,
        typer.Option(
            help="Where to begin: 'now'; 'start' (first every record that there is, then changes); "
            "or positions, the text that a --state file contains."
        ),
    ] = "now",
    state: Annotated[
        Path | None,
        typer.Option(
            help="A file for positions, written after each batch. If it exists, the feed "
            "continues from there, and --since is ignored. Give the same --prefix each time."
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            help="Take part in this consumer group: print the changes of this consumer's share of "
            "the partitions, and commit each batch once it is printed. The cluster keeps the "
            "group's position; --since says where a new group begins."
        ),
    ] = "",
    keys_only: Annotated[
        bool, typer.Option("--keys-only", help="Print keys without values.")
    ] = False,
    encoding: PrefixEncoding,
) -> int:
    """Print each change as it is written, until Ctrl-C: put or delete, key, and value; with --json
    one JSON object per line.

    A change is printed once it is durable on every in-sync replica. If a key is written faster than
    changes are printed, older versions of it may be left out.
    """
    if group:
        if prefix or state is not None or since not in ("now", "start"):
            raise RefusedError(
                "--group goes with neither --prefix nor --state, and only with --since now or "
                "start: the cluster keeps the group's position, in all of the keyspace.",
                "Leave them out.",
                code=USAGE,
            )
        start: Start = "now" if since == "now" else "beginning"
        return _watch_group(session, group, start, keys_only=keys_only)
    prefix_bytes = encoding.decode(prefix, "--prefix")
    begin = _since(since, state)
    known = begin != "now"
    with session.connect() as client, contextlib.suppress(KeyboardInterrupt):
        feed: Any = client.changes(prefix=prefix_bytes, since=begin, keys_only=keys_only)
        with contextlib.closing(feed):
            for batch in feed:
                _print(batch, keys_only=keys_only, as_json=session.json)
                # With since="now", the positions lack partitions until the feed has caught up.
                known = known or batch.caught_up
                if state is not None and known:
                    _save(state, batch.positions)
    return DONE


def _watch_group(session: Session, name: str, start: Start, *, keys_only: bool) -> int:
    """Print and commit the changes of this consumer's partitions; say on stderr how many it has."""

    def say(_: object) -> None:
        owned = len(group.partitions)
        output.note(f"group {name}: this consumer has {owned} partitions now")

    with (
        session.connect() as client,
        contextlib.suppress(KeyboardInterrupt),
        client.group(name, start=start, on_granted=say, on_revoked=say) as group,
    ):
        for batch in group:
            _print(batch, keys_only=keys_only, as_json=session.json)
            with contextlib.suppress(StaleGenerationError):  # another consumer prints it again
                batch.commit()
    return DONE


def _since(since: str, state: Path | None) -> Any:
    """Return the ``since`` argument of ``Client.changes``: from the state file if it exists, else
    from the option.

    Raises:
        RefusedError: the file has no positions.
        InvalidArgumentError: ``since`` is no text of positions.
    """
    if state is not None:
        with contextlib.suppress(FileNotFoundError):
            text = state.read_text(encoding="ascii", errors="replace")
            try:
                return FeedPositions.parse(text)
            except InvalidArgumentError as error:
                raise RefusedError(
                    f"--state {state}: {error.reason}",
                    "Name another file, or delete this one to begin anew.",
                    code=USAGE,
                ) from None
    if since == "start":
        return None
    return since if since == "now" else FeedPositions.parse(since)  # the error names --since


def _save(state: Path, positions: FeedPositions) -> None:
    """Replace the file atomically: after a crash it has the old positions or the new ones."""
    new = state.with_name(f"{state.name}.new")
    new.write_text(f"{positions}\n", encoding="ascii")
    new.replace(state)


def _print(batch: ChangeBatch | GroupBatch, *, keys_only: bool, as_json: bool) -> None:
    for change in batch:
        if as_json:
            output.write_line(output.json_text(_answer(change, keys_only=keys_only)))
        else:
            output.write_line(_line(change, keys_only=keys_only))
    if len(batch):
        flush()


def _answer(change: Change, *, keys_only: bool) -> dict[str, Any]:
    answer = {"change": "put", **json_of(change._asdict())}
    if change.value is None:
        answer["change"] = "delete"
    if change.value is None or keys_only:
        del answer["value"]
    return answer


def _line(change: Change, *, keys_only: bool) -> str:
    key = printable_bytes(change.key)
    if change.value is None:
        return f"delete\t{key}"
    return f"put\t{key}" if keys_only else f"put\t{key}\t{printable_bytes(change.value)}"
