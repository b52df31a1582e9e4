"""The certificates of a local cluster: an authority of its own, an identity for each process, and
those of its users, in one directory.

Made when they are first needed, and anew when they are about to expire, were made by another
authority, or are gone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from koinon.certs import identity_files as files
from koinon.certs.authority import CERTIFICATE_FILE, Authority, Identity
from koinon.certs.certificate_error import CertificateError
from koinon_proto.contract.access import ROOT
from koinon_proto.security.names import Kind

DIRECTORY = "tls"
HOSTS = ("127.0.0.1", "localhost")
"""By which programs other than ours may check the servers."""
RENEWED_BEFORE = timedelta(days=30)
_USERS = (Identity(kind=Kind.USER, name=ROOT), Identity(kind=Kind.CLIENT))


def root_bundle(data_dir: Path) -> Path:
    """Return where the identity file of the user is who may do everything."""
    return data_dir / DIRECTORY / _USERS[0].file_name


def member_bundle(data_dir: Path, kind: str, name: str) -> Path:
    """Return where the identity file of a coordinator or a node is."""
    return data_dir / DIRECTORY / _member(kind, name).file_name


def prepare(data_dir: Path, kind: str, name: str) -> None:
    """Make what is missing, or not good any more: for this member, and for users.

    Raises:
        OSError: it cannot be written.
        CertificateError: the directory is damaged.
    """
    directory, now = data_dir / DIRECTORY, datetime.now(UTC)
    if (directory / CERTIFICATE_FILE).exists():
        authority = Authority.open(directory)
    else:
        authority = Authority.create(directory, now=now)
    for identity in (*_USERS, _member(kind, name)):
        path = directory / identity.file_name
        if not _is_good(path, authority, now):
            authority.issue(identity, path, now=now, overwrite=True)


def _member(kind: str, name: str) -> Identity:
    return Identity(kind=Kind(kind), name=name, hosts=HOSTS)


def _is_good(path: Path, authority: Authority, now: datetime) -> bool:
    try:
        bundle = files.read(path)
    except (FileNotFoundError, CertificateError):
        return False
    certificate = bundle.certificate
    return (
        certificate is not None
        and bundle.key_matches
        and set(authority.trusted) <= set(bundle.authorities)
        and files.is_signed_by(certificate, authority.trusted)
        and certificate.not_valid_after_utc > now + RENEWED_BEFORE
    )
