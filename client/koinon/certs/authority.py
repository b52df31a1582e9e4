"""A cluster's certificate authority: a directory with its certificate and its key.

    ca.pem     the certificates of the authorities that the cluster trusts: one, and two while
               one replaces the other
    ca.key     the key of the issuing authority; only this key tells which of the two issues
    next.key   the key of the next issuing authority, from ``add_successor`` to ``succeed``

An authority is replaced in three steps, each of which may be repeated, also after a crash:
``add_successor`` (both are trusted), ``succeed`` (the new one issues), ``drop_predecessor`` (the
old one is no longer trusted). Between them every identity file has to follow (``trust``, ``renew``,
``trust``), and each step refuses files that have not followed the one before.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from koinon.certs import identity_files as files
from koinon.certs.certificate_error import CertificateError
from koinon.certs.identity_files import Bundle
from koinon_proto.contract.addresses import check_name
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.process import private_files
from koinon_proto.security import names
from koinon_proto.security.names import Kind

CERTIFICATE_FILE, KEY_FILE, NEXT_KEY_FILE = "ca.pem", "ca.key", "next.key"
AUTHORITY_DAYS = 3652
IDENTITY_DAYS = 825
DAYS_MAX = 36_500
CLOCK_SKEW = timedelta(minutes=5)
"""A new certificate is valid from this long before its issue, for servers whose clocks are slow."""
LABEL_CHARS_MAX = 63
"""The limit of a label between two dots of a DNS name (RFC 1035, 2.3.4)."""
COMMON_NAME_CHARS_MAX = 64
_RESERVED = ".koinon"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SERVERS = (Kind.COORDINATOR, Kind.NODE)
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
"""The allowed kinds of authorities' keys; this module makes keys of the first kind."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The holder of a certificate. ``hosts`` are further names and IP addresses of a server, for
    programs that check it by its address.
    """

    kind: Kind
    name: str = ""
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is Kind.CLIENT:
            if self.name:
                raise InvalidArgumentError(field="name", reason="a client's certificate has none")
        else:
            check_name("name", self.name)
        if self.kind not in _SERVERS:
            if self.hosts:
                raise InvalidArgumentError(field="hosts", reason="only servers have hosts")
            return
        if not all(0 < len(label) <= LABEL_CHARS_MAX for label in self.name.split(".")):
            raise InvalidArgumentError(
                field="name",
                reason=f"{self.name!r} is no part of a name in the DNS: {LABEL_CHARS_MAX} "
                "characters at most between dots, and one at least",
            )
        for host in self.hosts:
            _check_host(host)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else str(self.kind)

    @property
    def file_name(self) -> str:
        """The name of its identity file, by default."""
        return f"{self.kind}-{self.name}.pem" if self.name else f"{self.kind}.pem"


def _check_host(host: str) -> None:
    if _is_ip(host):
        return
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise InvalidArgumentError(
            field="host", reason=f"{host!r} is neither a host's name nor an IP address"
        )
    if f".{host.lower()}".endswith(_RESERVED):  # it could be taken for another server
        raise InvalidArgumentError(
            field="host", reason=f"{host!r}: names under {_RESERVED} are the cluster's own"
        )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Return the holder that a certificate names; None if it names no holder of a Koinon
    cluster.
    """
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return None
    who = names.who(found.get_values_for_type(x509.UniformResourceIdentifier))
    if who is None:
        return None
    ours = set(names.server_names(*who))
    hosts = [n for n in found.get_values_for_type(x509.DNSName) if n not in ours]
    hosts += [str(ip) for ip in found.get_values_for_type(x509.IPAddress)]
    try:
        return Identity(kind=who[0], name=who[1], hosts=tuple(hosts))
    except InvalidArgumentError:
        return None


