"""The engine's promises when something comes in between: a lost lease, a commit that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import Adoption
from koinon_node.partition.batches import LonePut, ScanPage, WriteBatch
from koinon_node.partition.writes import Writes
from koinon_proto.contract.errors import (
    LeaseExpiredError,
    NotEnoughReplicasError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)
from tests.node.kit.held_writer import EPOCH, PARTITIONS, Bench, settle

Call = Callable[[Bench], Awaitable[Any]]
READS: dict[str, Call] = {
    "get": lambda bench: bench.get(b"k"),
    "get with versions": lambda bench: bench.get(b"k", want_versions=True),
    "batch get": lambda bench: bench.get(b"k", b"other", b"missing"),
    "scan": lambda bench: bench.scan(),
}
LOSSES: dict[str, Callable[[Bench], None]] = {
    "lease": Bench.lose_lease,
    "partition": Bench.lose_partition_0,
}
NOTHING = ScanPage(
    table_version=1, partition_ids=(), prefix=b"", after_key=b"", limit=0, keys_only=True
)
every_read = pytest.mark.parametrize("call", READS.values(), ids=READS.keys())
every_loss = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES.keys())


# --- the lease, before and after ---------------------------------------------------------------


async def test_put_whose_partition_is_lost_once_it_was_let_in_is_of_unknown_fate(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's thread publishes a table at any moment, between two lines of a put, too."""
    look = Writes._refusal

    def then_lost(*args: Any) -> Any:
        refusal = look(*args)
        bench.lose_partition_0()
        return refusal

    monkeypatch.setattr(Writes, "_refusal", then_lost)
    with pytest.raises(UnknownFateError, match="handed over"):
        await bench.engine.writes.put(LonePut(b"k", b"v", 0))


@every_loss
@every_read
async def test_read_under_which_the_lease_or_epoch_ends_is_refused(
    bench: Bench, call: Call, lose: Callable[[Bench], None]
) -> None:
    await bench.put(b"k", b"other")
    bench.store.after_read = lambda: lose(bench)
    with pytest.raises(LeaseExpiredError):
        await call(bench)
    assert bench.store.after_read is None


@every_read
async def test_read_without_a_lease_is_refused_before_the_store_is_read(
    bench: Bench, call: Call
) -> None:
    bench.lose_lease()
    bench.store.after_read = lambda: pytest.fail("it was read")
    with pytest.raises(LeaseExpiredError):
        await call(bench)


async def test_scan_of_nothing_under_which_the_lease_ends_is_refused(bench: Bench) -> None:
    answers = iter([0.0, 2e9])
    bench.state.now = lambda: next(answers)
    with pytest.raises(LeaseExpiredError):
        await bench.engine.scans.scan(NOTHING)


@every_loss
async def test_write_durable_after_the_lease_or_epoch_ended_is_answered_as_unknown(
    bench: Bench, lose: Callable[[Bench], None]
) -> None:
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(b"k"))
    await settle(write)
    assert not write.done()
    lose(bench)
    bench.channel.release()
    with pytest.raises(UnknownFateError):
        await write
    assert bench.store.get(b"\0\0\0k") is not None


async def test_rows_that_wrote_nothing_are_refused_where_what_others_wrote_is_of_unknown_fate(
    bench: Bench,
) -> None:
    """They can be asked for again: nothing may have been written for them."""
    held = int((await bench.put(b"held")).versions[0])
    batch = WriteBatch(
        table_version=1,
        keys=[b"new", b"held", b"gone", b"held"],
        values=[b"v", b"v", b"", b"v"],
        partition_ids=np.zeros(4, np.uint32),
        deletes=frozenset((2,)),
        conditions={0: 0, 1: 0, 3: held + 1},
        list_present=True,
    )
    bench.channel.held = True
    write = asyncio.ensure_future(bench.engine.writes.write(batch))
    await settle(write)
    bench.lose_partition_0()
    bench.channel.release()
    answer = await write
    told = {row: type(error) for row, error in answer.row_errors.items()}
    assert told.pop(0) is UnknownFateError
    assert told == dict.fromkeys((1, 2, 3), LeaseExpiredError)
    assert not answer.present
    assert not answer.absent


