"""Merge steps in the writer process: their order in a group, their room, their failures."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import lmdb
import pytest

from koinon_node.core.formats import records
from koinon_node.core.formats.chunk_keys import chunk_key
from koinon_node.storage import writer_process
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer_process import MERGES, WriterLoop
from koinon_proto.contract.errors import (
    UnknownFateError,
)
from koinon_proto.v1.replication_pb2 import MergeStep
from tests.node.kit.groups import lone_writer
from tests.node.kit.staged_chunks import LOAD, chunk_of, content, step_of
from tests.node.kit.support import WAIT_S, config_of, framed


def applied(
    directory: Path, tickets: list[Any], before: dict[bytes, bytes]
) -> tuple[dict[int, str], dict[bytes, bytes]]:
    """Have one group of tickets applied; return (failures, all records)."""
    Store(config_of(directory)).close(clean=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = WriterLoop(theirs, config_of(directory))
        rows = ((DATA_DB, list(before), list(before.values())),)
        ours.sendall(framed(1, False, [(0, False, rows)]))
        ours.sendall(framed(2, False, tickets))
        ours.shutdown(socket.SHUT_WR)
        loop.run()
        _, failures, _ = [writer_process.receive(ours) for _ in range(2)][-1]
    with Store(config_of(directory)) as store:
        return failures, dict(content(store)[0])


def put_rows(*rows: tuple[bytes, bytes]) -> Any:
    keys, values = [b"\0\0\0" + key for key, _ in rows], [value for _, value in rows]
    return (0, False, ((DATA_DB, keys, values),))


def merge_ticket(step: MergeStep, *, progress: bytes = b"1") -> Any:
    merges = (MERGES, [step.SerializeToString()], [b""])
    return (0, True, (merges, (PARTITIONS_DB, [b"\0\0\1"], [progress])))


def chunk_before(*rows: tuple[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the record of chunk 0 of attempt 1."""
    key = records.head_of(0, records.STAGED) + chunk_key(LOAD, 1, 0)
    return {key: records.encode_record(1, chunk_of(rows))}


def test_rows_before_a_merge_in_its_group_lose_and_rows_after_it_win(tmp_path: Path) -> None:
    staged = chunk_before((b"a", b"new"), (b"b", b"new"))
    tickets = [
        put_rows((b"a", b"before"), (b"b", b"before"), (b"c", b"before")),
        merge_ticket(step_of((1, 0), rows=2)),
        put_rows((b"b", b"after"), (b"c", b"after")),
    ]
    failures, found = applied(tmp_path, tickets, staged)
    assert failures == {}
    assert found[b"\0\0\0a"] == records.encode_record(100, b"new")
    assert (found[b"\0\0\0b"], found[b"\0\0\0c"]) == (b"after", b"after")


def test_chunk_queued_in_the_group_of_its_merge_is_merged(tmp_path: Path) -> None:
    ((key, chunk),) = chunk_before((b"a", b"new")).items()
    tickets = [
        (0, False, ((DATA_DB, [key], [chunk]),)),
        merge_ticket(step_of((1, 0), rows=1)),
    ]
    failures, found = applied(tmp_path, tickets, {})
    assert failures == {}
    assert found[b"\0\0\0a"] == records.encode_record(100, b"new")
    assert key not in found


def test_merge_without_room_fails_alone_and_what_is_chained_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from koinon_node.storage import merge_executor

    def merge(txn: lmdb.Transaction, data: Any, *_: Any) -> None:
        txn.put(b"\0\0\0half", b"done", db=data)
        raise lmdb.MapFullError("no room")

    monkeypatch.setattr(merge_executor, "merge", merge)
    other = (0, True, ((PARTITIONS_DB, [b"\0\1\1"], [b"1"]),))
    tickets = [
        put_rows((b"a", b"before")),
        merge_ticket(step_of((1, 0), rows=1)),
        put_rows((b"b", b"after")),
        merge_ticket(step_of(), progress=b"2"),
        other,
    ]
    failures, found = applied(tmp_path, tickets, {})
    assert sorted(failures) == [1, 3]
    assert "an earlier write of the partition" in failures[3]
    assert found == {b"\0\0\0a": b"before", b"\0\0\0b": b"after"}


def test_size_of_a_merge_is_that_of_its_rows() -> None:
    step = step_of((1, 0), rows=1)
    step.bytes = 5_000_000
    (_, _, writes) = merge_ticket(step)
    assert writer_process._size_of([writes]) == 5_000_000 + 3 + 1


async def test_merge_of_chunks_that_are_not_there_ends_the_process(tmp_path: Path) -> None:
    """This copy is not what its primary's is: nothing may be built on it."""
    lost: list[str] = []
    store = Store(config_of(tmp_path))
    writer = lone_writer(store, lost.append)
    await writer.start()
    _, _, writes = merge_ticket(step_of((1, 0), rows=1))
    with pytest.raises(UnknownFateError):
        await asyncio.wait_for(writer.submit(writes, 1, 1), WAIT_S)
    assert lost == ["the writer process ended"]
    assert not await writer.stop()
    assert store.read_copies([0])[0].complete_through == 0
    store.close(clean=False)
