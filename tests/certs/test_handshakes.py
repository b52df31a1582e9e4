"""Identity files as OpenSSL sees them, in handshakes without a network."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from koinon.certs import identity_files as files
from koinon.certs.authority import Authority, Identity
from koinon_proto.security.names import Kind
from tests.certs.conftest import NOW, issued


@dataclass
class Ended:
    """A handshake that has succeeded: what each side was shown."""

    client_saw: dict[str, Any]
    server_saw: dict[str, Any]


def context_of(path: Path, *, server: bool) -> ssl.SSLContext:
    """Return what a server or a client does with an identity file, checked as strictly as it can
    be: the whole file is its chain, and what it trusts are the authorities in it.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    bundle = files.read(path)
    assert bundle.certificate is not None
    with tempfile.NamedTemporaryFile() as own:
        own.write(files.text_of_key(bundle.key) + files.text_of([bundle.certificate]))  # type: ignore[arg-type]
        own.flush()
        made.load_cert_chain(own.name)
    made.load_verify_locations(cadata=files.text_of(bundle.authorities).decode())
    return made


def shake(client: Path, server: Path, name: str) -> Ended:
    """Let a client and a server of these identities meet; the client wants a server of a name.

    Raises:
        ssl.SSLError: one of them refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = context_of(client, server=False).wrap_bio(to_client, to_server, server_hostname=name)
    theirs = context_of(server, server=True).wrap_bio(to_server, to_client, server_side=True)
    waiting = [ours, theirs]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return Ended(ours.getpeercert() or {}, theirs.getpeercert() or {})
    raise AssertionError("the handshake does not end")


def test_identities_of_one_authority_meet_and_show_who_they_are(authority: Authority) -> None:
    c1, n1 = issued(authority, Kind.COORDINATOR, "c1"), issued(authority, Kind.NODE, "n1")
    met = shake(n1, c1, "coordinator.koinon")
    assert ("URI", "koinon:node:n1") in met.server_saw["subjectAltName"]
    assert ("URI", "koinon:coordinator:c1") in met.client_saw["subjectAltName"]
    assert shake(c1, n1, "n1.node.koinon")
    user, client = issued(authority, Kind.USER, "app"), issued(authority, Kind.CLIENT)
    assert ("URI", "koinon:user:app") in shake(user, n1, "node.koinon").server_saw["subjectAltName"]
    assert shake(client, n1, "node.koinon").server_saw["subjectAltName"] == (
        ("URI", "koinon:client"),
    )


def test_server_of_another_name_is_refused(authority: Authority) -> None:
    user, n1 = issued(authority, Kind.USER, "app"), issued(authority, Kind.NODE, "n1")
    for name in ("n2.node.koinon", "coordinator.koinon", "c1.coordinator.koinon"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake(user, n1, name)


def test_stranger_of_another_authority_is_refused_by_both_sides(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority.create(tmp_path / "other", now=NOW)
    n1, stranger = issued(authority, Kind.NODE, "n1"), issued(other, Kind.NODE, "n1")
    for client, server in ((stranger, n1), (n1, stranger)):
        with pytest.raises(ssl.SSLError, match=r"certificate verify failed|unknown ca"):
            shake(client, server, "n1.node.koinon")
    # Who trusts our authority, and is not of it, is refused by the server.
    bundle = files.read(stranger)
    files.write(
        stranger,
        files.text_of_key(bundle.key)  # type: ignore[arg-type]
        + files.text_of([bundle.certificate, authority.certificate]),  # type: ignore[list-item]
    )
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake(stranger, n1, "n1.node.koinon")


@pytest.mark.parametrize("kind", [Kind.USER, Kind.CLIENT])
def test_certificate_of_a_user_cannot_serve(authority: Authority, kind: Kind) -> None:
    n1 = issued(authority, Kind.NODE, "n1")
    guest = issued(authority, kind, "app" if kind is Kind.USER else "")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake(n1, guest, "app.node.koinon")


def test_certificate_of_a_server_cannot_sign_others(authority: Authority, tmp_path: Path) -> None:
    n1 = issued(authority, Kind.NODE, "n1")
    stolen = files.read(n1)
    assert stolen.certificate is not None
    rogue = Authority(tmp_path, [stolen.certificate], stolen.key)  # type: ignore[arg-type]
    made = issued(rogue, Kind.USER, "root")
    assert not files.is_authority(stolen.certificate)
    forged = files.read(made)
    chain = [forged.certificate, stolen.certificate, authority.certificate]
    files.write(made, files.text_of_key(forged.key) + files.text_of(chain))  # type: ignore[arg-type]
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(made, n1, "n1.node.koinon")


def test_expired_certificate_is_refused_and_a_slow_clock_is_borne_with(
    authority: Authority,
) -> None:
    n1 = issued(authority, Kind.NODE, "n1")
    old = issued(authority, Kind.USER, "old", now=NOW - timedelta(days=3), days=2)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake(old, n1, "n1.node.koinon")
    ahead = issued(authority, Kind.USER, "ahead", now=NOW + timedelta(minutes=4))
    assert shake(ahead, n1, "n1.node.koinon")
    far = issued(authority, Kind.USER, "far", now=NOW + timedelta(days=1))
    with pytest.raises(ssl.SSLCertVerificationError, match="not yet valid"):
        shake(far, n1, "n1.node.koinon")


def test_hosts_are_names_for_other_programs(authority: Authority) -> None:
    n1 = issued(authority, Kind.NODE, "n1", hosts=("store1.example.com", "10.0.0.7", "::1"))
    user = issued(authority, Kind.USER, "app")
    for name in ("store1.example.com", "10.0.0.7", "::1", "n1.node.koinon"):
        assert shake(user, n1, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake(user, n1, "10.0.0.8")


def test_rotation_never_parts_those_who_follow_step_by_step(authority: Authority) -> None:
    """At each step some have their new file and some the one before: all of them meet."""
    paths = [issued(authority, Kind.NODE, name) for name in ("n1", "n2")]

    def all_meet(before: dict[Path, bytes]) -> None:
        after = {path: path.read_bytes() for path in paths}
        for late in paths:
            late.write_bytes(before[late])
            for one, other in (paths, reversed(paths)):
                assert shake(one, other, "node.koinon")
            late.write_bytes(after[late])
        assert shake(paths[0], paths[1], "node.koinon")

    before = {path: path.read_bytes() for path in paths}
    stage = authority.add_successor(now=NOW)
    for path in paths:
        files.write_bundle(path, _trusting(path, stage))
    all_meet(before)
    before = {path: path.read_bytes() for path in paths}
    stage = stage.succeed(paths)
    for path in paths:
        stage.renew(path, now=NOW)
    all_meet(before)
    before = {path: path.read_bytes() for path in paths}
    stage = stage.drop_predecessor(paths)
    all_meet(before)
    late = authority.directory / "late.pem"  # who was left out is refused from now on
    files.write_bundle(late, _signed_by_old(authority))
    with pytest.raises(ssl.SSLError):
        shake(late, paths[0], "n1.node.koinon")


def _trusting(path: Path, authority: Authority) -> files.Bundle:
    bundle = files.read(path)
    return files.Bundle(
        key=bundle.key, certificate=bundle.certificate, authorities=authority.trusted
    )


def _signed_by_old(authority: Authority) -> files.Bundle:
    scratch = authority.directory / "scratch.pem"
    return authority.issue(Identity(kind=Kind.NODE, name="n3"), scratch, now=NOW)