async def test_batch_that_wrote_nothing_is_refused_whole(bench: Bench) -> None:
    await bench.put(b"k")
    bench.store.after_read = bench.lose_partition_0
    with pytest.raises(LeaseExpiredError):
        await bench.put(b"k", if_version=0)
    assert bench.store.after_read is None


@pytest.mark.parametrize("keys", [(b"k",), (b"k", b"l")], ids=["one-row", "two-rows"])
async def test_write_complete_before_its_partition_was_handed_on_is_acknowledged(
    bench: Bench, keys: tuple[bytes, ...]
) -> None:
    """A hand-over waits until all is complete, and not until everybody has been told."""
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(*keys))
    await settle(write)
    bench.channel.release()
    bench.lose_partition_0()
    assert not write.done()
    answer = await write
    assert not answer.refusals
    assert not answer.row_errors
    assert answer.versions.all()


@pytest.mark.parametrize("keys", [(b"k",), (b"k", b"l")], ids=["one-row", "two-rows"])
async def test_write_complete_before_the_lease_ended_is_answered_as_unknown_all_the_same(
    bench: Bench, keys: tuple[bytes, ...]
) -> None:
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(*keys))
    await settle(write)
    bench.channel.release()
    bench.lose_lease()
    with pytest.raises(UnknownFateError):
        await write


async def test_write_without_a_lease_is_refused_and_writes_nothing(bench: Bench) -> None:
    sent = bench.channel.groups_sent
    bench.lose_lease()
    with pytest.raises(LeaseExpiredError):
        await bench.put(b"k")
    assert bench.channel.groups_sent == sent
    assert bench.writer.pending_rows == 0


@pytest.mark.bench(limits=Limits(step_rows=2))
async def test_write_in_steps_stops_at_the_step_before_which_the_lease_ended(bench: Bench) -> None:
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(b"a", b"b", b"c", b"d"))
    await asyncio.sleep(0)
    assert bench.writer.pending_rows == 2
    bench.lose_lease()
    bench.channel.release()
    with pytest.raises(UnknownFateError):
        await write
    assert [bench.store.get(b"\0\0\0" + key) is None for key in (b"a", b"c", b"d")] == [
        False,
        True,
        True,
    ]


# --- what is in flight -------------------------------------------------------------------------


@pytest.mark.bench(limits=Limits(group_bytes=3_500))
async def test_writes_queued_at_once_do_not_make_a_group_larger_than_a_message(
    bench: Bench,
) -> None:
    bench.channel.held = True
    writes = [asyncio.ensure_future(bench.put(b"%d" % n, value=bytes(1_000))) for n in range(9)]
    for write in writes:
        await settle(write)
    bench.channel.release()
    await asyncio.gather(*writes)
    groups = dict(
        zip(bench.writer.commit_bytes.bounds, bench.writer.commit_bytes.counts, strict=False)
    )
    assert groups[4_096] >= 3
    assert sum(bench.writer.commit_bytes.counts) == groups[1_024] + groups[4_096]
    for n in range(9):
        assert (await bench.get(b"%d" % n)).values == [bytes(1_000)]


@pytest.mark.parametrize("keys", [(b"k",), (b"other", b"k")], ids=["one key", "a batch"])
async def test_read_of_a_key_in_flight_waits_until_it_is_durable(
    bench: Bench, keys: tuple[bytes, ...]
) -> None:
    await bench.put(b"k", b"other", value=b"old")
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(b"k", value=b"new"))
    await settle(write)
    read = asyncio.ensure_future(bench.get(*keys))
    beside = await bench.get(b"other")
    assert beside.values == [b"old"]  # another key does not wait
    await settle(read)
    assert not read.done()
    bench.channel.release()
    assert (await read).values[-1] == b"new"
    await write


@pytest.mark.parametrize("call", [READS["get"], READS["batch get"]], ids=["get", "batch get"])
@pytest.mark.bench(limits=Limits(write_timeout_ms=20))
async def test_read_of_a_key_whose_write_does_not_end_is_answered_in_a_writes_time(
    bench: Bench, call: Any
) -> None:
    await bench.put(b"k", value=b"old")
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(b"k", value=b"new"))
    await settle(write)
    with pytest.raises(UnavailableError, match="in time"):
        await asyncio.wait_for(call(bench), 10.0)
    bench.channel.release()
    await write


