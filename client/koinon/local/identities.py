"""The certificates of a local cluster, in one directory: an authority, an identity for each
process, and its users' identities.

They are made when first needed, and again when they are about to expire, were made by another
authority, or are missing.
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
"""Names under which programs other than Koinon's may check the servers."""
RENEWED_BEFORE = timedelta(days=30)
_USERS = (Identity(kind=Kind.USER, name=ROOT), Identity(kind=Kind.CLIENT))


def root_bundle(data_dir: Path) -> Path:
    """Return the path of the identity file of the user who may do everything."""
    return data_dir / DIRECTORY / _USERS[0].file_name


def member_bundle(data_dir: Path, kind: str, name: str) -> Path:
    """Return the path of the identity file of a coordinator or a node."""
    return data_dir / DIRECTORY / _member(kind, name).file_name


def prepare(data_dir: Path, kind: str, name: str) -> None:
    """Make the missing or outdated identity files of this member and of the users.

    Raises:
        OSError: a file cannot be written.
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
