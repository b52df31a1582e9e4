"""Plans on real nodes that have little room: what fits is moved, and no write is refused."""

from __future__ import annotations

from koinon.client import Client
from koinon.local import Setup
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.machines import used_share
from koinon.operate.plans import PlanKind, PlanRequest
from tests.conftest import ClusterFactory
from tests.integration.copies import is_settled
from tests.kit.waiting import wait_until

TIMEOUT_S = 60.0
MAP_BYTES = 16 << 20
ROWS = 1_500  # which fill three such maps by some 60 %


def overwrite(client: Client, letter: bytes) -> None:
    """Write all rows, some of them at once: what waits to be written takes room too."""
    for first in range(0, ROWS, 50):
        rows = {b"k%d" % n: letter * 20_000 for n in range(first, first + 50)}
        client.put_many(rows).raise_for_errors()


def test_drain_fills_no_node_so_that_writes_would_be_refused(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(
        nodes=3,
        coordinators=1,
        setup=Setup(
            coordinator_flags=["--partitions", "64", "--replication-factor", "1"],
            node_flags=["--map-size-bytes", str(MAP_BYTES)],
        ),
    )
    cluster.start()
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every partition served")
    with cluster.client(timeout_ms=30_000) as client, cluster.admin(timeout_ms=30_000) as admin:
        overwrite(client, b"v")

        def is_heard(status: ClusterStatus) -> bool:
            return all(used_share(session) > 0.5 for session in status.sessions)

        cluster.wait_for(is_heard, timeout_s=TIMEOUT_S, what="what the nodes store")
        request = PlanRequest(kind=PlanKind.DRAIN, node_id="n3")
        plan = admin.plan(request)
        assert "no_room" in {refusal.code for refusal in plan.refusals}
        assert plan.moves
        admin.execute(request, plan.plan_id)
        wait_until(lambda: not admin.moves().moves, "the end of the moves", timeout_s=TIMEOUT_S)
        assert max(map(used_share, cluster.status().sessions)) < 0.95
        overwrite(client, b"w")
