"""SIGHUP ends no server: each goes on, and opens its audit log and identity file again."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path

from koinon.certs.authority import Authority
from koinon.local import LocalCluster, Setup
from koinon.local.processes import identify
from koinon.operate.admin import Admin
from koinon_proto.contract.access import User
from koinon_proto.security.transport import dialing
from tests.conftest import ClusterFactory
from tests.kit.waiting import wait_until


def test_servers_go_on_after_a_hangup_and_read_their_files_again(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    logs = {name: tmp_path / f"{name}.jsonl" for name in ("c1", "n1")}
    cluster = make_cluster(
        nodes=1,
        coordinators=1,
        tls=True,
        setup=Setup(
            coordinator_flags=["--audit-log", str(logs["c1"])],
            node_flags=["--audit-log", str(logs["n1"]), "--audit-data-every", "1"],
        ),
    )
    cluster.start()
    cluster.wait_ready()
    pids = {name: cluster.pid(name) or 0 for name in logs}
    children = Path(f"/proc/{pids['n1']}/task/{pids['n1']}/children").read_text().split()
    assert children, "the node has a writer"
    with (
        cluster.client() as client,
        Admin(cluster.coordinators, dialing=dialing(cluster.tls_bundle)) as admin,
    ):

        def use(number: int) -> None:
            client.put(b"k%d" % number, b"v")
            admin.access.put_user(User(name=f"user{number}"))

        use(0)
        for name, log in logs.items():
            wait_until(log.exists, f"the audit log of {name}")
            log.rename(log.with_suffix(".moved"))
            renew(cluster, name)
        for pid in (*pids.values(), *map(int, children)):
            os.kill(pid, signal.SIGHUP)
        for name in logs:
            wait_until(
                lambda name=name: said(cluster, name, "SIGHUP", "identity file read again"),  # type: ignore[misc]
                f"{name} to read its files again",
            )
        use(1)
        for name, log in logs.items():
            wait_until(log.exists, f"the audit log of {name} to be opened anew")
            before, after = (
                [json.loads(line)["seq"] for line in path.read_text().splitlines()]
                for path in (log.with_suffix(".moved"), log)
            )
            assert after[0] == before[-1] + 1, "no line is lost"
        assert client.get(b"k0") == client.get(b"k1") == b"v"
    assert {name: cluster.pid(name) for name in logs} == pids
    for name in ("n1", "c1"):
        os.kill(pids[name], signal.SIGQUIT)
        wait_until(lambda name=name: identify(pids[name]) is None, f"{name} to end")  # type: ignore[misc]
        assert said(cluster, name, "stopped")


def renew(cluster: LocalCluster, name: str) -> None:
    directory = Path(cluster.tls_bundle).parent
    kind = "node" if name.startswith("n") else "coordinator"
    Authority.open(directory).renew(directory / f"{kind}-{name}.pem", now=datetime.now(UTC))


def said(cluster: LocalCluster, name: str, *words: str) -> bool:
    log = cluster.log_path(name).read_text()
    return all(word in log for word in words)
