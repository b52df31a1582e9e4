"""Describes files of certificates, and checks them."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from koinon.certs import identity_files as files
from koinon.certs.authority import CERTIFICATE_FILE, KEY_FILE, NEXT_KEY_FILE, identity_of
from koinon.certs.certificate_error import CertificateError
from koinon.certs.identity_files import Bundle

SOON_DAYS = 30
_DAY_S = 86_400
_INTERMEDIATES_MAX = 8


class Fault(StrEnum):
    """The kinds of faults of a file."""

    DAMAGED = "damaged"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRES_SOON = "expires_soon"
    AUTHORITY_EXPIRED = "authority_expired"
    AUTHORITY_EXPIRES_SOON = "authority_expires_soon"
    NO_AUTHORITY = "no_authority"
    NOT_SIGNED = "not_signed"
    KEY_MISMATCH = "key_mismatch"
    NO_KEY = "no_key"
    NAMES_NOBODY = "names_nobody"
    OPEN_TO_OTHERS = "open_to_others"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault of a file; ``text`` describes it for people."""

    fault: Fault
    text: str


@dataclass(frozen=True, kw_only=True)
class CertificateView:
    """The contents of a certificate. ``who`` is '' if it names no holder of a Koinon cluster."""

    who: str
    subject: str
    issuer: str
    alternative_names: tuple[str, ...]
    serial: str  # in hexadecimal digits
    issued: datetime
    expires: datetime
    days_left: int  # negative: days since it expired
    fingerprint: str  # SHA-256 of the certificate, in hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class FileView:
    """The contents of a file. ``own`` is None in a file of authorities only."""

    path: Path
    has_key: bool
    own: CertificateView | None
    authorities: tuple[CertificateView, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of ``check`` for one file. ``view`` is None if the file could not be read."""

    path: Path
    view: FileView | None
    problems: tuple[Problem, ...]


def view_file(path: Path, *, now: datetime) -> FileView:
    """Return the contents of a file.

    Raises:
        OSError: it cannot be read.
        CertificateError: it holds no certificate, or is damaged.
    """
    return _view_of(path, files.read(path), now)


def _view_of(path: Path, bundle: Bundle, now: datetime) -> FileView:
    return FileView(
        path=path,
        has_key=bundle.key is not None,
        own=_view(bundle.certificate, now) if bundle.certificate is not None else None,
        authorities=tuple(_view(certificate, now) for certificate in bundle.authorities),
    )


def _view(certificate: x509.Certificate, now: datetime) -> CertificateView:
    identity = identity_of(certificate)
    return CertificateView(
        who=str(identity) if identity is not None else "",
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        alternative_names=tuple(_alternative_names(certificate)),
        serial=f"{certificate.serial_number:x}",
        issued=certificate.not_valid_before_utc,
        expires=certificate.not_valid_after_utc,
        days_left=_days_left(certificate, now),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _days_left(certificate: x509.Certificate, now: datetime) -> int:
    return int((certificate.not_valid_after_utc - now).total_seconds() // _DAY_S)


def _alternative_names(certificate: x509.Certificate) -> Iterator[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return
    for name in found.value:
        match name:
            case x509.UniformResourceIdentifier():
                yield f"URI:{name.value}"
            case x509.DNSName():
                yield f"DNS:{name.value}"
            case x509.IPAddress():
                yield f"IP:{name.value}"
            case _:
                yield f"other:{name.value}"


# --- checking ------------------------------------------------------------------------------------


def check_paths(
    paths: Sequence[Path], *, now: datetime, soon_days: int = SOON_DAYS
) -> list[Report]:
    """Check files, and in directories all ``*.pem`` and ``*.key`` files.

    Raises:
        OSError: a path cannot be read.
        CertificateError: a directory has no such file.
    """
    reports: list[Report] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in (".pem", ".key"))
            if not inside:
                raise CertificateError(path=str(path), reason="no *.pem is in it")
        reports += [check_file(file, now=now, soon_days=soon_days) for file in inside]
    return reports


def check_file(path: Path, *, now: datetime, soon_days: int = SOON_DAYS) -> Report:
    """Check one file: an identity file, a file of authorities, or an authority's key.

    Raises:
        OSError: it cannot be read.
    """
    try:
        if path.suffix == ".key":
            return Report(path=path, view=None, problems=tuple(_key_problems(path)))
        bundle = files.read(path)
    except CertificateError as error:
        damaged = Problem(fault=Fault.DAMAGED, text=error.reason)
        return Report(path=path, view=None, problems=(damaged,))
    problems = [*_bundle_problems(path, bundle), *_time_problems(bundle, now, soon_days)]
    return Report(path=path, view=_view_of(path, bundle, now), problems=tuple(problems))


def _key_problems(path: Path) -> Iterator[Problem]:
    public = files.read_key(path).public_key()
    yield from _mode_problems(path)
    if path.name not in (KEY_FILE, NEXT_KEY_FILE):
        return
    beside = path.with_name(CERTIFICATE_FILE)
    known = files.read(beside).authorities if beside.exists() else ()
    if not any(certificate.public_key() == public for certificate in known):
        yield Problem(
            fault=Fault.KEY_MISMATCH, text=f"is the key of no certificate in {CERTIFICATE_FILE}"
        )


def _mode_problems(path: Path) -> Iterator[Problem]:
    found = path.stat()
    # root may grant a group access to the file
    open_to = found.st_mode & (0o077 if found.st_uid else 0o037)
    if open_to:
        yield Problem(
            fault=Fault.OPEN_TO_OTHERS,
            text=f"its mode is {stat.S_IMODE(found.st_mode):04o}: others could read the key "
            "(chmod 600)",
        )


def _bundle_problems(path: Path, bundle: Bundle) -> Iterator[Problem]:
    if bundle.key is not None:
        yield from _mode_problems(path)
    certificate = bundle.certificate
    if certificate is None:
        return
    if bundle.key is None:
        yield Problem(fault=Fault.NO_KEY, text="it has a certificate and no private key")
    elif not bundle.key_matches:
        yield Problem(fault=Fault.KEY_MISMATCH, text="its key is not its certificate's")
    if identity_of(certificate) is None:
        yield Problem(fault=Fault.NAMES_NOBODY, text="names no member or user of a Koinon cluster")
    if not bundle.authorities:
        yield Problem(fault=Fault.NO_AUTHORITY, text="it holds no authority to trust")
    elif not _leads_to_authority(certificate, bundle):
        yield Problem(
            fault=Fault.NOT_SIGNED, text="its certificate is of no authority that it holds"
        )


def _leads_to_authority(certificate: x509.Certificate, bundle: Bundle) -> bool:
    for _ in range(_INTERMEDIATES_MAX):
        if files.is_signed_by(certificate, bundle.authorities):
            return True
        above = [c for c in bundle.intermediates if files.is_signed_by(certificate, [c])]
        if not above:
            return False
        certificate = above[0]
    return False


def _time_problems(bundle: Bundle, now: datetime, soon_days: int) -> Iterator[Problem]:
    for certificate in (bundle.certificate, *bundle.intermediates):
        if certificate is None:
            continue
        if certificate.not_valid_before_utc > now:
            begin = _day(certificate.not_valid_before_utc)
            yield Problem(fault=Fault.NOT_YET_VALID, text=f"holds from {begin} on only")
        if (text := _end_text(certificate, now, soon_days)) is not None:
            over = certificate.not_valid_after_utc < now
            yield Problem(fault=Fault.EXPIRED if over else Fault.EXPIRES_SOON, text=text)
    for authority in bundle.authorities:
        if (text := _end_text(authority, now, soon_days)) is not None:
            over = authority.not_valid_after_utc < now
            fault = Fault.AUTHORITY_EXPIRED if over else Fault.AUTHORITY_EXPIRES_SOON
            name = authority.subject.rfc4514_string()
            yield Problem(fault=fault, text=f"the authority {name} {text}")


def _end_text(certificate: x509.Certificate, now: datetime, soon_days: int) -> str | None:
    end, left = certificate.not_valid_after_utc, _days_left(certificate, now)
    if end < now:
        return f"expired on {_day(end)}"
    if left >= soon_days:
        return None
    days = "1 day" if left == 1 else f"{left} days"
    return f"expires on {_day(end)}, in {days}"


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
