"""Remedies for a hot partition: each follows from what makes it hot."""

from __future__ import annotations

from collections.abc import Sequence

from koinon.cli.console import output
from koinon.operate.hotspots import FEW_ROWS, Blamed, HotGroup, HotKey, group_of
from koinon.operate.traffic import Survey
from koinon_proto.contract.errors import ConfigurationError, PartitionerMismatchError
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import Partitioner, partitioner_of
from koinon_proto.process.printable import printable_bytes

KEY_SHOWN = 48
SHARDS = 8
_MORE = "docs/modelling.md has all ways"


def advice(blamed: Sequence[Blamed], survey: Survey, table: Table) -> list[str]:
    """Return what an operator may do about the heat."""
    lines = []
    if survey.rates.rows < FEW_ROWS:
        lines.append(
            f"only {output.count(survey.rates.rows, 'row')} went by: these figures are mostly "
            "chance; look for longer (--seconds), or under load"
        )
    spread: list[str] = []
    for one in blamed:
        partition_id = one.partition.partition_id
        if one.key is not None:
            lines.append(f"partition {partition_id} {_of_a_key(one.key)}")
            continue
        known = _router_of(table, partition_id)
        group = known and group_of(partition_id, survey.sample.keys, known.routing_bytes)
        if known is not None and group:
            lines.append(f"partition {partition_id} {_of_a_group(group, known)}")
        else:
            spread.append(str(partition_id))
    if spread and survey.sample.keys:
        word = "partition" if len(spread) == 1 else "partitions"
        lines.append(
            f"the heat of {word} {', '.join(spread)} comes from many keys: no single one has "
            f"much of it. 'koinon admin partition {spread[0]}' shows which node serves it"
        )
    return lines


def _router_of(table: Table, partition_id: int) -> Partitioner | None:
    """Return what hashes the keys of the partition, if it is here what it is in the cluster."""
    keyspace = table.keyspaces.of(partition_id)
    try:
        return None if keyspace is None else partitioner_of(keyspace)
    except (ConfigurationError, PartitionerMismatchError):
        return None


def _of_a_key(key: HotKey) -> str:
    text = (
        f"is hot by one key, {key_text(key.key)} ({key.share:.0%} of its rows): moving the "
        "partition does not help. "
    )
    if key.writes_per_second > key.reads_per_second:
        return text + (
            "It is mostly written: spread it over several keys; a counter or a set by "
            f"client.sharded({_literal(key.key)}, {SHARDS})"
        )
    return text + "It is mostly read: let clients cache it, or write it under several keys"


def _of_a_group(group: HotGroup, known: Partitioner) -> str:
    return (
        f"is hot by the keys that the router {known.router.text} leads together by "
        f"{key_text(group.routing_bytes)} ({group.share:.0%} of the sampled rows): moving "
        "the partition does not help. Put what spreads them into what is routed, or keep them in "
        f"a keyspace of their own ('koinon copy' brings them there); {_MORE}"
    )


def key_text(key: bytes) -> str:
    """A key as one line that fits beside figures."""
    text = printable_bytes(key)
    return text if len(text) <= KEY_SHOWN else text[: KEY_SHOWN - 1] + "…"


def _literal(key: bytes) -> str:
    """A key as a program has it; a long one is left to the reader."""
    return ascii(key) if len(key) <= KEY_SHOWN else "…"
