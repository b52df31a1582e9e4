"""Bulk loads on real processes: all of a load or none of it, whoever dies and whatever moves.

``KOINON_LOAD_ROUNDS=20 pytest tests/integration/test_loads.py`` is the longer form.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.loads_client import LoadsClient, LoadState
from koinon.operate.plans import PlanKind, PlanRequest
from koinon.spark.writing.jobs import Commit
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import InvalidArgumentError
from tests.conftest import ClusterFactory
from tests.integration.copies import assert_copies_are_identical, is_settled
from tests.integration.loading import Changes, Load, readable, rows_of, wait_until_clean
from tests.integration.watching import wait_for_table
from tests.integration.workload import Workload
from tests.kit.clusters import running_cluster

PARTITIONS = 64
ROWS = 40_000
TIMEOUT_S = 90.0
ROUNDS = int(os.environ.get("KOINON_LOAD_ROUNDS", "1"))

pytestmark = pytest.mark.timeout(300 * ROUNDS)


FEW_PARTITIONS = ["--partitions", str(PARTITIONS)]


@pytest.fixture(scope="module")
def whole_with() -> Iterator[Callable[[int], LocalCluster]]:
    """Returns the cluster with that replication factor, whole, whatever the last test has done."""
    with contextlib.ExitStack() as running:

        @functools.cache
        def with_factor(factor: int) -> LocalCluster:
            return running.enter_context(
                running_cluster(
                    setup=Setup(replication_factor=factor, coordinator_flags=FEW_PARTITIONS)
                )
            )

        def whole(factor: int) -> LocalCluster:
            cluster = with_factor(factor)
            for name in cluster.names:
                if cluster.pid(name) is None:
                    cluster.restart(name)
            settle(cluster)
            return cluster

        yield whole


def settle(cluster: LocalCluster) -> None:
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all replicas are in sync")


# --- what a load does --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[LocalCluster]:
    """One cluster for the tests that break nothing."""
    with running_cluster(coordinators=1, setup=Setup(coordinator_flags=FEW_PARTITIONS)) as cluster:
        yield cluster


def test_rows_of_a_load_are_readable_once_it_is_saved_and_nothing_else_is_left(
    small: LocalCluster,
) -> None:
    with small.client() as client:
        load = Load(small, rows_of("plain", ROWS))

        def nothing_is_visible() -> None:
            assert readable(client, load.rows) == 0
            assert not list(client.scan(prefix=b"plain/"))

        assert load.save(nothing_is_visible)
        assert readable(client, load.rows) == ROWS
        assert {e.key: e.value for e in client.scan(prefix=b"plain/")} == load.rows
        wait_until_clean(small, client)
    assert_copies_are_identical(small.status())


def test_overwrite_replaces_a_prefix_and_only_that(small: LocalCluster) -> None:
    with small.client() as client:
        old = rows_of("over", 3_000)
        client.put_many({**old, b"beside": b"stays"}).raise_for_errors()
        new = {key: value for key, value in rows_of("over", 5_000, 1).items() if b"7" in key}
        assert Load(small, new, overwrite=True, prefix="over/").save()
        assert {e.key: e.value for e in client.scan(prefix=b"over/")} == new
        assert client.get(b"beside") == b"stays"
        assert Load(small, {}, overwrite=True, prefix="over/").save()
        assert not list(client.scan(prefix=b"over/"))
    assert_copies_are_identical(small.status())


def test_key_that_repeats_fails_the_load_and_leaves_nothing(small: LocalCluster) -> None:
    with small.client() as client:
        load = Load(small, rows_of("twice", 1_000))
        reports = [*load.stage(), *Load.stage(load)]  # the same rows by other attempts
        with pytest.raises(InvalidArgumentError, match="1000 rows have the key of another row"):
            Commit(job=load.job, reports=reports).run()
        assert readable(client, load.rows) == 0
        wait_until_clean(small, client)


def test_attempts_that_the_commit_does_not_name_leave_nothing(small: LocalCluster) -> None:
    with small.client() as client:
        load = Load(small, rows_of("attempts", 1_000))
        load.stage()  # lost on its way to the driver
        load.commit(load.stage())
        assert readable(client, load.rows) == 1_000
        wait_until_clean(small, client)


@pytest.mark.long  # coordinator/test_loads_leader and the simulation try it without processes
def test_load_that_nobody_touches_is_given_up(small: LocalCluster) -> None:
    """The load that a killed driver and its killed workers leave behind."""
    with small.client() as client, LoadsClient(small.coordinators) as loads:
        load = Load(small, rows_of("left", 2_000), loadTimeout="10s")
        reports = load.stage()
        load_id = reports[0].load_id
        wait_until_clean(small, client)
        view = loads.get(load_id)
        assert view is not None
        assert view.state is LoadState.ABORTED
        with pytest.raises(LoadClosedError):
            load.commit(reports)
        assert readable(client, load.rows) == 0


def test_aborted_load_takes_no_more_rows(small: LocalCluster) -> None:
    with LoadsClient(small.coordinators) as loads:
        load = Load(small, rows_of("aborted", 2_000))
        loads.abort(load.stage()[0].load_id, reason="an operator")
        with pytest.raises(LoadClosedError):
            load.stage()


def test_writes_of_clients_during_a_merge_are_kept(small: LocalCluster) -> None:
    """Writes that are acknowledged after the load was saved win over it; those that go on beside
    it, under other keys, are not touched.
    """
    rows = rows_of("beside", ROWS)
    keys = list(rows)[::400]
    with small.client() as client, Workload(small, "workload") as workload:
        workload.wait_for_progress()
        assert Load(small, rows).save()
        workload.wait_for_progress()
        for key in keys:
            client.put(key, b"later")
        assert client.get_many(keys) == [b"later"] * len(keys)
    with small.client() as client:
        workload.check(client)
        assert not workload.errors
        rest = {key: value for key, value in rows.items() if key not in set(keys)}
        assert readable(client, rest) == len(rest)
    assert_copies_are_identical(small.status())


# --- who dies, and when ------------------------------------------------------------------------


class Killer:
    """Kills a member some moment after a stage of a load has begun, and starts it again."""

    def __init__(self, cluster: LocalCluster, victim: str, rng: random.Random) -> None:
        self._cluster = cluster
        self._victim = victim
        self._rng = rng
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def strike(self, within_s: float, *, merging: bool = False) -> None:
        """Begin; goes on beside the caller. ``merging``: once a load is seen to be committed."""
        delay_s = self._rng.uniform(0, within_s)
        self._thread = threading.Thread(target=self._run, args=(delay_s, merging))
        self._thread.start()

    def _run(self, delay_s: float, merging: bool) -> None:
        try:
            if merging:
                wait_for_table(
                    self._cluster.coordinators,
                    lambda table: any(load.merging for load in table.loads),
                    what="a load is being merged",
                )
            time.sleep(delay_s)
            name = self._victim
            if name == "leader":
                leader = self._cluster.wait_for(
                    lambda s: s.is_leader, timeout_s=TIMEOUT_S, what="one leads"
                )
                name = leader.member_id
            self._cluster.kill(name)
            time.sleep(self._rng.uniform(0.1, 2.5))
            self._cluster.restart(name)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error


def judge(client: Client, load: Load, committed: bool) -> None:
    """Check that all of the load is there, or none of it."""
    with LoadsClient(load.job.options.coordinators, timeout_s=TIMEOUT_S) as loads:
        view = next((v for v in loads.loads() if v.job_id == load.job.job_id), None)
        done = view is not None and view.state in (LoadState.MERGING, LoadState.DONE)
        assert done or not committed
        deadline = time.monotonic() + TIMEOUT_S
        while done and view is not None and view.state is not LoadState.DONE:
            assert time.monotonic() < deadline, view
            time.sleep(0.1)
            view = loads.get(view.load_id)
    assert readable(client, load.rows) == (len(load.rows) if done else 0)


SHORT = [(3, "leader", "preparing"), (3, "n1", "merging")]
"""Each victim. A node killed while rows are staged: spark/test_cluster has that."""


@pytest.mark.parametrize(
    ("factor", "victim", "stage"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in itertools.product((1, 3), ("n1", "leader"), ("staging", "preparing", "merging"))
    ],
)
def test_load_ends_whole_or_without_a_trace_whoever_is_killed(
    whole_with: Callable[[int], LocalCluster], factor: int, victim: str, stage: str
) -> None:
    cluster = whole_with(factor)
    rng = random.Random(f"{factor} {victim} {stage}")
    with cluster.client(timeout_ms=60_000) as client:
        for number in range(ROUNDS):
            load = Load(cluster, rows_of(f"{victim}-{stage}-{number}", ROWS))
            killer = Killer(cluster, victim, rng)
            if stage == "staging":
                killer.strike(0.8)
                committed = load.save()
            elif stage == "preparing":
                committed = load.save(functools.partial(killer.strike, 0.15))
            else:
                committed = load.save(functools.partial(killer.strike, 0.05, merging=True))
            killer.join()
            settle(cluster)
            judge(client, load, committed)
            if not readable(client, load.rows):
                again = Load(cluster, load.rows)
                assert again.save(), "a rerun succeeds"
                assert readable(client, load.rows) == ROWS
            wait_until_clean(cluster, client)
        settle(cluster)
        assert_copies_are_identical(cluster.status())


@pytest.mark.long  # "merging" above tries the kill, node/storage/test_merging what rows become
def test_load_that_deletes_and_expires_rows_is_whole_though_a_node_dies_while_it_is_merged(
    whole_with: Callable[[int], LocalCluster],
) -> None:
    cluster = whole_with(3)
    old = rows_of("changed", ROWS, 1)
    gone = set(list(old)[::3])
    deletes = [*gone, *rows_of("absent", 5_000)]
    new = {key: value for key, value in rows_of("changed", ROWS).items() if key not in gone}
    with cluster.client(timeout_ms=60_000) as client:
        assert Load(cluster, old).save()
        load = Changes(cluster, new, deletes)
        killer = Killer(cluster, "n1", random.Random("changes"))
        committed = load.save(functools.partial(killer.strike, 0.05, merging=True))
        killer.join()
        settle(cluster)
        judge(client, load, committed)
        entries = {entry.key: entry for entry in client.scan(prefix=b"changed/")}
        assert entries.keys() == new.keys()
        assert {key for key, entry in entries.items() if entry.expires_at_ms} == load.brief
        assert not list(client.scan(prefix=b"absent/"))
        wait_until_clean(cluster, client)
    settle(cluster)
    assert_copies_are_identical(cluster.status())


@pytest.mark.long  # the simulation has loads amid moves
def test_load_goes_on_while_its_partitions_move(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(
        coordinators=1, setup=Setup(replication_factor=2, coordinator_flags=FEW_PARTITIONS)
    )
    cluster.start()
    cluster.wait_ready()
    admin = Admin(cluster.coordinators)
    with cluster.client() as client, Workload(cluster, "workload") as workload:
        client.put_many(rows_of("ballast", 20_000)).raise_for_errors()
        cluster.add_node()
        cluster.wait_ready()
        loads = [Load(cluster, rows_of(f"moving{n}", ROWS // 2)) for n in range(3)]
        assert loads[0].save()
        request = PlanRequest(kind=PlanKind.REBALANCE)
        plan = admin.plan(request)
        assert plan.moves
        reports = loads[1].stage()
        admin.execute(request, plan.plan_id)
        loads[1].commit(reports)
        assert loads[2].save()
        cluster.wait_for(
            lambda s: is_settled(s) and not admin.moves().moves,
            timeout_s=TIMEOUT_S,
            what="the moves are over",
        )
        for load in loads:
            assert readable(client, load.rows) == ROWS // 2
    with cluster.client() as client:
        workload.check(client)
        wait_until_clean(cluster, client)
    assert_copies_are_identical(cluster.status())
