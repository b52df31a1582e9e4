"""Describes the changes between two versions of the table: nodes, primaries, moves, copies in sync,
keyspaces, loads. Pure. ``koinon top`` shows the first two kinds, ``koinon console`` all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from koinon.operate.wording import count, node_name, node_names
from koinon_proto.contract.table import NodeStatus, PartitionRow, PartitionStatus, Table

_NODE_WORDS = {
    NodeStatus.ACTIVE: "active",
    NodeStatus.FENCED: "down",
    NodeStatus.DRAINING: "draining",
    NodeStatus.LEFT: "out of the cluster",
}
Pair = tuple[PartitionRow, PartitionRow]


def node_changes(before: Table, after: Table) -> list[str]:
    """Describe the nodes that have joined, restarted, or changed their status."""
    found = []
    for number, node in sorted(after.nodes.items()):
        known = before.nodes.get(number)
        if known is node:
            continue
        if known is None:
            found.append(f"{node.node_id} has joined")
        elif known.status is not node.status:
            found.append(f"{node.node_id} is {_NODE_WORDS[node.status]}")
        elif known.node_epoch != node.node_epoch:
            found.append(f"{node.node_id} has started anew")
    return found


def primaries_taken(before: Table, after: Table) -> dict[int, int]:
    """Return how many more partitions each node leads now, by node number."""
    changes = Counter(
        new.primary for old, new in _changed_rows(before, after) if new.primary != old.primary
    )
    return {number: times for number, times in sorted(changes.items()) if number in after.nodes}


def primaries_text(taken: dict[int, int], table: Table) -> str:
    """Return ``primaries: n1 leads 12 more, n3 leads 9 more``."""
    parts = [f"{node_name(table, n)} leads {times:,} more" for n, times in taken.items()]
    return f"primaries: {', '.join(parts)}"


def table_changes(before: Table, after: Table) -> list[str]:
    """Describe all changes from one version of the table to a later one, one line for each."""
    pairs = list(_changed_rows(before, after))
    found = node_changes(before, after)
    if taken := primaries_taken(before, after):
        found.append(primaries_text(taken, after))
    found += _states(pairs)
    found += _moves(pairs)
    found += _in_sync(pairs, after)
    asked = sum(bool(new.wanted_primary) and not old.wanted_primary for old, new in pairs)
    if asked:
        found.append(f"{count(asked, 'partition')} to be handed over to another leader")
    found += _keyspaces(before, after)
    if before.moves.paused is not after.moves.paused:
        found.append("moves are paused" if after.moves.paused else "moves go on")
    merging, merged = (_merging(table) for table in (before, after))
    found += [f"load {load_id} is being merged" for load_id in sorted(merged - merging)]
    found += [f"load {load_id} is merged" for load_id in sorted(merging - merged)]
    if not found and pairs:
        found.append(f"{count(len(pairs), 'partition')}: the order of copies, or a step of a move")
    return found or ["settings of the cluster"]


def _changed_rows(before: Table, after: Table) -> Iterable[Pair]:
    """Yield the rows that differ; a table that came by updates shares the unchanged rows."""
    rows = zip(before.rows, after.rows, strict=False)
    return (pair for pair in rows if pair[0] is not pair[1] and pair[0] != pair[1])


def _states(pairs: Sequence[Pair]) -> list[str]:
    words = {
        PartitionStatus.OFFLINE: "offline",
        PartitionStatus.ASSIGNED: "being started",
        PartitionStatus.ONLINE: "online again",
    }
    numbers = Counter(
        new.status for old, new in pairs if old.status is not new.status and not new.unused
    )
    return [f"{count(n, 'partition')} {words[status]}" for status, n in sorted(numbers.items())]


def _moves(pairs: Sequence[Pair]) -> list[str]:
    """Describe how many moves have begun, and how many have ended: done, or turned back."""
    begun = done = back = 0
    for old, new in pairs:
        moved, moves = bool(old.adding or old.removing), bool(new.adding or new.removing)
        begun += moves and not moved
        if moved and not moves:
            done += set(new.replicas) == set(old.target)
            back += set(new.replicas) != set(old.target)
    words = {"begun": begun, "done": done, "turned back": back}
    return [f"{count(number, 'move')} {word}" for word, number in words.items() if number]


def _in_sync(pairs: Sequence[Pair], after: Table) -> list[str]:
    """Describe the copies that went in or out of sync, by node, except copies that a move adds or
    removes.
    """
    fallen: Counter[int] = Counter()
    back: Counter[int] = Counter()
    for old, new in pairs:
        both = set(old.settled) & set(new.settled)
        fallen.update(both & set(old.in_sync) - set(new.in_sync))
        back.update(both & set(new.in_sync) - set(old.in_sync))
    return [
        f"{node_names(after, [number])}: {count(times, 'copy')} {what}"
        for numbers, what in ((fallen, "out of sync"), (back, "in sync again"))
        for number, times in sorted(numbers.items())
    ]


def _keyspaces(before: Table, after: Table) -> list[str]:
    if before.keyspace_list is after.keyspace_list:
        return []
    old, new = ({k.name: k for k in table.keyspaces} for table in (before, after))
    found = [f"keyspace {name} was created" for name in new if name not in old]
    found += [f"keyspace {name} was dropped" for name in old if name not in new]
    altered = [name for name in new if name in old and old[name] != new[name]]
    return found + [f"keyspace {name} has other settings" for name in altered]


def _merging(table: Table) -> set[int]:
    return {load.load_id for load in table.loads if load.merging}
