"""Runs one schedule: a cluster, clients, faults; heals it, and judges what clients were told."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from koinon.client import Client
from koinon_proto.contract.keyspaces import DEFAULT
from tests.checkers.applied import OneVersionEach
from tests.checkers.history import Operation, Outcome
from tests.checkers.linearizability import UndecidedError, check
from tests.integration.copies import assert_copies_are_identical
from tests.nemesis.cluster import KEYSPACE, NemesisCluster
from tests.nemesis.faults import Nemesis
from tests.nemesis.groups import is_group, keys_of, register
from tests.nemesis.journal import Journal, Line, merge, operations, write_history
from tests.nemesis.schedules import Schedule

READY_S = 180.0  # on a machine that does much else
FINAL_TIMEOUT_MS = 30_000
FINAL_ROWS = 500
HISTORY = "history.jsonl"


@dataclass
class Result:
    """The result of a schedule. ``violations`` are about the data; ``failure`` says why the run
    could not be finished or the cluster did not become well again.
    """

    operations: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0  # of nodes and coordinators
    batches: int = 0  # that were acknowledged
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.violations and not self.failure


def run_schedule(schedule: Schedule, cluster: NemesisCluster, directory: Path) -> Result:
    """Run the schedule on a cluster that is well, or on its way to it.

    Args:
        directory: gets the journals and the history; its name begins all keys.
    """
    result = Result()
    directory.mkdir()
    journal = Journal(directory / "nemesis.jsonl")
    nemesis = Nemesis(cluster, journal)
    try:
        _run(schedule, cluster, nemesis, journal, result, directory)
    except Exception as error:
        result.failure = f"{type(error).__name__}: {error}"
    finally:
        journal.close()
        result.faults, result.kills = nemesis.done, nemesis.kills
        result.notes += nemesis.notes
    return result


def _run(
    schedule: Schedule,
    cluster: NemesisCluster,
    nemesis: Nemesis,
    journal: Journal,
    result: Result,
    directory: Path,
) -> None:
    cluster.settled(READY_S)
    cluster.choose_keyspace(KEYSPACE if schedule.seed % 2 else DEFAULT)
    cluster.settled(READY_S)
    cluster.start_clients(directory)
    cluster.wait_for_clients(READY_S)
    began_at_ns = time.monotonic_ns()
    try:
        nemesis.run(schedule, began_at_ns / 1e9)
        nemesis.heal()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        result.failure = f"not well again: {error}"
    paths = [directory / "nemesis.jsonl", *cluster.stop_clients()]
    if not result.failure:
        final = {"timeout_ms": FINAL_TIMEOUT_MS, "keyspace": cluster.keyspace}
        with cluster.client(**final) as client:
            _read_all(client, journal, merge(paths))
    lines = merge(paths, began_at_ns)
    write_history(directory / HISTORY, lines)
    _judge(lines, result)
    result.violations += OneVersionEach().note(cluster.applied())
    if not result.failure:
        try:
            assert_copies_are_identical(cluster.settled(READY_S))
        except AssertionError as error:
            result.violations.append(f"copies differ: {error}")


def _read_all(client: Client, journal: Journal, lines: list[Line]) -> None:
    """Read every key once more, as a part of the history: what is lost, or back, shows."""
    named = {line["key"] for line in lines if "key" in line}
    for group in sorted(filter(is_group, named)):
        call = journal.invoke(0, "read", group, None)
        value, version = register(client.get_entries(keys_of(group)))
        call.ok(value=value, version=version)
    keys = sorted(key for key in named if not is_group(key))
    for start in range(0, len(keys), FINAL_ROWS):
        chunk = keys[start : start + FINAL_ROWS]
        calls = [journal.invoke(row, "read", key, None) for row, key in enumerate(chunk)]
        entries = client.get_entries([key.encode() for key in chunk])
        for call, entry in zip(calls, entries, strict=True):
            value = entry.value.decode() if entry else None
            call.ok(value=value, version=entry.version if entry else 0)


def _judge(lines: list[Line], result: Result) -> None:
    history = operations(lines)
    result.operations = len(history)
    result.fates = Counter(operation.outcome.value for operation in history)
    by_key: dict[bytes, list[Operation]] = {}
    for operation in history:
        done = operation.writes and operation.outcome is Outcome.OK
        result.batches += done and is_group(operation.key.decode())
        by_key.setdefault(operation.key, []).append(operation)
    for key in sorted(by_key):
        try:
            result.violations += map(str, check(by_key[key]))
        except UndecidedError as error:
            result.notes.append(f"undecided: {error}")
    if not any(op.outcome is Outcome.OK for op in history) and not result.failure:
        result.failure = "no operation succeeded"
