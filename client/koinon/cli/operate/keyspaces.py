"""admin keyspaces: named rooms of keys, with partitions and rules of their own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.help import Group
from koinon.cli.console.session import Session, command, default_command, duration_ms
from koinon.cli.console.units import bytes_per_second, rows_per_second
from koinon.cli.operate.rebalance_and_drain import Yes, ask
from koinon.core.quantities import duration_of, parse_size
from koinon.operate.keyspaces import KeyspaceMade, table_of
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import PartitionStatus, Table

app = typer.Typer(cls=Group, help="Named rooms of keys, with partitions and rules of their own.")

Name = Annotated[str, typer.Argument(metavar="NAME")]
Partitions = Annotated[
    int, typer.Option("--partitions", min=0, help="How many, for ever. By default 64.")
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
    typer.Option("--replication-factor", min=0, help="Copies. By default as in 'default'."),
]
MinInSync = Annotated[
    int | None,
    typer.Option("--min-in-sync", min=1, help="Copies that a write needs. By default half."),
]
MaxValue = Annotated[
    str, typer.Option("--max-value", metavar="SIZE", help="Of a value, such as 64KiB or 1MiB.")
]
Pool = Annotated[
    str | None,
    typer.Option("--pool", help="On the nodes of this pool (koinon node --pool); '' is one, too."),
]
DefaultTtl = Annotated[
    str | None,
    typer.Option(
        "--default-ttl",
        metavar="TTL",
        help="How long records live that are written without --ttl: 30m, 2h, 1d; none: for ever.",
    ),
]
MaxTtl = Annotated[
    str | None,
    typer.Option(
        "--max-ttl",
        metavar="TTL",
        help="How long records may live: 30m, 2h, 1d; none: for ever. A write is refused that "
        "names more.",
    ),
]
MaxRows = Annotated[
    str | None,
    typer.Option(
        "--max-rows-per-s",
        metavar="N",
        help="Rows that all clients together may read and write in a second; none: no limit.",
    ),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes-per-s",
        metavar="SIZE",
        help="The same for bytes of keys and values, such as 10MB; none: no limit.",
    ),
]


def list_keyspaces(session: Session) -> None:
    """Keyspaces, where their partitions lie, and how many of these are online."""
    with session.admin() as admin:
        table = table_of(admin.status())
    if session.json:
        output.print_json(
            {"keyspaces": [_as_json(table, keyspace) for keyspace in table.keyspaces.all]}
        )
        return
    shown = output.table(
        "KEYSPACE",
        ">ID",
        "PARTITIONS",
        ">ONLINE",
        "KEYS BY",
        ">COPIES",
        ">NEEDED",
        "POOL",
        "TTL",
        "LIMIT",
        "NOTE",
    )
    for keyspace in table.keyspaces.all:
        shown.add_row(
            output.escape(keyspace.name),
            str(keyspace.keyspace_id),
            f"{keyspace.base}-{keyspace.partition_ids[-1]}",
            f"{_online(table, keyspace):,}/{keyspace.partition_count:,}",
            output.escape(keyspace.partitioner),
            str(keyspace.replication_factor),
            str(keyspace.min_in_sync),
            output.escape(keyspace.pool),
            _ttl_text(keyspace),
            _quota_text(keyspace),
            "dropped, being erased" if keyspace.is_dropping else "",
        )
    output.show(shown, expendable=("NEEDED",))


def describe(session: Session, name: Name) -> None:
    """One keyspace, with all of its settings."""
    with session.admin() as admin:
        table = table_of(admin.status())
    keyspace = table.keyspaces.named(name)
    if session.json:
        output.print_json({"keyspace": _as_json(table, keyspace)})
        return
    count, print_ = output.count, keyspace.partitioner_fingerprint.hex()
    shown = {
        "keyspace": f"{keyspace.name}, id {keyspace.keyspace_id}",
        "partitions": f"{keyspace.base}-{keyspace.partition_ids[-1]}, {_online(table, keyspace):,} "
        f"of {keyspace.partition_count:,} online",
        "keys by": f"{keyspace.partitioner}{f', fingerprint {print_}' if print_ else ''}",
        "copies": f"{keyspace.replication_factor}, {keyspace.min_in_sync} of them needed to write",
        "value": f"{count(keyspace.max_value_bytes, 'byte')} at most",
        "pool": keyspace.pool or "nodes without a pool",
        "ttl": _ttl_text(keyspace) or "none: for ever, if a write names none",
        "limit": _quota_text(keyspace) or "none",
    }
    for label, text in shown.items():
        output.console().print(f"{label:<10}  {text}", markup=False)


def create(
    session: Session,
    name: Name,
    *,
    partitions: Partitions = 0,
    partitioner: PartitionerName = "",
    router: RouterName = "",
    replication_factor: Factor = 0,
    min_in_sync: MinInSync = None,
    max_value: MaxValue = "",
    pool: Pool = None,
    default_ttl: DefaultTtl = None,
    max_ttl: MaxTtl = None,
    max_rows_per_s: MaxRows = None,
    max_bytes_per_s: MaxBytes = None,
) -> None:
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
            min_in_sync=min_in_sync or 0,
            max_value_bytes=_bytes(max_value) or 0,
            pool=pool or "",
            default_ttl_ms=_ttl_ms(default_ttl) or 0,
            max_ttl_ms=_ttl_ms(max_ttl) or 0,
            max_rows_per_s=rows_per_second(max_rows_per_s or "0"),
            max_bytes_per_s=bytes_per_second(max_bytes_per_s or "0"),
        )
    keyspace = made.keyspace
    _say(
        session,
        made,
        f"Keyspace {keyspace.name} is there: {output.count(keyspace.partition_count, 'partition')}"
        f", {output.count(keyspace.replication_factor, 'copy')} each, keys by "
        f"{keyspace.partitioner}.",
    )


def alter(
    session: Session,
    name: Name,
    *,
    min_in_sync: MinInSync = None,
    max_value: MaxValue = "",
    pool: Pool = None,
    default_ttl: DefaultTtl = None,
    max_ttl: MaxTtl = None,
    max_rows_per_s: MaxRows = None,
    max_bytes_per_s: MaxBytes = None,
) -> None:
    """Alter a keyspace, while it serves.

    'koinon admin set-replication-factor' changes how many copies it has; after a change of the
    pool 'koinon admin rebalance' moves its copies there. Times to live hold for what is written
    from then on. Limits a second hold at once.
    """
    change: dict[str, Any] = {
        "min_in_sync": min_in_sync,
        "max_value_bytes": _bytes(max_value),
        "pool": pool,
        "default_ttl_ms": _ttl_ms(default_ttl),
        "max_ttl_ms": _ttl_ms(max_ttl),
        "max_rows_per_s": rows_per_second(max_rows_per_s) if max_rows_per_s else None,
        "max_bytes_per_s": bytes_per_second(max_bytes_per_s) if max_bytes_per_s else None,
    }
    if all(value is None for value in change.values()):
        raise InvalidArgumentError(
            field="keyspace",
            reason="nothing is to be altered: --min-in-sync, --max-value, --pool, --default-ttl, "
            "--max-ttl, --max-rows-per-s, --max-bytes-per-s",
        )
    with session.admin() as admin:
        made = admin.keyspaces.alter(name, **change)
    _say(session, made, f"Keyspace {made.keyspace.name} is altered.")


def drop(session: Session, name: Name, *, yes: Yes = False) -> int | None:
    """Drop a keyspace and all of its records, for good.

    It is gone at once; its space is free once every node has erased its copies.
    """
    with session.admin() as admin:
        keyspace = table_of(admin.status()).keyspaces.named(name)
        if not yes:
            question = f"Drop keyspace {keyspace.name} and all of its records?"
            if (code := ask(session, question)) is not None:
                return code
        made = admin.keyspaces.drop(name, keyspace.keyspace_id)
    _say(session, made, f"Keyspace {made.keyspace.name} is dropped; nodes erase its copies.")
    return None


def _online(table: Table, keyspace: Keyspace) -> int:
    rows = (table.rows[p] for p in keyspace.partition_ids)
    return sum(row.status is PartitionStatus.ONLINE for row in rows)


def _bytes(text: str) -> int | None:
    """Return the bytes of a size; None: none is given."""
    if not text:
        return None
    try:
        return parse_size(text)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(field="--max-value", reason=str(error)) from None


def _ttl_ms(text: str | None) -> int | None:
    """Return the milliseconds of a time to live, 0 for "none"; None: it is not named."""
    if text is None:
        return None
    return 0 if text.strip().lower() == "none" else duration_ms(text)


def _ttl_text(keyspace: Keyspace) -> str:
    """Return the times to live for people: ``1d, at most 30d``."""
    default, most = keyspace.default_ttl_ms, keyspace.max_ttl_ms
    parts = (
        duration_of(default) if default else "",
        f"at most {duration_of(most)}" if most else "",
    )
    return ", ".join(filter(None, parts))


def _quota_text(keyspace: Keyspace) -> str:
    """Return the limits for people: ``5,000 rows/s, 10.0 MB/s``."""
    rows, size = keyspace.max_rows_per_s, keyspace.max_bytes_per_s
    parts = (f"{rows:,} rows/s" if rows else "", f"{output.bytes_text(size)}/s" if size else "")
    return ", ".join(filter(None, parts))


def _say(session: Session, made: KeyspaceMade, message: str) -> None:
    behind = str(made.behind)
    told = {"keyspace": _settings(made.keyspace), "nodes_behind": list(made.behind.node_ids)}
    session.say(f"{message} ({behind})" if behind else message, told)


def _settings(keyspace: Keyspace) -> dict[str, Any]:
    return {
        "name": keyspace.name,
        "id": keyspace.keyspace_id,
        "base": keyspace.base,
        "partition_count": keyspace.partition_count,
        "partitioner": keyspace.partitioner,
        "replication_factor": keyspace.replication_factor,
        "min_in_sync": keyspace.min_in_sync,
        "max_value_bytes": keyspace.max_value_bytes,
        "pool": keyspace.pool,
        "default_ttl_ms": keyspace.default_ttl_ms,
        "max_ttl_ms": keyspace.max_ttl_ms,
        "max_rows_per_s": keyspace.max_rows_per_s,
        "max_bytes_per_s": keyspace.max_bytes_per_s,
        "dropping": keyspace.is_dropping,
    }


def _as_json(table: Table, keyspace: Keyspace) -> dict[str, Any]:
    return {**_settings(keyspace), "online": _online(table, keyspace)}


default_command(app, list_keyspaces)
command(app, "describe", examples=["koinon admin keyspaces describe carts"])(describe)
command(
    app,
    "create",
    examples=[
        "koinon admin keyspaces create carts --router until:2f",
        "koinon admin keyspaces create vip --partitions 16 --pool vip",
    ],
)(create)
command(
    app,
    "alter",
    examples=[
        "koinon admin keyspaces alter vip --pool vip",
        "koinon admin keyspaces alter carts --default-ttl 1d --max-ttl 30d",
        "koinon admin keyspaces alter public --max-rows-per-s 5000 --max-bytes-per-s 10MB",
    ],
)(alter)
command(app, "drop", examples=["koinon admin keyspaces drop carts"])(drop)
