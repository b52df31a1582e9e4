"""A change that a follower queued counts when it is durable, whether a caller waits or not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from koinon_node.core.formats import records
from koinon_node.core.formats.records import PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_node.replication.applier import Applier, Change, one
from koinon_proto.contract.table import first_sequence
from tests.node.kit.held_writer import EPOCH, Bench, settle, with_engine

START = first_sequence(EPOCH)


def test_change_whose_waiter_is_cancelled_is_counted_when_it_is_durable(tmp_path: Path) -> None:
    """A pass that ends while its page is written: the copy is marked, in memory as in the store,
    and busy until then. Else it would be described as it was before, and its tail never repaired.
    """

    async def use(bench: Bench) -> None:
        applier = Applier(bench.local, bench.writer, bench.limits)
        bench.channel.held = True
        ids, through = one(0, START)
        key, record = b"\0\0\0k", records.encode_record(START + 5, b"v")
        change = Change(
            partition_ids=ids,
            complete_through=through,
            under_epoch=EPOCH,
            state=CopyState.DIRTY_TAIL,
            keys=[key],
            records=[record],
        )

        async def wait() -> None:
            await applier.submit(change)

        waiting = asyncio.create_task(wait())
        await settle(waiting)
        waiting.cancel()
        await settle(waiting)
        assert applier.busy[0] == 1
        assert bench.copies.states[0] == CopyState.USABLE
        bench.channel.release()
        await applier.idle([0])
        assert bench.store.get(key) == record
        assert bench.copies.states[0] == CopyState.DIRTY_TAIL

    with_engine(tmp_path, use)


def test_change_refused_is_not_counted_though_nobody_waits(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        applier = Applier(bench.local, bench.writer, bench.limits)
        bench.channel.failing = {0: "no room"}
        ids, through = one(0, START + 7)
        epochs = {0: PartitionEpochs(primary_epoch=EPOCH)}
        change = Change(partition_ids=ids, complete_through=through, epochs=epochs)
        errors: list[object] = []
        applier.submit(change, errors.append)
        await applier.idle([0])
        assert len(errors) == 1
        assert errors[0] is not None
        assert bench.copies.complete_through[0] == START

    with_engine(tmp_path, use)
