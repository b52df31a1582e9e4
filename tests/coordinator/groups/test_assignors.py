"""The strategies that share partitions: published examples, and properties of all results.

The examples of ``range`` and ``round_robin`` are those in the documentation of Kafka's assignors.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_coordinator.core.groups.assignors import assign
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import PartitionId

RANGE, ROUND_ROBIN, STICKY = GroupStrategy.RANGE, GroupStrategy.ROUND_ROBIN, GroupStrategy.STICKY
Shares = Mapping[PartitionId, str]


def topics(*counts: int) -> dict[KeyspaceId, range]:
    """Return keyspaces 0, 1 ... with so many partitions; the first partition of t is 100 t."""
    return {KeyspaceId(t): range(100 * t, 100 * t + n) for t, n in enumerate(counts)}


def subscribed(**wanted: str) -> dict[str, frozenset[KeyspaceId]]:
    return {member: frozenset(KeyspaceId(int(t)) for t in of) for member, of in wanted.items()}


def printed(shares: Shares) -> dict[str, str]:
    """Return each member's partitions as Kafka writes them: ``t0p1``."""
    found: dict[str, list[str]] = {}
    for p in sorted(shares):
        found.setdefault(shares[p], []).append(f"t{p // 100}p{p % 100}")
    return {member: " ".join(partitions) for member, partitions in sorted(found.items())}


@pytest.mark.parametrize(
    ("strategy", "members", "counts", "expected"),
    [
        (
            RANGE,
            subscribed(C0="01", C1="01"),
            (3, 3),
            {"C0": "t0p0 t0p1 t1p0 t1p1", "C1": "t0p2 t1p2"},
        ),
        (
            ROUND_ROBIN,
            subscribed(C0="01", C1="01"),
            (3, 3),
            {"C0": "t0p0 t0p2 t1p1", "C1": "t0p1 t1p0 t1p2"},
        ),
        (
            ROUND_ROBIN,
            subscribed(C0="0", C1="01", C2="012"),
            (1, 2, 3),
            {"C0": "t0p0", "C1": "t1p0", "C2": "t1p1 t2p0 t2p1 t2p2"},
        ),
    ],
)
def test_published_examples_are_shared_as_published(
    strategy: GroupStrategy,
    members: dict[str, frozenset[KeyspaceId]],
    counts: tuple[int, ...],
    expected: dict[str, str],
) -> None:
    assert printed(assign(strategy, members, topics(*counts), {})) == expected


def test_sticky_keeps_the_published_example_when_a_member_goes() -> None:
    """Three members, four topics of two partitions; C1 goes (Kafka's StickyAssignor, example 1)."""
    counts = topics(2, 2, 2, 2)
    before = {0: "C0", 101: "C0", 300: "C0", 1: "C1", 200: "C1", 301: "C1", 100: "C2", 201: "C2"}
    owners = {PartitionId(p): m for p, m in before.items()}
    after = assign(STICKY, subscribed(C0="0123", C2="0123"), counts, owners)
    assert all(after[p] == m for p, m in owners.items() if m != "C1")
    assert Counter(after.values()) == {"C0": 4, "C2": 4}


def test_sticky_keeps_the_published_example_of_different_subscriptions() -> None:
    """C0 {t0}, C1 {t0, t1}, C2 {t0, t1, t2}, and C0 goes (Kafka's StickyAssignor, example 2): C1
    and C2 keep all that they had.
    """
    counts = topics(1, 2, 3)
    first = assign(STICKY, subscribed(C0="0", C1="01", C2="012"), counts, {})
    assert printed(first) == {"C0": "t0p0", "C1": "t1p0 t1p1", "C2": "t2p0 t2p1 t2p2"}
    after = assign(STICKY, subscribed(C1="01", C2="012"), counts, first)
    assert printed(after) == {"C1": "t0p0 t1p0 t1p1", "C2": "t2p0 t2p1 t2p2"}


def test_sticky_passes_partitions_along_a_chain_of_members() -> None:
    """a and c have no keyspace in common: a's share falls and c's rises only by way of b."""
    counts, members = topics(3, 3), subscribed(a="0", b="01", c="1")
    before = {0: "a", 1: "a", 2: "a", 100: "b", 101: "b", 102: "c"}
    shares = assign(STICKY, members, counts, {PartitionId(p): m for p, m in before.items()})
    assert Counter(shares.values()) == {"a": 2, "b": 2, "c": 2}
    assert sum(shares[PartitionId(p)] == m for p, m in before.items()) == 4


def test_members_without_a_share_and_keyspaces_without_members_are_left_out() -> None:
    for strategy in GroupStrategy:
        shares = assign(strategy, subscribed(a="0", b="0", c="07"), topics(2, 5), {})
        assert sorted(shares) == [0, 1]
        assert assign(strategy, {}, topics(2), {}) == {}


# --- properties -------------------------------------------------------------------------------