# --- expiry ------------------------------------------------------------------------------------


@pytest.mark.parametrize("want_versions", [False, True])
@pytest.mark.parametrize("others", [(), (b"lasting", b"missing")], ids=["one key", "a batch"])
async def test_read_of_an_expired_record_finds_nothing(
    bench: Bench, others: tuple[bytes, ...], want_versions: bool
) -> None:
    await bench.put(b"lasting")
    await bench.put(b"k", ttl_ms=50)
    bench.clock.ms += 49
    assert (await bench.get(b"k", want_versions=want_versions)).values == [b"v"]
    bench.clock.ms += 1
    answer = await bench.get(b"k", *others, want_versions=want_versions)
    assert answer.values == [b"", b"v", b""][: 1 + len(others)]
    assert answer.missing == [0, 2][: 1 + len(others) // 2]
    if want_versions:
        assert (answer.versions[0], answer.expires_at_ms[0]) == (0, 0)


async def test_scan_over_an_expired_record_leaves_it_out(bench: Bench) -> None:
    await bench.put(b"a", b"c")
    await bench.put(b"b", ttl_ms=50)
    bench.clock.ms += 49
    assert (await bench.scan()).keys == [b"a", b"b", b"c"]
    bench.clock.ms += 1
    answer = await bench.scan()
    assert (answer.keys, answer.values) == ([b"a", b"c"], [b"v", b"v"])


@every_read
async def test_read_that_meets_an_expired_record_waits_until_its_removal_is_durable(
    bench: Bench, call: Call
) -> None:
    await bench.put(b"k", ttl_ms=50)
    bench.clock.ms += 50
    bench.channel.held = True
    read = asyncio.ensure_future(call(bench))
    await settle(read)
    assert not read.done()
    assert bench.store.get(b"\0\0\0k") is not None
    bench.channel.release()
    await read
    assert bench.store.get(b"\0\0\0k") is None


async def test_removal_of_an_expired_record_is_sequenced(bench: Bench) -> None:
    first = await bench.put(b"k", ttl_ms=50)
    bench.clock.ms += 50
    await bench.get(b"k")
    after = await bench.put(b"k")
    assert int(after.versions[0]) == int(first.versions[0]) + 2


@every_loss
@every_read
async def test_expired_record_of_a_partition_lost_meanwhile_is_not_removed(
    bench: Bench, call: Call, lose: Callable[[Bench], None]
) -> None:
    await bench.put(b"k", ttl_ms=50)
    bench.clock.ms += 50
    sent = bench.channel.groups_sent
    bench.store.after_read = lambda: lose(bench)
    with pytest.raises(LeaseExpiredError):
        await call(bench)
    assert (bench.channel.groups_sent, bench.writer.pending_rows) == (sent, 0)
    assert bench.store.get(b"\0\0\0k") is not None


async def test_expired_records_of_partitions_still_served_are_removed_beside_a_lost_one(
    bench: Bench,
) -> None:
    await bench.put(b"k", ttl_ms=50)
    await bench.put(b"k", ttl_ms=50, partition_id=1)
    bench.clock.ms += 50
    bench.store.after_read = bench.lose_partition_0
    with pytest.raises(LeaseExpiredError):
        await bench.scan(0, 1)
    assert bench.store.get(b"\0\0\0k") is not None
    assert bench.store.get(b"\0\1\0k") is None


async def test_reclaim_under_a_lease_removes_what_expired_and_only_where_it_leads(
    bench: Bench,
) -> None:
    await bench.put(b"k", ttl_ms=50)
    await bench.put(b"k", ttl_ms=50, partition_id=1)
    await bench.put(b"later", ttl_ms=51)
    bench.clock.ms += 50
    bench.lose_partition_0()
    assert not await bench.engine.sweeper.step(100)
    assert bench.store.get(b"\0\0\0k") is not None
    assert bench.store.get(b"\0\1\0k") is None
    assert bench.store.get(b"\0\0\0later") is not None


async def test_reclaim_without_a_lease_removes_nothing(bench: Bench) -> None:
    await bench.put(b"k", ttl_ms=50)
    bench.clock.ms += 50
    sent = bench.channel.groups_sent
    bench.lose_lease()
    assert not await bench.engine.sweeper.step(100)
    assert (bench.channel.groups_sent, bench.writer.pending_rows) == (sent, 0)
    assert bench.store.get(b"\0\0\0k") is not None


# --- adoption ----------------------------------------------------------------------------------


@pytest.mark.bench(lead=False)
async def test_adoption_ends_only_when_its_epochs_are_durable(bench: Bench) -> None:
    bench.channel.held = True
    adoption = asyncio.ensure_future(bench.replicator.adopt([Adoption(2, 7)]))
    await settle(adoption)
    assert not adoption.done()
    ((_, urgent, _),) = bench.channel.waiting
    assert urgent  # synced whatever the durability of records is
    assert bench.store.partition_epochs() == {}
    bench.channel.release()
    await adoption
    assert bench.store.partition_epochs()[2].primary_epoch == 7


async def test_sequences_after_an_adoption_belong_to_its_epoch(bench: Bench) -> None:
    answer = await bench.put(b"k")
    assert int(answer.versions[0]) >> 40 == EPOCH
    epochs = bench.store.partition_epochs()
    assert {p: e.primary_epoch for p, e in epochs.items()} == dict.fromkeys(
        range(PARTITIONS), EPOCH
    )
    assert records.decode_record(bench.store.get(b"\0\0\0k") or b"").value == b"v"


# --- bounds of what is read at the same time ---------------------------------------------------


@pytest.mark.parametrize("call", [READS["batch get"], READS["scan"]], ids=["batch get", "scan"])
@pytest.mark.bench(limits=Limits(reading_rows=3, scan_rows=2))
async def test_read_beyond_the_rows_that_others_read_is_refused_until_these_are_done(
    bench: Bench, call: Call
) -> None:
    await bench.put(b"k", b"other")
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(b"k", b"other", value=b"new"))
    await settle(write)
    first = asyncio.ensure_future(bench.get(b"k", b"other"))
    await settle(first)
    with pytest.raises(ResourceExhaustedError, match="rows being read"):
        await call(bench)
    bench.channel.release()
    await write
    assert (await first).values == [b"new"] * 2
    await call(bench)  # alone, whatever its size