class Authority:
    """An authority, as stored in its directory.

    ``certificate`` and ``key`` are the issuing ones; ``trusted`` are all certificates of ca.pem.
    """

    def __init__(self, directory: Path, trusted: Sequence[x509.Certificate], key: Key) -> None:
        self.directory = directory
        self.trusted = tuple(trusted)
        self.key = key
        self.certificate = self._certificate_of(key)

    @classmethod
    def create(cls, directory: Path, *, now: datetime, days: int = AUTHORITY_DAYS) -> Authority:
        """Make an authority in a directory of its own, which no other user may read.

        Raises:
            OSError: its files cannot be written.
            CertificateError: the directory already has an authority, or others may read it.
        """
        _check_days(days)
        for name in (CERTIFICATE_FILE, KEY_FILE, NEXT_KEY_FILE):
            if (directory / name).exists():
                raise CertificateError(
                    path=str(directory / name),
                    reason="an authority exists already and is never overwritten: "
                    "'koinon certs rotate-ca' replaces it while the cluster runs; another "
                    "directory can hold a second authority",
                )
        _make_private(directory)
        key, certificate = _make_authority(now, days)
        files.write(directory / KEY_FILE, files.text_of_key(key))
        files.write(directory / CERTIFICATE_FILE, files.text_of([certificate]))
        return cls(directory, [certificate], key)

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """Load the authority of a directory.

        Raises:
            OSError: its files cannot be read.
            CertificateError: there is none, or its files do not belong together.
        """
        if not (directory / CERTIFICATE_FILE).exists():
            raise CertificateError(
                path=str(directory),
                reason=f"no authority is there (no {CERTIFICATE_FILE}): 'koinon certs ca' makes "
                "one, --ca says where it is",
            )
        trusted = trusted_by(directory)
        return cls(directory, trusted, _read_key(directory / KEY_FILE))

    @property
    def successor(self) -> x509.Certificate | None:
        """The authority that is already trusted and will issue next; None while none is being
        replaced.
        """
        path = self.directory / NEXT_KEY_FILE
        if not path.exists():
            return None
        public = _read_key(path).public_key()
        return next((c for c in self.trusted if c.public_key() == public), None)

    def _certificate_of(self, key: Key) -> x509.Certificate:
        public = key.public_key()
        for certificate in self.trusted:
            if certificate.public_key() == public:
                return certificate
        raise CertificateError(
            path=str(self.directory / KEY_FILE),
            reason=f"is the key of no certificate in {CERTIFICATE_FILE}: restore both together",
        )

    # --- identities ----------------------------------------------------------------------------

    def issue(
        self,
        identity: Identity,
        path: Path,
        *,
        now: datetime,
        days: int = IDENTITY_DAYS,
        overwrite: bool = False,
    ) -> Bundle:
        """Write a new identity file, with a key of its own.

        Raises:
            OSError: it cannot be written.
            CertificateError: the file exists (and not ``overwrite``), or the authority has expired.
        """
        if not overwrite and path.exists():
            raise CertificateError(
                path=str(path),
                reason="exists: 'koinon certs renew' gives it a new key and certificate, "
                "--force overwrites it",
            )
        key, certificate = self._sign(identity, now, days)
        if not path.parent.exists():
            private_files.make_directory(path.parent)
        bundle = Bundle(key=key, certificate=certificate, authorities=self.trusted)
        files.write_bundle(path, bundle)
        return bundle

    def renew(self, path: Path, *, now: datetime, days: int = IDENTITY_DAYS) -> Bundle:
        """Replace an identity file: the same names, a new key, a new certificate.

        Raises:
            OSError: it cannot be read or written.
            CertificateError: this authority has not issued its certificate. (Otherwise the
                authority would certify any name that somebody wrote into a file.)
        """
        return self.issue(self._ours(path), path, now=now, days=days, overwrite=True)

    def _ours(self, path: Path) -> Identity:
        certificate = certificate_in(path)
        if not files.is_signed_by(certificate, self.trusted):
            raise CertificateError(
                path=str(path), reason=f"was not issued by the authority in {self.directory}"
            )
        identity = identity_of(certificate)
        if identity is None:
            raise CertificateError(
                path=str(path), reason="names no member or user of a Koinon cluster"
            )
        return identity

    def _sign(
        self, identity: Identity, now: datetime, days: int
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        _check_days(days)
        # a certificate is not valid for longer than its authority's
        end = self.certificate.not_valid_after_utc
        if end <= now:
            raise CertificateError(
                path=str(self.directory / CERTIFICATE_FILE),
                reason="the authority has expired: 'koinon certs rotate-ca' replaces it",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        serves = identity.kind in _SERVERS
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] * serves + [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(_subject(str(identity)), key, now, min(now + timedelta(days=days), end))
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(_names_of(identity)), critical=False)
            .add_extension(_authority_key(self.certificate), critical=False)
        )
        return key, builder.sign(self.key, hashes.SHA256())

    # --- replacing the authority ----------------------------------------------------------------

    def add_successor(self, *, now: datetime, days: int = AUTHORITY_DAYS) -> Authority:
        """Make a new authority beside this one, and trust both. This one still issues."""
        if self.successor is not None:
            return self
        if len(self.trusted) > 1:
            raise CertificateError(
                path=str(self.directory / CERTIFICATE_FILE),
                reason="the authority before is trusted still: first 'koinon certs rotate-ca drop'",
            )
        _check_days(days)
        key, certificate = _make_authority(now, days)
        # The key first: a certificate whose key is lost could never issue.
        files.write(self.directory / NEXT_KEY_FILE, files.text_of_key(key))
        trusted = [*self.trusted, certificate]
        files.write(self.directory / CERTIFICATE_FILE, files.text_of(trusted))
        return Authority(self.directory, trusted, self.key)

    def succeed(self, bundles: Iterable[Path] = ()) -> Authority:
        """Let the new authority issue from now on, and delete the old one's key.

        Raises:
            CertificateError: there is no new authority; or one of the bundles does not trust it
                yet, and its holder would refuse peers with renewed certificates.
        """
        successor = self.successor
        if successor is None:
            if len(self.trusted) > 1:
                return self  # the new authority issues already
            raise CertificateError(
                path=str(self.directory), reason="no new authority: first 'rotate-ca add'"
            )
        for path in bundles:
            self._ours(path)
            if successor not in files.read(path).authorities:
                raise CertificateError(
                    path=str(path),
                    reason="does not trust the new authority yet: first 'rotate-ca add' with it",
                )
        (self.directory / NEXT_KEY_FILE).rename(self.directory / KEY_FILE)
        files.sync_directory(self.directory)
        return Authority.open(self.directory)

    def drop_predecessor(self, bundles: Sequence[Path] = ()) -> Authority:
        """Trust only the issuing authority: first in these bundles, then in ca.pem.

        Raises:
            CertificateError: one of the bundles still has a certificate of the old authority, or
                the new one does not issue yet.
        """
        if self.successor is not None:
            raise CertificateError(
                path=str(self.directory),
                reason="the new authority does not issue yet: first 'rotate-ca issue'",
            )
        only = (self.certificate,)
        for path in bundles:
            check_trust(path, only)
        for path in bundles:
            set_trust(path, only)
        files.write(self.directory / CERTIFICATE_FILE, files.text_of(only))
        return Authority(self.directory, only, self.key)

    def has_issued(self, path: Path) -> bool:
        """Return whether the present issuing authority has issued the file's certificate."""
        return files.is_signed_by(certificate_in(path), [self.certificate])


