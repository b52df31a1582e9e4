"""Reads and writes PEM files of keys and certificates.

A file is written whole beside its place and renamed into it. So after a crash, and for a reader, it
is the old file or the new one, never one file's key with another's certificate.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from koinon.certs.certificate_error import CertificateError
from koinon_proto.process import private_files

FILE_BYTES_MAX = 1 << 20
"""The limit on a PEM file's size: a hundred times that of any real one."""
_KEY = re.compile(rb"-----BEGIN ([A-Z]+ )*PRIVATE KEY-----")
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEPT_MODE = 0o640
"""The rights of a replaced file that its successor keeps: its group may have access on purpose."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The contents of a PEM file. ``authorities`` are the self-signed certificates that the holder
    trusts; two while an authority is replaced. A file of authorities only has no key and no
    ``certificate``.
    """

    key: PrivateKeyTypes | None
    certificate: x509.Certificate | None
    intermediates: tuple[x509.Certificate, ...] = ()
    authorities: tuple[x509.Certificate, ...]

    @property
    def key_matches(self) -> bool:
        """True if key and certificate belong together."""
        return (
            self.key is not None
            and self.certificate is not None
            and self.key.public_key() == self.certificate.public_key()
        )


def read(path: Path) -> Bundle:
    """Read an identity file, or a file of authorities.

    Raises:
        OSError: it cannot be read.
        CertificateError: it holds no certificate, or more than one key, or is damaged.
    """
    content = _content(path)
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateError(path=str(path), reason=f"no certificate: {error}") from error
    if len(certificates) != content.count(_CERTIFICATE):
        raise CertificateError(path=str(path), reason="is cut off inside a certificate")
    key = _key_in(path, content)
    authorities = [certificate for certificate in certificates if is_authority(certificate)]
    own = [certificate for certificate in certificates if certificate not in authorities]
    if key is not None and certificates[0] in authorities:
        raise CertificateError(
            path=str(path),
            reason="its first certificate is an authority's, where its own is expected",
        )
    return Bundle(
        key=key,
        certificate=own[0] if own else None,
        intermediates=tuple(own[1:]),
        authorities=tuple(authorities),
    )


def read_key(path: Path) -> PrivateKeyTypes:
    """Read a file with a private key.

    Raises:
        OSError: it cannot be read.
        CertificateError: it holds no private key.
    """
    key = _key_in(path, _content(path))
    if key is None:
        raise CertificateError(path=str(path), reason="no private key")
    return key


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise CertificateError(path=str(path), reason="too large for a file of certificates")
    return content


def _key_in(path: Path, content: bytes) -> PrivateKeyTypes | None:
    found = list(_KEY.finditer(content))
    if not found:
        return None
    if len(found) > 1:
        raise CertificateError(path=str(path), reason="has more than one private key")
    try:
        return serialization.load_pem_private_key(content[found[0].start() :], password=None)
    except TypeError as error:
        raise CertificateError(
            path=str(path),
            reason="its key is encrypted: servers read it by themselves, so it must not be",
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        # The library's text is left out: it might contain parts of the key.
        raise CertificateError(path=str(path), reason="its private key is damaged") from error


def has_key(path: Path) -> bool:
    """Return whether the file holds a private key, as identity files do.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _KEY.search(file.read(FILE_BYTES_MAX)) is not None


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether this is a self-signed certificate that may sign others."""
    if certificate.issuer != certificate.subject:
        return False
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False
    return constraints.value.ca and is_signed_by(certificate, [certificate])


def is_signed_by(certificate: x509.Certificate, issuers: Iterable[x509.Certificate]) -> bool:
    """Return whether one of the issuers has signed the certificate, whatever its validity."""
    return any(_signed(certificate, issuer) for issuer in issuers)


def _signed(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    # Any error about a signature, an algorithm or a name means that the signature is not valid.
    with contextlib.suppress(Exception):
        certificate.verify_directly_issued_by(issuer)
        return True
    return False


# --- writing -------------------------------------------------------------------------------------


def text_of_key(key: PrivateKeyTypes) -> bytes:
    """Return the key as PEM (PKCS 8, not encrypted)."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def text_of(certificates: Iterable[x509.Certificate]) -> bytes:
    """Return the certificates as PEM, in this order."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write, or replace, an identity file: key, certificate, intermediates, authorities."""
    assert bundle.key is not None
    assert bundle.certificate is not None
    certificates = [bundle.certificate, *bundle.intermediates, *bundle.authorities]
    write(path, text_of_key(bundle.key) + text_of(certificates))


def write(path: Path, content: bytes) -> None:
    """Write the file and rename it into place. It keeps a former file's owner and its group's
    rights, so that a server that could read the former file can read the new one.

    Raises:
        OSError: it could not be written; the former file is unchanged.
    """
    path = path.resolve()  # the target of a link: the link itself stays
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(scratch, flags, private_files.FILE_MODE), "wb") as file:
            _take_after(file.fileno(), path)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _take_after(descriptor: int, path: Path) -> None:
    """Give the new file the owner and group of the former one, if there is one."""
    try:
        old = path.stat()
    except FileNotFoundError:
        return
    mode = private_files.FILE_MODE | (old.st_mode & _KEPT_MODE)
    ours = os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (ours.st_uid, ours.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except PermissionError as error:
            raise CertificateError(
                path=str(path),
                reason="belongs to another user, who could not read a new one: replace it as root",
            ) from error
    os.fchmod(descriptor, mode)


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that its names are durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files, and the identity files in the given directories, by name.

    Raises:
        OSError: a directory cannot be read.
        CertificateError: a directory holds no identity file.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = [p for p in sorted(path.glob("*.pem")) if p.is_file() and has_key(p)]
        if not inside:
            raise CertificateError(path=str(path), reason="no identity file (*.pem) is in it")
        found += inside
    return list(dict.fromkeys(found))
