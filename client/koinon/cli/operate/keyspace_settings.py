"""admin keyspaces: lists, creates, alters and drops keyspaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from koinon.cli.console.command import Session, Yes, command, default_command, duration_ms
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Column, Reply, Table
from koinon.cli.console.units import INT64_MAX, UINT32_MAX, bytes_per_second, rows_per_second
from koinon.core.quantities import duration_of, parse_size
from koinon.operate.changes import KeyspaceMade
from koinon.operate.cluster_status import table_of
from koinon.operate.judge.answers import KeyspaceAnswer, KeyspaceChanged, keyspace_answer
from koinon.operate.wording import bytes_text, count
from koinon_proto.contract.errors import InvalidArgumentError

app = typer.Typer(cls=Group, help="Named rooms of keys, with partitions and rules of their own.")

Name = Annotated[str, typer.Argument(metavar="NAME")]
Partitions = Annotated[
    int,
    typer.Option("--partitions", min=0, max=UINT32_MAX, help="How many, for ever. By default 64."),
]
PartitionerName = Annotated[
    str,
    typer.Option(
        "--partitioner",
        help="How keys are placed, for ever: murmur2, md5 or crc16. By default as in 'default'.",
    ),
]
RouterName = Annotated[
    str,
    typer.Option(
        "--router", help="Which bytes of a key are hashed: whole, until:2f, tag, first:8, h3:5."
    ),
]
Factor = Annotated[
    int,
    typer.Option(
        "--replication-factor", min=0, max=UINT32_MAX, help="Copies. By default as in 'default'."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The options for settings that may change while a keyspace serves."""

    min_in_sync: Annotated[
        int | None,
        typer.Option(
            "--min-in-sync",
            min=1,
            max=UINT32_MAX,
            help="Copies that a write needs. By default half.",
        ),
    ] = None
    max_value: Annotated[
        str, typer.Option("--max-value", metavar="SIZE", help="Of a value, such as 64KiB or 1MiB.")
    ] = ""
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool", help="On the nodes of this pool (koinon node --pool); '' is one, too."
        ),
    ] = None
    default_ttl: Annotated[
        str | None,
        typer.Option(
            "--default-ttl",
            metavar="TTL",
            help="How long records live that are written without --ttl: 30m, 2h, 1d; none: for "
            "ever.",
        ),
    ] = None
    max_ttl: Annotated[
        str | None,
        typer.Option(
            "--max-ttl",
            metavar="TTL",
            help="How long records may live: 30m, 2h, 1d; none: for ever. A write is refused that "
            "names more.",
        ),
    ] = None
    max_rows_per_s: Annotated[
        str | None,
        typer.Option(
            "--max-rows-per-s",
            metavar="N",
            help="Rows that all clients together may read and write in a second; none: no limit.",
        ),
    ] = None
    max_bytes_per_s: Annotated[
        str | None,
        typer.Option(
            "--max-bytes-per-s",
            metavar="SIZE",
            help="The same for bytes of keys and values, such as 10MB; none: no limit.",
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """Return the options' values by the fields of a request; None: the option is not given."""
        rows, size = self.max_rows_per_s, self.max_bytes_per_s
        return {
            "min_in_sync": self.min_in_sync,
            "max_value_bytes": _bytes(self.max_value),
            "pool": self.pool,
            "default_ttl_ms": _ttl_ms(self.default_ttl),
            "max_ttl_ms": _ttl_ms(self.max_ttl),
            "max_rows_per_s": rows_per_second(rows) if rows else None,
            "max_bytes_per_s": bytes_per_second(size) if size else None,
        }


def _ttl_text(keyspace: KeyspaceAnswer) -> str:
    """Return the times to live as text: ``1d, at most 30d``."""
    default, most = keyspace.default_ttl_ms, keyspace.max_ttl_ms
    parts = (default and duration_of(default), most and f"at most {duration_of(most)}")
    return ", ".join(part for part in parts if part)


def _quota_text(keyspace: KeyspaceAnswer) -> str:
    """Return the limits as text: ``5,000 rows/s, 10.0 MB/s``."""
    rows, size = keyspace.max_rows_per_s, keyspace.max_bytes_per_s
    parts = (rows and f"{rows:,} rows/s", size and f"{bytes_text(size)}/s")
    return ", ".join(part for part in parts if part)


def _ids(keyspace: KeyspaceAnswer) -> str:
    return f"{keyspace.base}-{keyspace.base + keyspace.partition_count - 1}"


KEYSPACES = (
    Column("KEYSPACE", "name"),
    Column(">ID", lambda keyspace: str(keyspace.id)),
    Column("PARTITIONS", _ids),
    Column(">ONLINE", lambda keyspace: f"{keyspace.online:,}/{keyspace.partition_count:,}"),
    Column("KEYS BY", "partitioner"),
    Column(">COPIES", "replication_factor"),
    Column(">NEEDED", "min_in_sync", narrow=1),
    Column("POOL", "pool"),
    Column("TTL", _ttl_text),
    Column("LIMIT", _quota_text),
    Column("NOTE", lambda keyspace: "dropped, being erased" if keyspace.dropping else ""),
)


@default_command(app)
def keyspaces(session: Session) -> Reply:
    """List the keyspaces with their partitions and how many of these are online."""
    with session.admin() as admin:
        table = table_of(admin.status())
    found = [keyspace_answer(keyspace, table) for keyspace in table.keyspaces.all]
    return Reply({"keyspaces": found}, [Table(KEYSPACES, found)])


@command(app, examples=["admin keyspaces describe carts"])
def describe(session: Session, name: Name) -> Reply:
    """Show one keyspace with all of its settings."""
    with session.admin() as admin:
        table = table_of(admin.status())
    keyspace = table.keyspaces.named(name)
    found, hashed = keyspace_answer(keyspace, table), keyspace.partitioner_fingerprint.hex()
    shown = {
        "keyspace": f"{found.name}, id {found.id}",
        "partitions": f"{_ids(found)}, {found.online:,} of {found.partition_count:,} online",
        "keys by": f"{found.partitioner}{f', fingerprint {hashed}' if hashed else ''}",
        "copies": f"{found.replication_factor}, {found.min_in_sync} of them needed to write",
        "value": f"{count(found.max_value_bytes, 'byte')} at most",
        "pool": found.pool or "nodes without a pool",
        "ttl": _ttl_text(found) or "none: for ever, if a write names none",
        "limit": _quota_text(found) or "none",
    }
    lines = [f"{label:<10}  {text}" for label, text in shown.items()]
    return Reply(KeyspaceChanged(keyspace=found), lines)


@command(
    app,
    examples=[
        "admin keyspaces create carts --router until:2f",
        "admin keyspaces create vip --partitions 16 --pool vip",
    ],
)
def create(
    session: Session,
    name: Name,
    *,
    partitions: Partitions = 0,
    partitioner: PartitionerName = "",
    router: RouterName = "",
    replication_factor: Factor = 0,
    rules: Rules,
) -> Reply:
    """Create a keyspace. It serves within a second; 'koinon admin keyspaces' shows it.

    The number of its partitions, the partitioner and the router never change.
    """
    with session.admin() as admin:
        default = table_of(admin.status()).keyspaces.default
        hash_name = partitioner or default.partitioner.partition("(")[0]
        made = admin.keyspaces.create(
            name,
            partition_count=partitions,
            partitioner=f"{hash_name}({router})" if router else partitioner,
            replication_factor=replication_factor,
            **{name: value for name, value in rules.changes().items() if value},
        )
    keyspace = made.keyspace
    return _changed(
        made,
        f"Keyspace {keyspace.name} is there: {count(keyspace.partition_count, 'partition')}"
        f", {count(keyspace.replication_factor, 'copy')} each, keys by {keyspace.partitioner}.",
    )


@command(
    app,
    examples=[
        "admin keyspaces alter vip --pool vip",
        "admin keyspaces alter carts --default-ttl 1d --max-ttl 30d",
        "admin keyspaces alter public --max-rows-per-s 5000 --max-bytes-per-s 10MB",
    ],
)
def alter(session: Session, name: Name, *, rules: Rules) -> Reply:
    """Alter a keyspace while it serves.

    'koinon admin set-replication-factor' changes the number of copies; after a change of the pool
    'koinon admin rebalance' moves the copies there. Times to live apply to later writes. Limits a
    second apply at once.
    """
    changes = rules.changes()
    if all(value is None for value in changes.values()):
        raise InvalidArgumentError(
            field="keyspace",
            reason="nothing is to be altered: --min-in-sync, --max-value, --pool, --default-ttl, "
            "--max-ttl, --max-rows-per-s, --max-bytes-per-s",
        )
    with session.admin() as admin:
        made = admin.keyspaces.alter(name, **changes)
    return _changed(made, f"Keyspace {made.keyspace.name} is altered.")


@command(app, examples=["admin keyspaces drop carts"])
def drop(session: Session, name: Name, *, yes: Yes = False) -> Reply:
    """Drop a keyspace and all of its records, for good.

    It is gone at once; its disk space is free once every node has erased its copies.
    """
    with session.admin() as admin:
        keyspace = table_of(admin.status()).keyspaces.named(name)
        session.ask(f"Drop keyspace {keyspace.name} and all of its records?", yes=yes)
        made = admin.keyspaces.drop(name, keyspace.keyspace_id)
    return _changed(made, f"Keyspace {made.keyspace.name} is dropped; nodes erase its copies.")


def _bytes(text: str) -> int | None:
    """Parse a size in bytes; None if there is no text."""
    if not text:
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise InvalidArgumentError(field="--max-value", reason=str(error)) from None
    except OverflowError:
        size = INT64_MAX
    if size > UINT32_MAX:
        raise InvalidArgumentError(
            field="--max-value", reason=f"{text} is more than a value may ever have"
        )
    return size


def _ttl_ms(text: str | None) -> int | None:
    """Parse a time to live in milliseconds; "none" is 0, and no text is None."""
    if text is None:
        return None
    return 0 if text.strip().lower() == "none" else duration_ms(text)


def _changed(made: KeyspaceMade, message: str) -> Reply:
    answer = KeyspaceChanged(
        keyspace=keyspace_answer(made.keyspace), nodes_behind=list(made.behind.node_ids)
    )
    return Reply(answer, f"{message} ({made.behind})" if made.behind.node_ids else message)
