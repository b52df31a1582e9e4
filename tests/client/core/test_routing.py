"""The router: tables, what refusals teach, and when to ask again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.core.routing import RefreshSchedule, Router
from koinon_proto.contract.errors import (
    ConfigurationError,
    PartitionerMismatchError,
    WrongClusterError,
)
from tests.client.kit.tables import PARTITIONS, not_primary, update


def router_with(*updates: object) -> Router:
    router = Router()
    router.on_update(update())
    return router


@given(ids=st.lists(st.integers(0, PARTITIONS - 1), min_size=1, max_size=100))
def test_group_any_rows_keeps_order_and_loses_none(ids: list[int]) -> None:
    routing = router_with().routing
    assert routing is not None
    groups = routing.group(np.array(ids, np.uint32))
    seen: list[int] = []
    for address, rows in groups:
        chosen = list(range(len(ids))) if rows is None else rows.tolist()
        assert chosen == sorted(chosen)
        assert {routing.owner_of[ids[row]] for row in chosen} == {address}
        seen += chosen
    assert sorted(seen) == list(range(len(ids)))
    assert len({address for address, _ in groups}) == len(groups)


def test_on_update_older_or_doubled_is_no_news() -> None:
    router = router_with()
    assert router.on_update(update({0: 3}, version=5))
    revision = router.revision
    assert not router.on_update(update({0: 2}, version=4))
    assert not router.on_update(update({0: 2}, version=5))
    assert router.revision == revision
    assert router.routing is not None
    assert router.routing.owner_of[0] == "host3:1"


def test_on_update_of_another_cluster_is_refused() -> None:
    router = router_with()
    with pytest.raises(WrongClusterError):
        router.on_update(update(cluster_id="other", version=9))


def test_on_update_unknown_partitioner_is_refused() -> None:
    from dataclasses import replace

    strange = update()
    strange = replace(strange, cluster=replace(strange.cluster, partitioner="crc"))
    with pytest.raises(ConfigurationError, match="crc"):
        Router().on_update(strange)


def test_on_update_partitioner_that_answers_otherwise_is_refused() -> None:
    from dataclasses import replace

    strange = update()
    cluster = replace(strange.cluster, partitioner_fingerprint=b"\x01" * 32)
    router = Router()
    with pytest.raises(PartitionerMismatchError, match="01" * 32):
        router.on_update(replace(strange, cluster=cluster))
    assert router.routing is None


def test_on_update_without_rows_is_no_news() -> None:
    from dataclasses import replace

    router = Router()
    assert not router.on_update(replace(update(), rows=()))
    assert router.routing is None


def test_learn_higher_epoch_redirects_only_that_partition() -> None:
    router = router_with()
    before = router.routing
    assert router.learn([not_primary(0, owner=2)])
    after = router.routing
    assert before is not None
    assert after is not None
    assert after.owner_of[0] == "host2:1"
    assert after.owner_of[1:] == before.owner_of[1:]
    assert before.owner_of[0] == "host1:1", "operations in flight keep theirs"
    assert after.revision == before.revision + 1
    assert router.wanted_version == 2


@pytest.mark.parametrize(
    "error", [not_primary(0, epoch=1), not_primary(0, owner=0), not_primary(99)]
)
def test_learn_no_higher_epoch_or_no_address_is_no_news(error: object) -> None:
    router = router_with()
    assert not router.learn([error])  # type: ignore[list-item]
    assert router.revision == 1


def test_learn_contradicting_nodes_never_bounces() -> None:
    router = router_with()
    assert router.learn([not_primary(0, owner=2, epoch=5)])
    assert not router.learn([not_primary(0, owner=3, epoch=4)])
    assert not router.learn([not_primary(0, owner=3, epoch=5)])


def test_learned_owner_outlives_an_older_table_and_yields_to_a_newer() -> None:
    router = router_with()
    router.learn([not_primary(0, owner=2, epoch=3)])
    router.on_update(update({0: 1}, version=2, epoch=2))
    assert router.routing is not None
    assert router.routing.owner_of[0] == "host2:1"
    router.on_update(update({0: 3}, version=3, epoch=3))
    assert router.routing.owner_of[0] == "host3:1"
    assert not router.routing.learned


def test_changed_since_tells_the_partitions_that_changed_from_the_others() -> None:
    router = router_with()
    router.on_update(update({0: 2}, version=2, epoch=2, base=1))
    router.learn([not_primary(1, owner=3, epoch=3)])
    routing = router.routing
    assert routing is not None
    assert routing.revision == 3
    assert routing.changed_since([5, 0], 1)
    assert not routing.changed_since([0], 2)
    assert routing.changed_since(np.array([1, 2], np.uint32), 2)
    assert not routing.changed_since([2, 3, 4], 1)
    assert not routing.changed_since([0, 1], 3)


def test_offline_partition_has_no_owner_and_says_why() -> None:
    router = router_with()
    router.on_update(update({4: 0}, version=2))
    assert router.routing is not None
    assert router.routing.owner_of[4] == ""
    assert str(router.routing.offline(4)).startswith("partition 4 ")


def test_refresh_schedule_without_news_waits_longer_up_to_its_bound() -> None:
    schedule = RefreshSchedule(first_s=0.1, max_s=0.5)
    assert schedule.delay_s(0.0) == 0.0
    waits = []
    for _ in range(5):
        schedule.on_end(news=False, now=10.0)
        waits.append(schedule.delay_s(10.0))
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    assert schedule.delay_s(10.3) == pytest.approx(0.2)
    schedule.on_end(news=True, now=11.0)
    assert schedule.delay_s(11.0) == pytest.approx(0.005), "news may follow news"
