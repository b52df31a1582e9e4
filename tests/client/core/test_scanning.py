"""A scan's progress through pages, refusals and moves: no record twice, none missed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon.core.retry import RetryPolicy
from koinon.core.routing import Router
from koinon.core.scanning import ScanCall, ScanProgress, ScanReply
from koinon_proto.contract.errors import (
    InternalError,
    KoinonError,
    LeaseExpiredError,
    UnknownFateError,
)
from tests.client.kit.tables import PARTITIONS, not_primary, update

RECORDS = {p: [b"%02d-%02d" % (p, i) for i in range(p % 4 * 3)] for p in range(PARTITIONS)}
ALL = sorted(key for keys in RECORDS.values() for key in keys)
LEASE = LeaseExpiredError(node_id="n1")


def setup() -> tuple[Router, ScanProgress]:
    router = Router()
    router.on_update(update())
    progress = ScanProgress(range(PARTITIONS), RetryPolicy(random=Random(1)), keys_only=False)
    return router, progress


def page(call: ScanCall, limit: int, refused: dict[int, KoinonError]) -> ScanReply:
    """Answer as a node does."""
    keys: list[bytes] = []
    ids: list[int] = []
    cursor = None
    for index, p in enumerate(call.partition_ids):
        if p in refused:
            continue
        after = call.after_key if index == 0 else b""
        rest = [key for key in RECORDS[p] if key > after]
        room = limit - len(keys)
        keys += rest[:room]
        ids += [p] * len(rest[:room])
        if len(rest) > room:
            cursor = (p, keys[-1] if room else after)
            break
    return ScanReply(
        keys=keys,
        values=[b"v"] * len(keys),
        partition_ids=ids,
        versions=[1] * len(keys),
        expires_at_ms=[0] * len(keys),
        next=cursor,
        refused=refused,
    )


def test_scan_without_trouble_returns_all_by_partition_then_key() -> None:
    router, progress = setup()
    seen: list[bytes] = []
    while (call := progress.next_call(router.routing)) is not None:  # type: ignore[arg-type]
        entries, again = progress.settle(call, page(call, 4, {}), router)
        assert again is None
        seen += [entry.key for entry in entries]
    assert sorted(seen) == ALL
    for keys in RECORDS.values():
        own = [key for key in seen if key in keys]
        assert own == keys


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_scan_random_refusals_and_moves_returns_each_record_once(data: st.DataObject) -> None:
    router, progress = setup()
    seen: list[bytes] = []
    trouble, epoch = 30, 1
    while (call := progress.next_call(router.routing)) is not None:  # type: ignore[arg-type]
        refused: dict[int, KoinonError] = {}
        if trouble:
            trouble -= 1
            if data.draw(st.integers(0, 4)) == 0:
                error = data.draw(st.sampled_from([LEASE, UnknownFateError(reason="cut")]))
                entries, again = progress.settle(call, error, router)
                assert not entries
                assert again is not None
                continue
            for p in data.draw(st.sets(st.sampled_from(call.partition_ids))):
                epoch += 1
                owner = data.draw(st.integers(1, 3))
                refused[p] = data.draw(
                    st.sampled_from([not_primary(p, owner, epoch=epoch, version=epoch), LEASE])
                )
        limit = data.draw(st.integers(1, 7))
        entries, _ = progress.settle(call, page(call, limit, refused), router)
        seen += [entry.key for entry in entries]
    assert sorted(seen) == ALL


def test_scan_partition_refused_after_part_of_it_was_read_resumes_behind_that() -> None:
    router, progress = setup()
    call = progress.next_call(router.routing)  # type: ignore[arg-type]
    assert call is not None
    p = 3
    assert p in call.partition_ids
    reply = ScanReply(
        keys=RECORDS[p][:2],
        values=[b"v"] * 2,
        partition_ids=[p, p],
        versions=[1, 1],
        expires_at_ms=[0, 0],
        next=None,
        refused={p: not_primary(p, owner=2)},
    )
    progress.settle(call, reply, router)
    seen: list[bytes] = list(reply.keys)
    while (call := progress.next_call(router.routing)) is not None:  # type: ignore[arg-type]
        entries, _ = progress.settle(call, page(call, 50, {}), router)
        seen += [entry.key for entry in entries if entry.key in RECORDS[p]]
    assert seen == RECORDS[p]


def test_scan_only_refusals_left_waits() -> None:
    router, progress = setup()
    waits = 0
    for _ in range(9):
        call = progress.next_call(router.routing)  # type: ignore[arg-type]
        assert call is not None
        refused: dict[int, KoinonError] = dict.fromkeys(call.partition_ids, LEASE)
        _, again = progress.settle(call, page(call, 5, refused), router)
        waits += again is not None
    assert waits >= 3
    assert progress.last_error is LEASE


def test_scan_page_that_does_not_advance_is_a_defect() -> None:
    router, progress = setup()
    call = progress.next_call(router.routing)  # type: ignore[arg-type]
    assert call is not None
    stuck = ScanReply(
        keys=(),
        values=(),
        partition_ids=(),
        versions=(),
        expires_at_ms=(),
        next=(call.partition_ids[0], b""),
        refused={},
    )
    with pytest.raises(InternalError):
        progress.settle(call, stuck, router)
