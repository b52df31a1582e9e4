"""Certificates and their authority are replaced under a cluster that serves."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

import koinon
from koinon.certs import identity_files as files
from koinon.certs.authority import CERTIFICATE_FILE
from koinon.cli.app import make_app
from koinon.local import LocalCluster, Setup
from koinon.local.identities import member_bundle, prepare, root_bundle
from koinon.operate.admin import Admin
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.security.transport import BUNDLE_VARIABLE, PLAIN, dialing
from tests.checkers.steady import SteadyLoad
from tests.conftest import ClusterFactory
from tests.integration.rolling import restart, wait_well
from tests.kit.waiting import wait_until

FLAGS = ["--partitions", "32"]
PATIENT = ["--lease-ms", "3000", "--session-timeout-ms", "4000", "--check-quorum-ms", "900"]
"""A busy machine would now and then end a lease of a second by itself."""
COMMANDS = (("renew",), *(("rotate-ca", step) for step in ("add", "issue", "drop")))


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.long)])
def test_replacing_the_authority_and_all_certificates_fails_no_operation(
    make_cluster: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    cluster = make_cluster(tmp_path / "c", nodes=3, tls=True, setup=Setup(coordinator_flags=FLAGS))
    cluster.start()
    cluster.wait_ready()
    monkeypatch.setenv(BUNDLE_VARIABLE, cluster.tls_bundle)
    directory = tmp_path / "c" / "tls"
    first = (directory / CERTIFICATE_FILE).read_bytes()
    with SteadyLoad(cluster) as load:
        for number in range(rounds):
            for command in COMMANDS:
                certs(*command, "--ca", str(directory))
                for name in cluster.names:
                    wait_until(lambda name=name: in_use(cluster, name), f"{name}: {command}")  # type: ignore[misc]
                load.wait_for_progress()
                assert not load.failed, (number, command)
        old = (directory / CERTIFICATE_FILE).read_bytes()
        assert first not in old
        cluster.restart(cluster.node_names[0])  # everybody connects to it anew
        cluster.wait_ready()
        load.wait_for_progress()
    load.judge()


def in_use(cluster: LocalCluster, name: str) -> bool:
    """Tell whether the member shows the certificate that is in its file."""
    host, _, port = cluster.address(name).rpartition(":")
    context = ssl.create_default_context(cafile=cluster.tls_bundle)
    context.load_cert_chain(cluster.tls_bundle)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname="server.koinon") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
    except OSError:  # of TLS too, while files are replaced
        return False
    kind = "node" if name in cluster.node_names else "coordinator"
    own = files.read(member_bundle(cluster.data_dir, kind, name)).certificate
    assert own is not None
    return shown == own.public_bytes(Encoding.DER)


@pytest.mark.long
def test_turning_tls_on_in_a_live_cluster_fails_no_operation(
    make_cluster: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BUNDLE_VARIABLE, raising=False)
    cluster = make_cluster(nodes=3, setup=Setup(coordinator_flags=[*FLAGS, *PATIENT]))
    cluster.start()
    wait_well(cluster)
    root = root_bundle(tmp_path)
    for kind, names in (("coordinator", cluster.coordinator_names), ("node", cluster.node_names)):
        for name in names:
            prepare(tmp_path, kind, name)

    def roll(mode: str, load: SteadyLoad) -> None:
        for kind, names in (
            ("node", cluster.node_names),
            ("coordinator", cluster.coordinator_names),
        ):
            flags = "node_flags" if kind == "node" else "coordinator_flags"
            before = getattr(cluster._file, flags)
            for name in names:
                own = ["--tls", mode, "--tls-bundle", str(member_bundle(tmp_path, kind, name))]
                setattr(cluster._file, flags, [*before, *own])
                restart(cluster, name)
                load.wait_for_progress()
                assert not load.failed, (mode, name)
            setattr(cluster._file, flags, before)

    with SteadyLoad(cluster) as plain:
        roll("allow", plain)
        roll("prefer", plain)
    plain.judge()
    monkeypatch.setenv(BUNDLE_VARIABLE, str(root))
    monkeypatch.setattr(cluster, "_dialing", lambda: dialing(str(root)))
    cluster._admin = None
    with SteadyLoad(cluster) as secured:
        roll("require", secured)
    assert not secured.failed  # what it overwrites is the first load's
    with pytest.raises(UnavailableError):
        Admin(cluster.coordinators, timeout_ms=1_000, dialing=PLAIN).status()


def test_cluster_that_allows_tls_takes_plain_callers_too(make_cluster: ClusterFactory) -> None:
    flags = ["--tls", "allow"]
    cluster = make_cluster(
        coordinators=1,
        nodes=2,
        tls=True,
        setup=Setup(node_flags=flags, coordinator_flags=[*FLAGS, *flags]),
    )
    cluster.start()
    cluster.wait_ready()  # servers reach one another plain
    for bundle in (cluster.tls_bundle, None):
        how = PLAIN if bundle is None else dialing(bundle)
        with Admin(cluster.coordinators, dialing=how) as admin:
            status = admin.status()
            assert status.ready
            assert status.tls_mode == "allow"
            assert {session.tls_mode for session in status.sessions} == {"allow"}
            assert not status.open_addresses  # but to this machine
        with koinon.connect(cluster.coordinators, tls_bundle=bundle or "") as client:
            client.put(b"k", b"v")
            assert client.get(b"k") == b"v"


def certs(*arguments: str) -> None:
    ended = CliRunner().invoke(make_app(["koinon.cli.certs"]), ["certs", *arguments])
    assert ended.exit_code == 0, ended.output
