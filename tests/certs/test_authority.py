"""The authority's directory, and the files that it writes."""

from __future__ import annotations

import os
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from koinon.certs import identity_files as files
from koinon.certs.authority import Authority, Identity, identity_of, set_trust, trusted_by
from koinon.certs.certificate_error import CertificateError
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.security.names import Kind
from tests.certs.conftest import NOW, issued


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_the_owners_alone_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Authority.create(tmp_path / "ca", now=NOW)
        elsewhere = tmp_path / "new" / "n1.pem"
        made.issue(Identity(kind=Kind.NODE, name="n1"), elsewhere, now=NOW)
    finally:
        os.umask(before)
    assert mode(made.directory) == 0o700
    assert {mode(path) for path in made.directory.iterdir()} == {0o600}
    assert mode(elsewhere) == 0o600
    assert mode(elsewhere.parent) == 0o700


def test_authority_is_never_overwritten(authority: Authority) -> None:
    content = {path: path.read_bytes() for path in authority.directory.iterdir()}
    with pytest.raises(CertificateError, match="never overwritten"):
        Authority.create(authority.directory, now=NOW)
    (authority.directory / "ca.pem").unlink()
    with pytest.raises(CertificateError, match="never overwritten"):
        Authority.create(authority.directory, now=NOW)
    assert (authority.directory / "ca.key").read_bytes() == content[authority.directory / "ca.key"]


def test_authority_needs_a_directory_of_its_own(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "mine").write_text("")
    with pytest.raises(CertificateError, match="others may look into it"):
        Authority.create(shared, now=NOW)
    assert mode(shared) == 0o755


def test_certificates_say_what_the_decisions_say(authority: Authority) -> None:
    root = authority.certificate.extensions
    constraints = root.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert root.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    lifetime = authority.certificate.not_valid_after_utc - NOW
    assert timedelta(days=3651) < lifetime <= timedelta(days=3652)

    bundle = files.read(issued(authority, Kind.NODE, "n1"))
    assert bundle.key_matches
    assert bundle.authorities == (authority.certificate,)
    certificate = bundle.certificate
    assert certificate is not None
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign) == (True, False)
    assert timedelta(minutes=4) < NOW - certificate.not_valid_before_utc < timedelta(minutes=6)
    assert identity_of(certificate) == Identity(kind=Kind.NODE, name="n1")


def test_certificate_does_not_outlive_its_authority(tmp_path: Path) -> None:
    made = Authority.create(tmp_path / "ca", now=NOW, days=10)
    bundle = files.read(issued(made, Kind.USER, "app", days=100))
    assert bundle.certificate is not None
    assert bundle.certificate.not_valid_after_utc == made.certificate.not_valid_after_utc
    with pytest.raises(CertificateError, match="the authority has expired"):
        issued(made, Kind.USER, "late", now=NOW + timedelta(days=11))


@pytest.mark.parametrize(
    ("kind", "name", "hosts"),
    [
        (Kind.NODE, "", ()),
        (Kind.NODE, "-n1", ()),
        (Kind.NODE, "n 1", ()),
        (Kind.NODE, "../n1", ()),
        (Kind.NODE, "n1:x", ()),
        (Kind.NODE, "n" * 129, ()),
        (Kind.NODE, "n" * 64, ()),
        (Kind.COORDINATOR, "c..1", ()),
        (Kind.COORDINATOR, "c1.", ()),
        (Kind.USER, "", ()),
        (Kind.USER, "a\n", ()),
        (Kind.USER, "app", ("host",)),
        (Kind.CLIENT, "app", ()),
        (Kind.NODE, "n1", ("coordinator.koinon",)),
        (Kind.NODE, "n1", ("n2.node.Koinon",)),
        (Kind.NODE, "n1", ("koinon",)),
        (Kind.NODE, "n1", ("*.koinon",)),
        (Kind.NODE, "n1", ("*",)),
        (Kind.NODE, "n1", ("a b",)),
        (Kind.NODE, "n1", ("",)),
    ],
)
def test_names_that_could_pass_for_another_are_refused(
    kind: Kind, name: str, hosts: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgumentError):
        Identity(kind=kind, name=name, hosts=hosts)


