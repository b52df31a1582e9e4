"""Certificates and their authority are replaced under a cluster that serves."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from koinon.certs import files
from koinon.certs.authority import CERTIFICATE_FILE
from koinon.cli.app import make_app
from koinon.local import LocalCluster
from koinon.local.identities import member_bundle
from koinon_proto.security.transport import BUNDLE_VARIABLE
from tests.checkers.steady import SteadyLoad
from tests.conftest import ClusterFactory
from tests.kit.waiting import wait_until

FLAGS = ["--partitions", "32"]
COMMANDS = (("renew",), *(("rotate-ca", step) for step in ("add", "issue", "drop")))


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.long)])
def test_replacing_the_authority_and_all_certificates_fails_no_operation(
    make_cluster: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    cluster = make_cluster(tmp_path / "c", nodes=3, tls=True, coordinator_flags=FLAGS)
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
    """Whether the member shows the certificate that is in its file."""
    host, _, port = cluster.address(name).rpartition(":")
    context = ssl.create_default_context(cafile=cluster.tls_bundle)
    context.load_cert_chain(cluster.tls_bundle)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname="server.koinon") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    kind = "node" if name in cluster.node_names else "coordinator"
    own = files.read(member_bundle(cluster.data_dir, kind, name)).certificate
    assert own is not None
    return shown == own.public_bytes(Encoding.DER)


def certs(*arguments: str) -> None:
    ended = CliRunner().invoke(make_app(["koinon.cli.certs"]), ["certs", *arguments])
    assert ended.exit_code == 0, ended.output
