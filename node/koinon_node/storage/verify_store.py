"""``python -m koinon_node.storage.verify_store DIR`` reads a whole store; exit 0: no page is
missing.

Runs as a process of its own, since a missing page kills the process that reads it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lmdb

from koinon_node.storage.environment import DATABASES


def verify(directory: Path) -> int:
    """Read every record of every database; return their number."""
    env = lmdb.open(str(directory), max_dbs=len(DATABASES), readonly=True, lock=False)
    records = 0
    for name in DATABASES:
        with env.begin() as txn:
            database = env.open_db(name.encode(), txn=txn, create=False)
            for _key, _value in txn.cursor(database):
                records += 1
    return records


if __name__ == "__main__":
    verify(Path(sys.argv[1]))
