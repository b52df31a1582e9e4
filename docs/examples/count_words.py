"""Counts the words of documents, each word exactly once, by consumers of one group.

    python docs/examples/count_words.py --coordinators HOST:PORT[,HOST:PORT…] [--member NAME]

Start it several times: the consumers share the partitions. Kill any of them at any moment: no word
is lost, and none is counted twice, because a partition's counts and the group's position in it are
written together or not at all. docs/groups.md explains it.

A line is a record ``DOCUMENT/line/NUMBER``, which is written once. Its words are counted in the
records ``DOCUMENT/count/WORD``. The keyspace's router is ``until:2f``, so a document's lines and
counts lie in one partition.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterable

import koinon

LINES = 20
"""The lines of one write; an atomic batch has 1,000 operations at most, here one for each word."""


def counts_of(changes: Iterable[koinon.Change]) -> Counter[bytes]:
    """Return by how much each count rises."""
    counts: Counter[bytes] = Counter()
    for change in changes:
        document, _, rest = change.key.partition(b"/")
        if rest.startswith(b"line/") and change.value is not None:
            counts.update(document + b"/count/" + word for word in change.value.split())
    return counts


def write(part: koinon.GroupPart) -> None:
    """Write the counts of these lines, and the position after them."""
    counts = counts_of(part)
    if not counts:  # only counts have changed, for instance
        part.commit()
        return
    while True:
        batch = part.batch()
        for key, number in counts.items():
            batch.increment(key, number)
        try:
            batch.commit()
        except koinon.UnknownFateError:
            continue  # it is written now only if it was not written before
        return


def run(group: koinon.Group) -> None:
    """Count words until the program is ended."""
    for changes in group:
        for part in changes.parts(at_most=LINES):
            # without the partition: its new owner counts these lines
            with contextlib.suppress(koinon.StaleGenerationError):
                write(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coordinators", required=True)
    parser.add_argument("--member", help="a name that outlives this process")
    options = parser.parse_args()
    with (
        koinon.connect(options.coordinators, timeout_ms=20_000) as client,
        client.group("words", member=options.member) as group,
    ):
        run(group)


if __name__ == "__main__":
    main()
