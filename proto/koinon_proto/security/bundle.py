"""Identity files: the identity of a process and the CAs that it trusts, in one file of PEM.

A bundle holds a private key, its certificate, the certificates between that and a CA if there are
any, and the certificates of the CAs that are trusted (two while a CA is replaced). One file that is
replaced by a rename is never seen half: a key and a certificate in two files are, by a reader that
comes between the two renames.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic

from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.security.names import Kind, Principal, who

log = logging.getLogger(__name__)

_BLOCK = re.compile(
    rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL
)  # what is between two of them are comments
_BUNDLE_BYTES_MAX = 1024 * 1024
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Bundle:
    """One identity. ``key``, ``chain`` (the own certificate first) and ``trusted`` are PEM."""

    principal: Principal
    key: bytes
    chain: bytes
    trusted: bytes
    not_after_s: int
    """The unix time at which the own certificate ends."""
    trusted_until_s: int
    """The unix time at which the first of the trusted certificates ends."""

    @cached_property
    def pem(self) -> bytes:
        """The key and the chain, as one text."""
        return self.key + self.chain


def parse_bundle(text: bytes, source: str) -> Bundle:
    """Return the identity in the text of a file.

    Raises:
        ConfigurationError: it is none; ``source`` names the file.
    """
    # The library takes 50 ms to load, which programs without TLS need not wait for.
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    blocks = [(match[1], match[0] + b"\n") for match in _BLOCK.finditer(text)]
    keys = [block for kind, block in blocks if kind.endswith(b"PRIVATE KEY")]
    pems = [block for kind, block in blocks if kind == b"CERTIFICATE"]
    if len(keys) != 1 or not pems:
        raise _wrong(source, f"has {len(keys)} private keys and {len(pems)} certificates, where "
                     "one key, its certificate and the CA's are expected")  # fmt: skip
    try:
        key = load_pem_private_key(keys[0], None)
        certificates = [x509.load_pem_x509_certificate(pem) for pem in pems]
    except (ValueError, TypeError) as error:  # the second: the key has a password
        raise _wrong(source, f"cannot be read: {error}") from None
    own = certificates[0]
    if own.public_key() != key.public_key():
        raise _wrong(source, "its first certificate is not of its private key")
    roots = [
        (pem, certificate)
        for pem, certificate in zip(pems[1:], certificates[1:], strict=True)
        if certificate.subject == certificate.issuer
    ]
    if not roots:
        raise _wrong(source, "has no certificate of a CA, so it trusts nobody")
    principal = _principal_of(own)
    if principal is None:
        raise _wrong(source, "its certificate names nobody of a Koinon cluster: it needs one URI "
                     "koinon:KIND:NAME among its subject alternative names")  # fmt: skip
    root_pems = [pem for pem, _ in roots]
    return Bundle(
        principal=principal,
        key=keys[0],
        chain=b"".join(pem for pem in pems if pem not in root_pems),
        trusted=b"".join(root_pems),
        not_after_s=int(own.not_valid_after_utc.timestamp()),
        trusted_until_s=min(int(root.not_valid_after_utc.timestamp()) for _, root in roots),
    )


def principal_in(certificate: bytes) -> Principal | None:
    """Return the principal that a certificate (PEM, or DER) names; None if it names none of a
    Koinon cluster.
    """
    from cryptography import x509

    is_pem = certificate.lstrip().startswith(b"-----")
    load = x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate
    try:
        return _principal_of(load(certificate))
    except ValueError:
        return None


def _principal_of(certificate: object) -> Principal | None:
    from cryptography import x509

    assert isinstance(certificate, x509.Certificate)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    known = who(names.get_values_for_type(x509.UniformResourceIdentifier))
    if known is None:
        return None
    return Principal(
        *known,
        serial=certificate.serial_number,
        issued_at_s=int(certificate.not_valid_before_utc.timestamp()),
        valid_until_s=certificate.not_valid_after_utc.timestamp(),
    )


class BundleFile:
    """A bundle that is read again when its file changes. Thread-safe.

    ``kinds`` are those that may be here: a node's flag does not take a user's file.
    """

    def __init__(self, path: str | Path, kinds: frozenset[Kind] = frozenset(Kind)) -> None:
        """Read the file.

        Raises:
            ConfigurationError: it cannot be read, or holds no identity of these kinds.
        """
        self.path = Path(path)
        self._kinds = kinds
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._seen = self._stamp()
        self._bundle = self._read()
        self.version = 1
        """Rises with each change."""

    def current(self) -> Bundle:
        """Return the identity. An unusable file changes nothing, and is logged."""
        now = monotonic()
        if now >= self._look_at:
            with self._lock:
                self._look_at = now + _LOOK_EVERY_S
                stamp = self._stamp()
                if stamp != self._seen:
                    self._seen = stamp
                    self._take_over()
        return self._bundle

    def look_at_once(self) -> None:
        """Read the file now if it has changed, instead of at the next use."""
        self._look_at = 0.0
        self.current()

    def _take_over(self) -> None:
        try:
            bundle = self._read()
        except ConfigurationError as error:
            log.error("identity file unusable: the one before is kept reason=%s", error.reason)
            return
        if bundle != self._bundle:
            self._bundle = bundle
            self.version += 1
            log.info(
                "identity file read again path=%s who=%s not_after=%d",
                self.path,
                bundle.principal,
                bundle.not_after_s,
            )

    def _read(self) -> Bundle:
        try:
            with self.path.open("rb") as file:
                text = file.read(_BUNDLE_BYTES_MAX + 1)
        except OSError as error:
            raise _wrong(str(self.path), error.strerror or str(error)) from None
        if len(text) > _BUNDLE_BYTES_MAX:
            raise _wrong(str(self.path), f"is larger than {_BUNDLE_BYTES_MAX} bytes")
        bundle = parse_bundle(text, str(self.path))
        if bundle.principal.kind not in self._kinds:
            names = " or ".join(sorted(self._kinds))
            raise _wrong(str(self.path), f"is of {bundle.principal}; expected is one of a {names}")
        return bundle

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size


def _wrong(source: str, what: str) -> ConfigurationError:
    return ConfigurationError(reason=f"identity file {source}: {what}")
