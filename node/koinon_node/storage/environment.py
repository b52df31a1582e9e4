"""The LMDB environment of a store, as every process of a node opens it.

Databases: data, expiry, partitions (core/formats/records), and meta, the node's facts about itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lmdb

from koinon_node.store_config import StoreConfig
from koinon_proto.process.private_files import FILE_MODE

DATABASES = ("data", "expiry", "partitions", "meta")
DATA_DB, EXPIRY_DB, PARTITIONS_DB, META_DB = range(len(DATABASES))


def open_environment(config: StoreConfig, *, sync: bool = True) -> lmdb.Environment:
    """Open the environment with the settings that every process of a node shares."""
    return lmdb.open(
        str(config.directory),
        map_size=config.mapped_bytes,
        max_dbs=len(DATABASES),
        max_readers=128,
        max_spare_txns=8,
        readahead=False,
        meminit=False,
        sync=sync,
        mode=FILE_MODE,
    )


def open_databases(env: lmdb.Environment, *, create: bool = False) -> list[Any]:
    """Open the databases; return the handles in the order of DATABASES."""
    return [env.open_db(name.encode(), create=create) for name in DATABASES]


def tree_bytes(txn: lmdb.Transaction, databases: Sequence[Any]) -> int:
    """Return the bytes of the databases' pages."""
    pages = page_bytes = 0
    for database in databases:
        stat = txn.stat(database)
        pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        page_bytes = stat["psize"]
    return pages * page_bytes