def test_renewed_file_has_the_same_names_and_another_key(authority: Authority) -> None:
    path = issued(authority, Kind.NODE, "n1", hosts=("store1.example.com", "10.0.0.7"))
    before = files.read(path)
    with pytest.raises(CertificateError, match="exists"):
        issued(authority, Kind.NODE, "n1")
    assert path.read_bytes()
    authority.renew(path, now=NOW + timedelta(days=1))
    after = files.read(path)
    assert before.certificate is not None
    assert after.certificate is not None
    assert identity_of(after.certificate) == identity_of(before.certificate)
    assert after.certificate.serial_number != before.certificate.serial_number
    assert after.certificate.public_key() != before.certificate.public_key()
    assert after.key_matches


def test_names_of_another_authority_are_not_renewed(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", now=NOW)
    root = issued(other, Kind.USER, "root")
    before = root.read_bytes()
    with pytest.raises(CertificateError, match="not issued by the authority"):
        authority.renew(root, now=NOW)
    with pytest.raises(CertificateError, match="not issued by an authority"):
        set_trust(root, authority.trusted)
    assert root.read_bytes() == before


def test_interrupted_write_leaves_the_old_file(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = issued(authority, Kind.NODE, "n1")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        authority.renew(path, now=NOW)
    assert path.read_bytes() == before
    assert sorted(p.name for p in authority.directory.iterdir()) == [
        "ca.key",
        "ca.pem",
        "node-n1.pem",
    ]


def test_replaced_file_keeps_its_link_and_its_groups_rights(
    authority: Authority, tmp_path: Path
) -> None:
    path = issued(authority, Kind.NODE, "n1")
    path.chmod(0o640)
    link = tmp_path / "link.pem"
    link.symlink_to(path)
    before = path.read_bytes()
    authority.renew(link, now=NOW)
    assert link.is_symlink()
    assert path.read_bytes() != before
    assert mode(path) == 0o640
    path.chmod(0o666)
    authority.renew(path, now=NOW)
    assert mode(path) == 0o640


def test_rotation_takes_no_step_before_the_one_before_it(authority: Authority) -> None:
    path = issued(authority, Kind.NODE, "n1")
    with pytest.raises(CertificateError, match="no new authority"):
        authority.succeed([path])
    added = authority.add_successor(now=NOW)
    assert added.certificate == authority.certificate
    with pytest.raises(CertificateError, match="does not trust the new authority yet"):
        added.succeed([path])
    with pytest.raises(CertificateError, match="does not issue yet"):
        added.drop_predecessor([path])
    set_trust(path, added.trusted)
    switched = added.succeed([path])
    assert switched.certificate != authority.certificate
    with pytest.raises(CertificateError, match="first 'koinon certs rotate-ca drop'"):
        switched.add_successor(now=NOW)
    with pytest.raises(CertificateError, match="renew it before"):
        switched.drop_predecessor([path])
    switched.renew(path, now=NOW)
    done = switched.drop_predecessor([path])
    assert done.trusted == trusted_by(path) == trusted_by(done.directory)
    assert sorted(p.name for p in done.directory.iterdir()) == ["ca.key", "ca.pem", "node-n1.pem"]


def test_rotation_goes_on_after_a_crash_in_any_step(authority: Authority) -> None:
    """Each step writes two files at most: a crash between them is the first one alone."""
    directory = authority.directory
    old = authority.certificate
    added = authority.add_successor(now=NOW)
    next_key = (directory / "next.key").read_bytes()
    files.write(directory / "ca.pem", files.text_of([old]))  # the key was written, ca.pem was not
    assert Authority.open(directory).successor is None
    added = Authority.open(directory).add_successor(now=NOW)
    assert (directory / "next.key").read_bytes() != next_key
    assert added.add_successor(now=NOW).trusted == added.trusted  # repeated: nothing changes
    switched = added.succeed()
    assert switched.succeed().certificate == switched.certificate
    assert switched.drop_predecessor().drop_predecessor().trusted == (switched.certificate,)


def test_key_of_another_authority_is_noticed(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", now=NOW)
    files.write(authority.directory / "ca.key", (other.directory / "ca.key").read_bytes())
    with pytest.raises(CertificateError, match="key of no certificate"):
        Authority.open(authority.directory)
    with pytest.raises(CertificateError, match="no authority is there"):
        Authority.open(tmp_path)
