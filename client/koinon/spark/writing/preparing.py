"""Checks before a commit: the partitions' primaries confirm the staged rows, and look for repeated
keys.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from koinon.core.routing import Routing
from koinon.driver.rpc.kv_messages import refused
from koinon.spark.cluster import Cluster, Retries
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import loads_pb2

PARTITIONS_PER_CALL: Final = 64
ROWS_PER_CALL: Final = 4_000_000  # a node checks a million rows a second for duplicates, or fewer
CALLS_AT_ONCE: Final = 8
CALLS_AT_ONCE_TO_A_NODE: Final = 2
EXAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class Duplicates:
    """``rows`` counts rows whose key another row of the load has; ``keys`` are some of these
    keys.
    """

    rows: int
    keys: tuple[bytes, ...]


def prepare(
    cluster: Cluster,
    *,
    load_id: int,
    attempts: Sequence[int],
    rows_of: Mapping[int, int],
    duplicates_allowed: bool,
) -> Duplicates:
    """Check that every partition in ``rows_of`` holds this many rows of these attempts; return the
    duplicates.

    Raises:
        LoadIncompleteError: a partition holds another number of rows.
        LoadClosedError: the load is no longer open.
        UnavailableError: a partition was not served in time.
    """
    check = _Check(cluster, load_id, attempts, rows_of, duplicates_allowed)
    routing = cluster.routing()
    with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="koinon-prepare") as pool:
        pending = [pool.submit(check.run, ids) for ids in _turns(rows_of, routing)]
        try:
            found = [future.result() for future in pending]
        except BaseException:
            check.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    keys = [key for duplicates in found for key in duplicates.keys]
    return Duplicates(sum(duplicates.rows for duplicates in found), tuple(keys[:EXAMPLES]))


@dataclass
class _Check:
    cluster: Cluster
    load_id: int
    attempts: Sequence[int]
    rows_of: Mapping[int, int]
    duplicates_allowed: bool
    stopped: threading.Event = field(default_factory=threading.Event)
    # limits the calls at once, by owner
    _leave: dict[str, threading.Semaphore] = field(default_factory=dict)
    _leave_lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, partition_ids: list[int]) -> Duplicates:
        """Check some partitions at their present owners."""
        retries = Retries(self.cluster, self.stopped)
        rows, keys = 0, []
        while partition_ids:
            routing = self.cluster.routing()
            left: list[int] = []
            errors: list[KoinonError] = []
            for owner, mine in slices(partition_ids, self.rows_of, routing):
                reply = self._ask(owner, mine, routing)
                if isinstance(reply, KoinonError):
                    left += mine
                    errors.append(reply)
                    continue
                refusals = refused(reply)
                left += [p for p in mine if p in refusals]
                errors += refusals.values()
                rows += reply.duplicate_rows
                keys += list(reply.duplicate_keys)
                if len(refusals) < len(mine):
                    retries.progress()
            if errors:
                retries.after(errors, revision=routing.revision)
            partition_ids = left
        return Duplicates(rows, tuple(keys[:EXAMPLES]))

    def _ask(
        self, owner: str, partition_ids: list[int], routing: Routing
    ) -> loads_pb2.PrepareResponse | KoinonError:
        if not owner:
            return routing.offline(partition_ids[0])
        request = loads_pb2.PrepareRequest(
            cluster_id=routing.table.cluster.cluster_id,
            table_version=routing.table.table_version,
            load_id=self.load_id,
            attempts=self.attempts,
            partition_ids=partition_ids,
            rows=[self.rows_of[p] for p in partition_ids],
            duplicates_allowed=self.duplicates_allowed,
        )
        with self._leave_lock:
            leave = self._leave.setdefault(owner, threading.Semaphore(CALLS_AT_ONCE_TO_A_NODE))
        with leave:
            reply: loads_pb2.PrepareResponse | KoinonError = self.cluster.bulk(
                owner, "Prepare", request
            )
        return reply


def _turns(rows_of: Mapping[int, int], routing: Routing) -> list[list[int]]:
    """Return all slices, alternating between owners, so that nodes work in parallel."""
    by_owner: dict[str, list[list[int]]] = {}
    for owner, part in slices(rows_of, rows_of, routing):
        by_owner.setdefault(owner, []).append(part)
    rounds = itertools.zip_longest(*by_owner.values())
    return [part for one in rounds for part in one if part is not None]


def slices(
    partition_ids: Iterable[int], rows_of: Mapping[int, int], routing: Routing
) -> Iterator[tuple[str, list[int]]]:
    """Yield owners, each with some of their partitions: few enough to be checked within one call's
    timeout, unless a single partition has more rows.
    """
    by_owner: dict[str, list[int]] = {}
    for partition_id in sorted(partition_ids):
        by_owner.setdefault(routing.owner_of[partition_id], []).append(partition_id)
    for owner, mine in by_owner.items():
        part: list[int] = []
        rows = 0
        for partition_id in mine:
            more = rows_of[partition_id]
            if part and (len(part) == PARTITIONS_PER_CALL or rows + more > ROWS_PER_CALL):
                yield owner, part
                part, rows = [], 0
            part.append(partition_id)
            rows += more
        yield owner, part
