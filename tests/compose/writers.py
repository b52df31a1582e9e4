"""Runs in a container of the cluster's network: clients that read and write all the time, and
answers, a line of JSON each, to the questions that come on standard input, a line of JSON each.

``{"do": "begin"}`` starts the load, ``"progress"`` waits for writes, ``"since"`` says what became
of the operations since the last time, ``"status"`` how the cluster is, ``"judge"`` ends the load
and verifies all of it. A question that cannot be answered gets ``{"error": ...}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import koinon
from koinon.client import Client
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus, count_by_primary
from koinon.operate.judge.health import is_short, problems, replicas_by_node
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import PartitionStatus
from tests.checkers.history import NEVER, Kind
from tests.checkers.linearizability import check
from tests.checkers.load import FULL_PAUSE_S, RecordedLoad

COORDINATORS = os.environ["KOINON_COORDINATORS"]
THREADS = 3
EXAMPLES_MAX = 3
STATUS_TIMEOUT_MS = 1_500


def connect(**options: Any) -> Client:
    return koinon.connect(COORDINATORS, **options)


class Writers:
    """The load, and what has been told of it already."""

    def __init__(self) -> None:
        self._load = RecordedLoad(connect, threads=THREADS, pause_s=FULL_PAUSE_S)
        self._admin = Admin(COORDINATORS, timeout_ms=STATUS_TIMEOUT_MS)
        self._acknowledged = 0
        self._errors = 0
        self._ended: set[int] = set()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        answers: dict[str, Callable[..., dict[str, Any]]] = {
            "begin": self.begin,
            "progress": self.progress,
            "since": self.since,
            "status": self.status,
            "judge": self.judge,
        }
        what = question.pop("do")
        return answers[what](**question)

    def begin(self) -> dict[str, Any]:
        self._load.__enter__()
        return {"threads": THREADS}

    def progress(self, writes: int, timeout_s: float) -> dict[str, Any]:
        self._load.wait_for_progress(writes, timeout_s)
        return {}

    def since(self) -> dict[str, Any]:
        """Report what ended since the last call: how many, the slowest, each error by its kind."""
        errors = self._load.errors[self._errors :]
        self._errors += len(errors)
        acknowledged = len(self._load.acknowledged)
        ended = [
            operation
            for operation in self._load.history.operations()
            if operation.completed_at != NEVER and operation.number not in self._ended
        ]
        self._ended |= {operation.number for operation in ended}
        done = acknowledged - self._acknowledged + len(ended)
        self._acknowledged = acknowledged
        unknown = [error for error in errors if error.maybe_applied]
        return {
            "operations": done,
            "failed": len(errors) - len(unknown),
            "unknown": len(unknown),
            "errors": [f"{type(error).__name__}: {error}" for error in errors[:EXAMPLES_MAX]],
            "slowest_s": max((o.completed_at - o.invoked_at for o in ended), default=0.0),
        }

    def status(self) -> dict[str, Any]:
        return describe(self._admin.status())

    def judge(self) -> dict[str, Any]:
        """End the load; read back whatever was acknowledged, and judge the whole history."""
        self._load.__exit__(None, None, None)
        with connect(timeout_ms=30_000) as client:
            lost = self._load.lost(client)
            self._read_back(client)
        operations = self._load.history.operations()
        violations = check(operations)
        fates = Counter(operation.outcome.value for operation in operations)
        return {
            "acknowledged": len(self._load.acknowledged),
            "lost": [key.decode() for key in lost[:EXAMPLES_MAX]],
            "lost_count": len(lost),
            "history": len(operations),
            "keys": len({operation.key for operation in operations}),
            "fates": dict(fates),
            "violations": [str(violation) for violation in violations[:EXAMPLES_MAX]],
            "violation_count": len(violations),
        }

    def _read_back(self, client: Client) -> None:
        """Every key that was ever overwritten is read once more: part of its history."""
        history = self._load.history
        for key in sorted({operation.key for operation in history.operations()}):
            number = history.invoke("the last reader", Kind.GET, key)
            entry = client.get_entry(key)
            version, value = (0, None) if entry is None else (entry.version, entry.value)
            history.ok(number, version=version, value=value)


def describe(status: ClusterStatus) -> dict[str, Any]:
    """The status in the words that the test asks in."""
    table = status.table
    rows = () if table is None else table.rows
    nodes = {} if table is None else table.nodes
    primaries = {} if table is None else count_by_primary(table)
    held = Counter() if table is None else replicas_by_node(table)
    return {
        "ok": status.is_leader and status.ready and not problems(status),
        "problems": problems(status),
        "leader": status.leader_id if status.is_leader else "",
        "silent": [c.member_id for c in status.coordinators if not c.active and not c.leader],
        "partitions": len(rows),
        "online": sum(row.status is PartitionStatus.ONLINE for row in rows),
        "short": sum(map(is_short, rows)),
        "moving": sum(bool(row.adding or row.removing) for row in rows),
        "nodes": {
            node.node_id: {
                "status": node.status.name.lower(),
                "rack": node.rack,
                "primaries": primaries.get(number, 0),
                "replicas": held[number],
            }
            for number, node in nodes.items()
        },
    }


def main() -> None:
    writers = Writers()
    for line in sys.stdin:
        try:
            answer = writers.answer(json.loads(line))
        except (KoinonError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the load's threads may be waiting for a cluster that is gone


if __name__ == "__main__":
    main()
