"""Takes the records that a crash has left in the write-ahead log into the store, before it serves.

The store calls this when it is opened, while no writer runs. While a node serves, the writer
process takes the log over in the same way (log_files.take_over).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lmdb

from koinon_node.storage import log_files, transactions
from koinon_node.storage.transactions import Gathered
from koinon_proto.contract.cluster_errors import DataDirectoryError

log = logging.getLogger(__name__)

_RECORDS_MAX, _BYTES_MAX = 10_000, 8 * 1024 * 1024  # in one transaction


def replay(
    env: lmdb.Environment, databases: list[Any], directory: Path, life: int, position: int
) -> None:
    """Take over the records of this life above the position, some at a time.

    Raises:
        DataDirectoryError: the log is damaged, or the store has no room for its records.
    """
    records: list[log_files.Record] = []
    count = size = 0
    for found in log_files.left_over(directory, life, position):
        records.append((found.position, memoryview(bytes(found.body))))
        size += len(found.body)
        if len(records) >= _RECORDS_MAX or size >= _BYTES_MAX:
            _take_over(env, databases, directory, life, records)
            count, size = count + len(records), 0
            records.clear()
    if records:
        _take_over(env, databases, directory, life, records)
    if count := count + len(records):
        log.info("log taken over directory=%s records=%d", directory, count)


def _take_over(
    env: lmdb.Environment,
    databases: list[Any],
    directory: Path,
    life: int,
    records: list[log_files.Record],
) -> None:
    def put(rows: Gathered, _: int) -> str:
        try:
            with env.begin(write=True) as txn:
                transactions.put(env, txn, databases, rows)
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            return str(error)
        return ""

    reason = log_files.take_over(records, life, put)[1]
    if reason:
        raise DataDirectoryError(
            path=str(directory),
            reason=f"no room for the log's records ({reason}): make room on the disk, "
            "or start with a larger --map-size-bytes",
        )
