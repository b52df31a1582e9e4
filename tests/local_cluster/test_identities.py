"""A local cluster that takes only who shows a certificate."""

from __future__ import annotations

import json
import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import koinon
from koinon.certs import identity_files as files
from koinon.certs.authority import Authority, Identity
from koinon.certs.inspection import check_paths
from koinon.local import LocalCluster, Ports, Setup, identities
from koinon.local.cluster_files import LocalClusterError
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import BUNDLE_VARIABLE
from tests.conftest import ClusterFactory
from tests.kit.forked import Forked
from tests.kit.waiting import wait_until
from tests.scraping import scrape

FLAGS = ["--partitions", "16"]
REFUSED_MS = 1_000


def test_cluster_with_tls_takes_its_own_and_no_others(
    make_cluster: ClusterFactory, tmp_path: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BUNDLE_VARIABLE, raising=False)
    directory = tmp_path / "cluster"
    cluster = make_cluster(
        directory,
        coordinators=1,
        nodes=2,
        tls=True,
        setup=Setup(coordinator_flags=FLAGS),
        ports=Ports(metrics=True),
    )
    cluster.start(detached=True)
    cluster.wait_ready()
    assert cluster.tls_bundle == str(directory / "tls" / "user-root.pem")
    assert stat.S_IMODE((directory / "tls").stat().st_mode) == 0o700
    assert not [r for r in check_paths([directory / "tls"], now=datetime.now(UTC)) if r.problems]
    with cluster.client() as client:
        client.put(b"k", b"v")
        assert client.get(b"k") == b"v"
    the_command_line_needs_no_flag(cluster, forked)
    strangers_are_refused(cluster, tmp_path)
    ends_of_certificates_are_metrics(cluster)
    name = cluster.add_node()
    assert (directory / "tls" / f"node-{name}.pem").exists()
    cluster.wait_ready()
    assert name in {s.node_id for s in cluster.status().table.nodes.values()}  # type: ignore[union-attr]
    cluster.close()
    with pytest.raises(LocalClusterError, match="runs with TLS: stop it first"):
        make_cluster(directory, tls=False)
    again = make_cluster(directory)  # as the directory remembers
    assert again.leader() == "c1"
    again.stop()


def the_command_line_needs_no_flag(cluster: LocalCluster, forked: Forked) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KOINON_COORDINATORS"}
    environment |= {"KOINON_DATA": str(cluster.data_dir)}
    found = forked.run(["get", "k"], environment=environment)
    assert (found.returncode, found.stdout) == (0, b"v\n"), found.stderr
    named = {**environment, "KOINON_COORDINATORS": cluster.coordinators}
    status = forked.run(["admin", "status", "--json"], environment=named)
    assert json.loads(status.stdout)["ok"] is True


def strangers_are_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    """Neither without a certificate, nor with one of another authority; by whatever one dials."""
    now = datetime.now(UTC)
    other = Authority.create(tmp_path / "other", now=now)
    stranger = tmp_path / "other" / "root.pem"
    other.issue(Identity(kind=Kind.USER, name="root"), stranger, now=now)
    for options in ({}, {"tls_bundle": str(stranger)}):
        with pytest.raises(koinon.UnavailableError):
            koinon.connect(cluster.coordinators, timeout_ms=REFUSED_MS, **options)  # type: ignore[arg-type]


def ends_of_certificates_are_metrics(cluster: LocalCluster) -> None:
    directory = cluster.data_dir / "tls"
    client = directory / "client.pem"  # what a scraper shows
    context = ssl.create_default_context(cafile=str(client))
    context.load_cert_chain(str(client))

    def end(name: str, certificate: str) -> float:
        try:
            scraped = scrape(cluster.metrics_address(name), context=context)
        except OSError:  # of TLS too, while files are replaced
            return 0.0
        return scraped.sum("koinon_certificate_expiry_timestamp_seconds", certificate=certificate)

    authority = Authority.open(directory)
    for kind, name in (("coordinator", "c1"), ("node", "n1")):
        own = files.read(identities.member_bundle(cluster.data_dir, kind, name)).certificate
        assert own is not None
        assert end(name, "own") == own.not_valid_after_utc.timestamp()
        until = authority.certificate.not_valid_after_utc
        assert end(name, "authority") == until.timestamp()
    node = identities.member_bundle(cluster.data_dir, "node", "n1")
    before = end("n1", "own")
    authority.renew(node, now=datetime.now(UTC), days=100)
    wait_until(lambda: 0 < end("n1", "own") < before, "n1 has read its new certificate")
    with pytest.raises(OSError, match=r"(?i)reset|closed|pipe|certificate|handshake|EOF"):
        scrape(cluster.metrics_address("n1"), context=ssl.create_default_context(cafile=client))


def test_tls_is_turned_on_and_off_while_a_cluster_is_stopped(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    plain = make_cluster(
        tmp_path / "c", coordinators=1, nodes=1, setup=Setup(coordinator_flags=FLAGS)
    )
    assert plain.tls_bundle == ""
    with plain, plain.client() as client:
        client.put(b"k", b"v")
    for tls in (True, False):
        with make_cluster(tmp_path / "c", tls=tls) as cluster, cluster.client() as client:
            assert bool(cluster.tls_bundle) is tls
            assert client.get(b"k") == b"v"


def test_identities_are_made_anew_when_they_are_no_good(tmp_path: Path) -> None:
    def prepared() -> bytes:
        identities.prepare(tmp_path, "node", "n1")
        return identities.member_bundle(tmp_path, "node", "n1").read_bytes()

    first = prepared()
    assert prepared() == first
    path = identities.member_bundle(tmp_path, "node", "n1")
    path.unlink()
    second = prepared()
    assert second != first
    path.write_bytes(second[: len(second) // 2])
    third = prepared()
    assert third != second
    authority = Authority.open(tmp_path / "tls")
    soon = datetime.now(UTC) + identities.RENEWED_BEFORE - timedelta(days=1)
    authority.issue(
        Identity(kind=Kind.NODE, name="n1"), path, now=soon - timedelta(days=10), days=10,
        overwrite=True,
    )  # fmt: skip
    fourth = prepared()
    assert files.read(path).key_matches
    assert fourth != third
    for file in (tmp_path / "tls").iterdir():
        file.unlink()
    assert prepared() != fourth
    assert not [r for r in check_paths([tmp_path / "tls"], now=datetime.now(UTC)) if r.problems]