def trusted_by(place: Path) -> tuple[x509.Certificate, ...]:
    """Return the authorities in a directory's ca.pem, or in the file itself.

    Raises:
        OSError: the file cannot be read.
        CertificateError: it holds no authority.
    """
    path = place / CERTIFICATE_FILE if place.is_dir() else place
    found = files.read(path).authorities
    if not found:
        raise CertificateError(path=str(path), reason="holds no authority's certificate")
    return found


def certificate_in(path: Path) -> x509.Certificate:
    """Return the certificate of an identity file.

    Raises:
        OSError: it cannot be read.
        CertificateError: the file is no identity file.
    """
    bundle = files.read(path)
    if bundle.key is None or bundle.certificate is None:
        raise CertificateError(path=str(path), reason="is no identity file: it has no private key")
    return bundle.certificate


def check_trust(path: Path, trusted: Sequence[x509.Certificate]) -> None:
    """Check that the issuer of an identity file is among the authorities that it would trust.

    Raises:
        CertificateError: none of these authorities has issued it.
    """
    if not files.is_signed_by(certificate_in(path), trusted):
        raise CertificateError(
            path=str(path),
            reason="was not issued by an authority that would be trusted: renew it before",
        )


def set_trust(path: Path, trusted: Sequence[x509.Certificate]) -> None:
    """Let an identity file trust these authorities, and no others.

    Raises:
        OSError: it cannot be read or written.
        CertificateError: none of these authorities has issued it.
    """
    check_trust(path, trusted)
    bundle = files.read(path)
    if bundle.authorities != tuple(trusted):
        files.write_bundle(path, replace(bundle, authorities=tuple(trusted)))


# --- internals -----------------------------------------------------------------------------------


def _check_days(days: int) -> None:
    if not 1 <= days <= DAYS_MAX:
        raise InvalidArgumentError(
            field="days", reason=f"must be from 1 to {DAYS_MAX}", limit=DAYS_MAX, actual=days
        )


def _make_private(directory: Path) -> None:
    """Make the authority's directory, or accept an existing one that is empty or private."""
    if directory.exists() and any(directory.iterdir()) and directory.stat().st_mode & 0o077:
        raise CertificateError(
            path=str(directory),
            reason="others may look into it: give the authority a directory of its own",
        )
    private_files.make_directory(directory)


def _make_authority(
    now: datetime, days: int
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # Authorities have different names: while two are trusted, a name says which one has issued.
    name = _subject(f"Koinon authority {identifier.digest.hex()[:12]}")
    certificate = (
        _builder(name, key, now, now + timedelta(days=days))
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _subject(name: str) -> x509.Name:
    """Return a certificate's subject, which is for people only: the URI names the holder."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Koinon"),
            x509.NameAttribute(NameOID.COMMON_NAME, name[:COMMON_NAME_CHARS_MAX]),
        ]
    )


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    """Begin a certificate with its subject, key and validity."""
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names_of(identity: Identity) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(names.uri_of(identity.kind, identity.name))
    ]
    found += map(x509.DNSName, names.server_names(identity.kind, identity.name))
    for host in identity.hosts:
        ip = _is_ip(host)
        found.append(x509.IPAddress(ipaddress.ip_address(host)) if ip else x509.DNSName(host))
    return found


def _authority_key(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        found = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:  # if another program made the authority
        public = authority.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey | rsa.RSAPublicKey)
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(found.value)


def _read_key(path: Path) -> Key:
    key = files.read_key(path)
    if not isinstance(key, Key):
        raise CertificateError(path=str(path), reason="an authority's key must be EC or RSA")
    return key
