"""A node's metrics: rows by outcome, what is told by partition, groups, the lease."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from koinon_node.partition.batches import ReadAnswer, ScanAnswer, WriteAnswer, WriteBatch
from koinon_node.partition.row_metrics import RowCounts
from koinon_proto.contract.errors import (
    ConditionFailedError,
    InternalError,
    KoinonError,
    LeaseExpiredError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.v1 import kv_pb2
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import PARTITIONS, NodeProcess, partitions_of, refusal, running_node
from tests.scraping import Scrape, scrape

NOT_OURS = 5  # led by another node
LEASE_S = 3.0  # one test waits for its end
REFUSED = LeaseExpiredError(node_id="n1")
FAILED = ConditionFailedError(expected_version=1, current_version=2)
UNKNOWN = UnknownFateError(reason="no answer")


def counted(counts: RowCounts) -> dict[str, int]:
    return {f"{of[0]} {of[1]}": rows for of, rows in counts.rows.items() if rows}


def batch(*partitions: int, deletes: tuple[int, ...] = ()) -> WriteBatch:
    rows = len(partitions)
    return WriteBatch(
        table_version=1,
        keys=[b"k%d" % n for n in range(rows)],
        values=[b"" if n in deletes else b"12345" for n in range(rows)],
        partition_ids=np.array(partitions, np.uint32),
        deletes=frozenset(deletes),
    )


# --- what is counted ---------------------------------------------------------------------------


def test_written_rows_are_counted_by_operation_and_outcome() -> None:
    counts = RowCounts()
    answer = WriteAnswer(
        versions=np.zeros(9, np.uint64),
        absent=[6],
        present=[8],
        refusals={9: REFUSED},
        row_errors={1: FAILED, 2: UNKNOWN, 7: REFUSED},
    )
    counts.written(batch(1, 1, 1, 9, 9, 1, 1, 1, 1, deletes=(4, 5, 6, 7)), answer)
    assert counted(counts) == {
        "put ok": 1,
        "put failed": 2,
        "put unknown": 1,
        "put refused": 1,
        "delete ok": 1,
        "delete absent": 1,
        "delete refused": 2,
    }
    assert counts.bytes["put"] == 5


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (REFUSED, "refused"),
        (FAILED, "failed"),
        (ValueError(), "failed"),
        (UNKNOWN, "unknown"),
        (asyncio.CancelledError(), "unknown"),
    ],
)
def test_batch_that_ends_with_an_error_is_counted_whole(error: BaseException, outcome: str) -> None:
    counts = RowCounts()
    counts.write_failed(batch(1, 1, 1, deletes=(2,)), error)
    assert counted(counts) == {f"put {outcome}": 2, f"delete {outcome}": 1}


def test_read_rows_are_found_absent_or_refused() -> None:
    counts = RowCounts()
    answer = ReadAnswer(missing=[0], refusals={9: REFUSED}, held_bytes=2 * (9 + 100))
    counts.read(np.array([1, 1, 1, 9], np.uint32), answer)
    counts.read_failed(3, REFUSED)
    counts.read_failed(2, asyncio.CancelledError())
    assert counted(counts) == {"get ok": 2, "get absent": 1, "get refused": 4, "get failed": 2}
    assert counts.bytes["get"] == 200


def test_scanned_and_staged_rows_are_counted() -> None:
    counts = RowCounts()
    counts.scanned(ScanAnswer(keys=[b"a", b"b"], values=[b"123", b"4"]))
    ids, rows = np.array([1, 9], np.uint32), np.array([10, 20])
    counts.staged(ids, rows, [b"packed", b"other"], {9: REFUSED})
    counts.stage_failed(5, InternalError(reason="x"))
    assert counted(counts) == {"scan ok": 2, "stage ok": 10, "stage refused": 25}
    assert (counts.bytes["scan"], counts.bytes["stage"]) == (4, 6)


# --- a process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(
        Script(primaries={NOT_OURS: 2}, lease_ms=int(LEASE_S * 1000))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return free_address()


@pytest.fixture(scope="module")
def node(
    coordinator: ScriptedCoordinator,
    metrics_address: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("metrics") / "n1"
    with running_node(data, coordinator, "--metrics-listen", metrics_address) as running:
        yield running


def keys_of(*, ours: bool, count: int, tag: str) -> list[bytes]:
    keys = [f"{tag}{n}".encode() for n in range(count * PARTITIONS * 2)]
    found = [k for k, p in zip(keys, partitions_of(keys), strict=True) if (p != NOT_OURS) == ours]
    return found[:count]


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after.sum(name, **labels) - before.sum(name, **labels)


def test_rows_of_batches_show_by_outcome_and_by_partition(
    node: NodeProcess, metrics_address: str
) -> None:
    ours = keys_of(ours=True, count=50, tag="a")
    others = keys_of(ours=False, count=7, tag="a")
    keys = [*ours, *others]
    before = scrape(metrics_address)
    node.kv.BatchWrite(
        kv_pb2.BatchWriteRequest(
            keys=keys, values=[b"12345"] * len(keys), partition_ids=partitions_of(keys)
        )
    )
    asked = [*ours, b"nobody", *others]
    node.kv.BatchGet(kv_pb2.BatchGetRequest(keys=asked, partition_ids=partitions_of(asked)))
    node.kv.Delete(kv_pb2.DeleteRequest(key=ours[0]))
    node.kv.Delete(kv_pb2.DeleteRequest(key=ours[0]))
    error = refusal(lambda: node.kv.Put(kv_pb2.PutRequest(key=ours[1], value=b"x", if_version=9)))
    assert isinstance(error, KoinonError)
    one = kv_pb2.Update(increment=kv_pb2.Increment(by=1))
    keys = [ours[2], ours[0], others[0]]
    node.kv.BatchUpdate(
        kv_pb2.BatchUpdateRequest(
            keys=keys, partition_ids=partitions_of(keys), updates=[one, one, one]
        )
    )
    node.kv.Put(kv_pb2.PutRequest(key=ours[2], value=b"text"))
    node.kv.BatchUpdate(
        kv_pb2.BatchUpdateRequest(
            keys=keys[:1], partition_ids=partitions_of(keys[:1]), updates=[one]
        )
    )
    node.kv.Scan(kv_pb2.ScanRequest(partition_ids=partitions_of(ours[1:2])))
    after = scrape(metrics_address)

    expected = {
        ("put", "ok"): 51,
        ("put", "refused"): 7,
        ("put", "failed"): 1,
        ("get", "ok"): 50,
        ("get", "absent"): 1,
        ("get", "refused"): 7,
        ("delete", "ok"): 1,
        ("delete", "absent"): 1,
        ("update", "ok"): 2,
        ("update", "refused"): 1,
        ("update", "failed"): 1,
    }
    for (operation, outcome), rows in expected.items():
        found = grown(before, after, "koinon_rows_total", operation=operation, outcome=outcome)
        assert found == rows, (operation, outcome)
    assert grown(before, after, "koinon_rows_total", operation="scan", outcome="ok") >= 1
    assert grown(before, after, "koinon_row_bytes_total", operation="put") == 254
    assert grown(before, after, "koinon_row_bytes_total", operation="get") == 250
    assert grown(before, after, "koinon_partition_writes_total") == 57
    assert grown(before, after, "koinon_partition_writes_total", partition=str(NOT_OURS)) == 0
    partition = str(partitions_of(ours[3:4])[0])
    assert grown(before, after, "koinon_partition_writes_total", partition=partition) >= 1
    assert grown(before, after, "koinon_partition_reads_total") >= 51
    assert grown(before, after, "koinon_commit_duration_seconds_count") >= 2
    assert grown(before, after, "koinon_commit_rows_sum") >= 51
    assert grown(before, after, "koinon_group_completion_seconds_count") >= 2


def test_hosted_partitions_are_there_from_the_start_and_records_once_counted(
    node: NodeProcess, metrics_address: str
) -> None:
    found = scrape(metrics_address)
    led = {str(p) for p in range(PARTITIONS) if p != NOT_OURS}
    for name in ("koinon_partition_writes_total", "koinon_partition_records"):
        partitions = {dict(of)["partition"] for of in found.samples[name]}
        assert partitions == led, name
    assert found.sum("koinon_partitions", role="primary") == PARTITIONS - 1
    keys = keys_of(ours=True, count=40, tag="b")
    node.kv.BatchWrite(
        kv_pb2.BatchWriteRequest(
            keys=keys, values=[b"1"] * len(keys), partition_ids=partitions_of(keys)
        )
    )
    wait_until(
        lambda: scrape(metrics_address).sum("koinon_partition_records", role="primary") >= 40,
        "the pass has counted the records",
    )


def test_store_disk_and_lease_have_plausible_values(
    node: NodeProcess, metrics_address: str
) -> None:
    found = scrape(metrics_address)
    assert found.sum("koinon_serving") == 1
    assert 0 < found.sum("koinon_lease_remaining_seconds") <= LEASE_S
    assert 0 < found.sum("koinon_store_used_bytes") < found.sum("koinon_store_map_bytes")
    assert 0 < found.sum("koinon_disk_free_bytes") < found.sum("koinon_disk_total_bytes")
    assert found.sum("koinon_store_free_pages") > 0
    assert found.sum("koinon_heartbeat_duration_seconds_count") > 0


def test_lease_that_is_not_renewed_is_counted_as_lost(
    coordinator: ScriptedCoordinator, node: NodeProcess, metrics_address: str
) -> None:
    def refuse(request: object) -> None:
        raise UnavailableError(reason="scripted")

    script = coordinator.script
    answer, lease_ms = script.on_heartbeat, script.lease_ms
    script.lease_ms = 300
    try:
        wait_until(
            lambda: scrape(metrics_address).sum("koinon_lease_remaining_seconds") <= 0.3,
            "the lease is short",
        )
        before = scrape(metrics_address).sum("koinon_lease_losses_total")
        script.on_heartbeat = refuse
        wait_until(lambda: scrape(metrics_address).sum("koinon_serving") == 0, "the lease ends")
        wait_until(
            lambda: scrape(metrics_address).sum("koinon_lease_losses_total") > before,
            "it is counted",
        )
    finally:
        script.on_heartbeat, script.lease_ms = answer, lease_ms
    wait_until(lambda: scrape(metrics_address).sum("koinon_serving") == 1, "it serves again")


@pytest.mark.parametrize("address", ["taken", "no address"])
def test_metrics_address_that_cannot_be_used_ends_the_process_by_name(
    tmp_path: Path, address: str, metrics_address: str, node: NodeProcess
) -> None:
    where = metrics_address if address == "taken" else "9400"
    command = [sys.executable, "-m", "koinon_node", "--id", "n9", "--data", str(tmp_path / "n9")]
    command += ["--listen", free_address(), "--coordinators", "127.0.0.1:1"]
    ended = subprocess.run(
        [*command, "--metrics-listen", where], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert f"metrics-listen {where if address == 'taken' else repr(where)}" in ended.stderr
    assert not (tmp_path / "n9").exists()
