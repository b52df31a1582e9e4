"""Remedies for a hot partition: each follows from the cause of the heat."""

from __future__ import annotations

import re
from collections.abc import Sequence

from koinon.operate.judge.hotspots import FEW_ROWS, Blamed, HotGroup, HotKey, group_of
from koinon.operate.traffic import Survey
from koinon.operate.wording import count
from koinon_proto.contract.errors import ConfigurationError, PartitionerMismatchError
from koinon_proto.contract.keyspaces import DEFAULT, Keyspace
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import Partitioner, partitioner_of
from koinon_proto.process.printable import printable_bytes

KEY_SHOWN = 48
SHARDS = 8
ROOM = "NAME"
"""The name of the new keyspace in suggested commands."""
_MORE = "docs/modelling.md has the order, and other ways"
_WORD = re.compile(r"[\w/:.,@%+=][\w/:.,@%+=-]*", re.ASCII)  # characters that no shell interprets


def advice(blamed: Sequence[Blamed], survey: Survey, table: Table) -> list[str]:
    """Return remedies for the hot partitions."""
    lines = []
    if survey.rates.rows < FEW_ROWS:
        lines.append(
            f"only {count(survey.rates.rows, 'row')} went by: these figures are mostly "
            "chance; look for longer (--seconds), or under load"
        )
    spread: list[str] = []
    for one in blamed:
        partition_id = one.partition.partition_id
        keyspace = table.keyspaces.of(partition_id)
        name = DEFAULT if keyspace is None else keyspace.name
        if one.key is not None:
            lines.append(f"partition {partition_id} {_of_a_key(one.key, name)}")
            continue
        known = _router_of(keyspace)
        group = known and group_of(partition_id, survey.sample.keys, known.routing_bytes)
        if known is not None and group:
            sampled = [key.key for key in survey.sample.keys if key.partition_id == partition_id]
            command = _copies(group.routing_bytes, sampled, known, name)
            lines.append(f"partition {partition_id} {_of_a_group(group, known, command)}")
        else:
            spread.append(str(partition_id))
    if spread and survey.sample.keys:
        word = "partition" if len(spread) == 1 else "partitions"
        lines.append(
            f"the heat of {word} {', '.join(spread)} comes from many keys: no single one has "
            f"much of it. 'koinon admin partition {spread[0]}' shows which node serves it"
        )
    return lines


def _router_of(keyspace: Keyspace | None) -> Partitioner | None:
    """Return the partitioner of the keyspace, if this build computes the same partitions as the
    cluster.
    """
    try:
        return None if keyspace is None else partitioner_of(keyspace)
    except (ConfigurationError, PartitionerMismatchError):
        return None


def _of_a_key(key: HotKey, keyspace: str) -> str:
    client = "client" if keyspace == DEFAULT else f"client.keyspace({keyspace!r})"
    text = (
        f"is hot by one key, {key_text(key.key)} ({key.share:.0%} of its rows): moving the "
        "partition does not help. "
    )
    if key.writes_per_second > key.reads_per_second:
        return text + (
            "It is mostly written: spread it over several keys; a counter or a set by "
            f"{client}.sharded({_literal(key.key)}, {SHARDS})"
        )
    return text + "It is mostly read: let clients cache it, or write it under several keys"


def _of_a_group(group: HotGroup, known: Partitioner, command: str) -> str:
    return (
        f"is hot by the keys that the router {known.router.text} leads together by "
        f"{key_text(group.routing_bytes)} ({group.share:.0%} of the sampled rows): moving "
        "the partition does not help. Put a part that differs between them into the routing "
        "bytes, or keep them in "
        f"a keyspace of their own: 'koinon admin keyspaces create {ROOM} --router whole', then "
        f"'{command}'; {_MORE}"
    )


def _copies(routing: bytes, sampled: Sequence[bytes], known: Partitioner, keyspace: str) -> str:
    """Return the command that copies a group's keys. It uses a prefix if one matches just these
    keys: the shortest prefix of a key that determines the routing bytes, if every sampled key of
    the group has it.
    """
    command = f"koinon copy --from {keyspace} --to {ROOM}"
    members = [key for key in sampled if known.routing_bytes(key) == routing]
    starts = (members[0][:n] for n in range(1, len(members[0]) + 1))
    prefix = next((start for start in starts if known.router.of_prefix(start) == routing), None)
    if prefix is None or not all(key.startswith(prefix) for key in members):
        return f"{command} --prefix …"
    text = printable_bytes(prefix)
    if len(text) > KEY_SHOWN or not _WORD.fullmatch(text):
        return f"{command} --hex --prefix {prefix.hex()}"
    return f"{command} --prefix {text}"


def key_text(key: bytes) -> str:
    """Return a key as one short line of text."""
    text = printable_bytes(key)
    return text if len(text) <= KEY_SHOWN else text[: KEY_SHOWN - 1] + "…"


def _literal(key: bytes) -> str:
    """Return a key as a Python literal; a long key is left to the reader."""
    return ascii(key) if len(key) <= KEY_SHOWN else "…"