@st.composite
def groups(
    draw: st.DrawFn, *, equal: bool = False, partitions_max: int = 12
) -> tuple[dict[str, frozenset[KeyspaceId]], dict[KeyspaceId, range], dict[PartitionId, str]]:
    counts = draw(st.lists(st.integers(1, partitions_max), min_size=1, max_size=3))
    keyspaces = topics(*counts)
    everything = frozenset(keyspaces)
    names = draw(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1))
    wanted = st.just(everything) if equal else st.frozensets(st.sampled_from(sorted(everything)))
    members = {name: draw(wanted) for name in names}
    owners = {
        PartitionId(p): draw(st.sampled_from("abcdefghi"))
        for partition_ids in keyspaces.values()
        for p in partition_ids
        if draw(st.booleans())
    }
    return members, keyspaces, owners


@given(groups(), st.sampled_from(GroupStrategy))
def test_each_partition_has_one_owner_that_subscribes_to_it(
    group: tuple[dict[str, frozenset[KeyspaceId]], dict[KeyspaceId, range], dict[PartitionId, str]],
    strategy: GroupStrategy,
) -> None:
    members, keyspaces, owners = group
    shares = assign(strategy, members, keyspaces, owners)
    wanted = {k for subscribed_to in members.values() for k in subscribed_to}
    assert set(shares) == {p for k in wanted for p in keyspaces[k]}
    for k, partition_ids in keyspaces.items():
        assert all(k in members[shares[PartitionId(p)]] for p in partition_ids if p in shares)
    again = assign(strategy, dict(reversed(members.items())), keyspaces, owners)
    assert shares == again, "the result does not depend on the order of what is given"


@given(groups(equal=True), st.sampled_from([ROUND_ROBIN, STICKY]))
def test_shares_differ_by_one_at_most_where_subscriptions_are_equal(
    group: tuple[dict[str, frozenset[KeyspaceId]], dict[KeyspaceId, range], dict[PartitionId, str]],
    strategy: GroupStrategy,
) -> None:
    members, keyspaces, owners = group
    shares = Counter(assign(strategy, members, keyspaces, owners).values())
    counts = [shares[member] for member in members]
    assert max(counts) - min(counts) <= 1


def every_assignment(
    members: Mapping[str, frozenset[KeyspaceId]], keyspaces: Mapping[KeyspaceId, range]
) -> Iterator[dict[PartitionId, str]]:
    choices = [
        [(PartitionId(p), m) for m, wanted in members.items() if k in wanted]
        for k, partition_ids in keyspaces.items()
        for p in partition_ids
    ]
    for chosen in itertools.product(*(choice for choice in choices if choice)):
        yield dict(chosen)


def cost(shares: Shares, owners: Shares) -> tuple[int, int]:
    """Return how uneven the shares are, and how many partitions have another owner."""
    squares = sum(n * n for n in Counter(shares.values()).values())
    return squares, sum(owners.get(p) != m for p, m in shares.items())


@settings(max_examples=150, deadline=None)
@given(groups(partitions_max=3))
def test_sticky_is_the_best_of_all_assignments(
    group: tuple[dict[str, frozenset[KeyspaceId]], dict[KeyspaceId, range], dict[PartitionId, str]],
) -> None:
    members, keyspaces, owners = group
    members = dict(list(members.items())[:4])
    keyspaces = dict(itertools.islice(keyspaces.items(), 3))
    if sum(map(len, keyspaces.values())) > 6:
        keyspaces = {k: r[:2] for k, r in keyspaces.items()}
    shares = assign(STICKY, members, keyspaces, owners)
    best = min(cost(other, owners) for other in every_assignment(members, keyspaces))
    assert cost(shares, owners) == best


@given(groups(equal=True, partitions_max=40))
def test_sticky_moves_the_fewest_possible_where_subscriptions_are_equal(
    group: tuple[dict[str, frozenset[KeyspaceId]], dict[KeyspaceId, range], dict[PartitionId, str]],
) -> None:
    members, keyspaces, owners = group
    shares = assign(STICKY, members, keyspaces, owners)
    count = len(shares)
    had = Counter(owners[p] for p in shares if owners.get(p) in members)
    low, more = divmod(count, len(members))
    kept_max = sum(min(had[m], low) for m in members)
    kept_max += min(more, sum(had[m] > low for m in members))
    assert sum(owners.get(p) == m for p, m in shares.items()) == kept_max


@pytest.mark.parametrize("strategy", GroupStrategy)
@pytest.mark.parametrize("keyspaces", [1, 8])
def test_large_group_is_shared_within_a_tenth_of_a_second(
    strategy: GroupStrategy, keyspaces: int
) -> None:
    """1,024 partitions, 100 members of different subscriptions, of which ten went and ten came."""
    counts = topics(*[1024 // keyspaces] * keyspaces)
    counts = {k: range(10_000 * k, 10_000 * k + len(r)) for k, r in counts.items()}
    everything = sorted(counts)

    def members(first: int) -> dict[str, frozenset[KeyspaceId]]:
        return {
            f"m{i}": frozenset(everything if i % 3 else everything[: 1 + i % keyspaces])
            for i in range(first, first + 100)
        }

    owners = assign(strategy, members(0), counts, {})
    took_s = []
    for _ in range(3):
        began = time.process_time()
        shares = assign(strategy, members(10), counts, owners)
        took_s.append(time.process_time() - began)
    assert len(shares) == 1024
    assert min(took_s) < 0.1
