"""Tests of the faults that are found in certificate files."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from koinon.certs import identity_files as files
from koinon.certs.authority import Authority
from koinon.certs.inspection import Fault, check_file, check_paths, view_file
from koinon_proto.security import names
from koinon_proto.security.bundle import parse_bundle
from koinon_proto.security.names import Kind
from tests.certs.conftest import NOW, issued


def faults(path: Path, now: datetime = NOW, **options: int) -> list[str]:
    return [problem.fault.value for problem in check_file(path, now=now, **options).problems]


def test_view_says_who_and_until_when(authority: Authority) -> None:
    view = view_file(issued(authority, Kind.NODE, "n1", hosts=("10.0.0.7",)), now=NOW)
    assert view.own is not None
    assert view.own.who == "node n1"
    assert view.own.alternative_names == (
        "URI:koinon:node:n1",
        "DNS:n1.node.koinon",
        "DNS:node.koinon",
        "DNS:server.koinon",
        "IP:10.0.0.7",
    )
    assert view.own.days_left in (824, 825)
    assert [each.serial for each in view.authorities] == [
        f"{authority.certificate.serial_number:x}"
    ]
    trusted = view_file(authority.directory / "ca.pem", now=NOW)
    assert (trusted.own, trusted.has_key) == (None, False)


def test_good_files_have_no_faults(authority: Authority) -> None:
    issued(authority, Kind.NODE, "n1")
    issued(authority, Kind.CLIENT)
    reports = check_paths([authority.directory], now=NOW)
    assert [r.path.name for r in reports] == ["ca.key", "ca.pem", "client.pem", "node-n1.pem"]
    assert not [report.problems for report in reports if report.problems]


def test_times_are_checked(authority: Authority) -> None:
    path = issued(authority, Kind.NODE, "n1", days=100)
    assert faults(path, NOW + timedelta(days=69)) == []
    assert faults(path, NOW + timedelta(days=71)) == ["expires_soon"]
    assert faults(path, NOW + timedelta(days=71), soon_days=7) == []
    assert faults(path, NOW + timedelta(days=101)) == ["expired"]
    assert faults(path, NOW - timedelta(hours=1)) == ["not_yet_valid"]
    late = NOW + timedelta(days=3640)
    assert faults(path, late) == ["expired", "authority_expires_soon"]
    assert faults(authority.directory / "ca.pem", late) == ["authority_expires_soon"]
    assert faults(path, NOW + timedelta(days=3660)) == ["expired", "authority_expired"]


def test_files_that_do_not_belong_together_are_found(authority: Authority, tmp_path: Path) -> None:
    n1, n2 = (files.read(issued(authority, Kind.NODE, name)) for name in ("n1", "n2"))
    other = Authority.create(tmp_path / "other", now=NOW)
    assert n1.key is not None
    assert n1.certificate is not None
    assert n2.certificate is not None
    key, trusted = files.text_of_key(n1.key), files.text_of(n1.authorities)
    own = files.text_of([n1.certificate])
    wrong = {
        "key": (key + files.text_of([n2.certificate]) + trusted, Fault.KEY_MISMATCH),
        "authority": (key + own + files.text_of(other.trusted), Fault.NOT_SIGNED),
        "alone": (key + own, Fault.NO_AUTHORITY),
        "public": (own + trusted, Fault.NO_KEY),
        "text": (b"hello", Fault.DAMAGED),
        "cut": ((key + own + trusted)[:-200], Fault.DAMAGED),
        "key-cut": (key[:100] + b"\n-----END PRIVATE KEY-----\n" + own + trusted, Fault.DAMAGED),
        "two-keys": (key + key + own + trusted, Fault.DAMAGED),
        "trusted": (key + trusted, Fault.DAMAGED),
    }
    for name, (content, fault) in wrong.items():
        path = tmp_path / f"{name}.pem"
        files.write(path, content)
        assert faults(path) == [fault.value], name


def test_key_may_stand_last_and_the_own_certificate_must_stand_first(
    authority: Authority, tmp_path: Path
) -> None:
    bundle = files.read(issued(authority, Kind.NODE, "n1"))
    assert bundle.key is not None
    assert bundle.certificate is not None
    path = tmp_path / "other-order.pem"
    own, trusted = files.text_of([bundle.certificate]), files.text_of(bundle.authorities)
    files.write(path, own + trusted + files.text_of_key(bundle.key))
    assert faults(path) == []
    assert parse_bundle(path.read_bytes(), "it").principal.name == "n1"
    files.write(path, trusted + own + files.text_of_key(bundle.key))
    assert faults(path) == ["damaged"]


def test_servers_take_what_is_found_good(authority: Authority) -> None:
    for kind in Kind:
        name = "" if kind is Kind.CLIENT else "x1"
        path = issued(authority, kind, name)
        assert faults(path) == []
        principal = parse_bundle(path.read_bytes(), "it").principal
        assert (principal.kind, principal.name) == (kind, name)


def test_readable_by_others_is_found(authority: Authority) -> None:
    path = issued(authority, Kind.NODE, "n1")
    for mode in (0o604, 0o644, 0o620, 0o602):
        path.chmod(mode)
        assert faults(path) == ["open_to_others"], oct(mode)
    key = authority.directory / "ca.key"
    key.chmod(0o644)
    assert faults(key) == ["open_to_others"]
    public = authority.directory / "ca.pem"
    public.chmod(0o644)
    assert faults(public) == []


def test_key_of_no_authority_is_found(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", now=NOW)
    key = authority.directory / "ca.key"
    files.write(key, (other.directory / "ca.key").read_bytes())
    assert faults(key) == ["key_mismatch"]


def test_certificate_of_a_stranger_names_nobody(authority: Authority) -> None:
    path = issued(authority, Kind.NODE, "n1")
    assert "names_nobody" not in faults(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "uri_of", lambda *_: "koinon:king:n1")
        stranger = issued(authority, Kind.NODE, "n2")
    assert faults(stranger) == ["names_nobody"]