@pytest.mark.bench(limits=Limits(reading_bytes=1_000))
async def test_read_beyond_the_bytes_that_others_hold_is_refused_and_gives_back_its_own(
    bench: Bench,
) -> None:
    await bench.put(b"k", b"other", value=bytes(600))
    bench.channel.held = True

    def write() -> None:  # it is in the store at once, and complete later
        writes.append(asyncio.ensure_future(bench.put(b"k", value=b"new")))

    writes: list[asyncio.Future[Any]] = []
    write()
    await settle(writes[0])
    first = asyncio.ensure_future(bench.get(b"other", b"k"))
    await settle(first)
    write()
    await settle(writes[1])
    bench.channel.commit_one()
    bench.channel.store_one()
    await settle(first)  # it holds what it has read, and waits for the second write
    assert not first.done()
    with pytest.raises(ResourceExhaustedError, match="bytes being read"):
        await bench.get(b"other")
    bench.channel.release()
    assert (await first).values == [bytes(600), b"new"]
    assert (await bench.get(b"other")).values == [bytes(600)]


@pytest.mark.bench(limits=Limits(step_rows=1))
async def test_write_whose_partition_loses_its_replicas_before_its_last_step_loses_only_these_rows(
    bench: Bench,
) -> None:
    def lose() -> None:
        bench.state.too_few[0] = bench.state.any_too_few = True

    asyncio.get_running_loop().call_soon(lose)
    answer = await bench.put(b"a", b"b")
    assert [type(error) for error in answer.row_errors.values()] == [NotEnoughReplicasError]
    assert list(answer.row_errors) == [1]
    assert (answer.versions > 0).tolist() == [True, False]
