"""certs: a cluster's certificate authority, and the identity files of its servers and users."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from koinon.certs import authority as authorities
from koinon.certs import identity_files as files
from koinon.certs import inspection
from koinon.certs.authority import Authority, Identity, set_trust, trusted_by
from koinon.certs.certificate_error import CertificateError
from koinon.certs.inspection import CertificateView, Report
from koinon.cli.console.command import NOT_FOUND, Session, command
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Block, Column, Reply, Table, facts, remark
from koinon.operate.json_form import HIDDEN
from koinon.operate.views import view
from koinon.operate.wording import count
from koinon_proto.contract.access import ROOT
from koinon_proto.security.names import Kind

app = typer.Typer(
    cls=Group,
    help="Make, renew and check the certificates by which servers and users are known.\n\n"
    "\b\n  $ koinon certs ca                    make an authority in ./certs\n"
    "  $ koinon certs coordinator c1 c2 c3  one identity file for each\n"
    "  $ koinon certs node n1 n2 n3\n"
    "  $ koinon certs user root             the user who may do everything\n"
    "  $ koinon certs check certs           certificates that are faulty or expire soon",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
rotation = typer.Typer(
    cls=Group,
    help="Replace the authority of a running cluster, in three steps. Between them, copy the "
    "files to their servers and clients, which reload them automatically.\n\n"
    "\b\n  $ koinon certs rotate-ca add    a new authority; all trust both\n"
    "  $ koinon certs rotate-ca issue  new certificates, by the new one\n"
    "  $ koinon certs rotate-ca drop   the old one is no longer trusted",
    no_args_is_help=True,
)
DEFAULT_AUTHORITY = Path("certs")
MAKE, LOOK, REPLACE = "Make", "Look", "Renew and replace"

Place = Annotated[
    Path,
    typer.Option("--ca", metavar="DIR", envvar="KOINON_CA", help="Where the authority is."),
]
Names = Annotated[list[str], typer.Argument(metavar="NAME", help="One file is made for each.")]
Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE|DIR]",
        help="Identity files, or directories of them. By default those in the authority's own "
        "directory.",
    ),
]
Days = Annotated[
    int,
    typer.Option(min=1, max=authorities.DAYS_MAX, help="For how many days they hold."),
]
AuthorityDays = Annotated[
    int,
    typer.Option(min=1, max=authorities.DAYS_MAX, help="For how many days it holds."),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="A name or an IP address by which other programs than Koinon's check it. May be "
        "given several times, with one NAME.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CertificateAnswer:
    """A certificate, without its key."""

    who: str | None
    subject: str
    issuer: str
    names: tuple[str, ...]
    serial: str
    issued_at_s: int
    expires_at_s: int
    days_left: int
    sha256: str
    issued: datetime = field(metadata=HIDDEN)
    expires: datetime = field(metadata=HIDDEN)


def _certificate(seen: CertificateView) -> CertificateAnswer:
    return view(
        CertificateAnswer,
        seen,
        who=seen.who or None,
        names=tuple(seen.alternative_names),
        issued_at_s=int(seen.issued.timestamp()),
        expires_at_s=int(seen.expires.timestamp()),
        sha256=seen.fingerprint,
    )


@dataclass(frozen=True, kw_only=True)
class FileAnswer:
    """An identity file; a ca.pem has only ``trusted``."""

    path: str
    private_key: bool
    certificate: CertificateAnswer | None
    trusted: list[CertificateAnswer]


def _file(path: Path) -> FileAnswer:
    seen = inspection.view_file(path, now=_now())
    return FileAnswer(
        path=str(seen.path),
        private_key=seen.has_key,
        certificate=_certificate(seen.own) if seen.own is not None else None,
        trusted=[_certificate(each) for each in seen.authorities],
    )


@dataclass(frozen=True, kw_only=True)
class ProblemAnswer:
    """One problem of a file."""

    fault: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckedFile:
    """A file that was checked; the first fields are None if it is no identity file."""

    path: str
    who: str | None
    expires_at_s: int | None
    days_left: int | None
    problems: list[ProblemAnswer]


def _now() -> datetime:
    return datetime.now(UTC)


# --- making --------------------------------------------------------------------------------------


@command(
    app, examples=["certs ca", "certs ca /secure/koinon-ca --days 3652"], panel=MAKE, connects=False
)
def ca(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="[DIR]")] = DEFAULT_AUTHORITY,
    *,
    days: AuthorityDays = authorities.AUTHORITY_DAYS,
) -> Reply:
    """Make a certificate authority: ca.pem and ca.key in a directory that only you can read.

    Whoever has ca.key can pose as any server or user of the cluster: keep the directory on a
    machine that runs no part of the cluster, and in a backup. Only the files that 'koinon certs
    node' and the like make go to servers and users.
    """
    made = Authority.create(directory, now=_now(), days=days)
    path = directory / authorities.CERTIFICATE_FILE
    return Reply(
        {"ca": str(path), "certificate": _file(path)},
        f"Made an authority in {directory}. It holds until {_day(made.certificate)}.",
    )


@dataclass(frozen=True, kw_only=True)
class Issue:
    """The options of commands that make identity files."""

    place: Place = DEFAULT_AUTHORITY
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Where to write: a directory, or a file (*.pem) for one NAME. By default beside "
            "the authority.",
        ),
    ] = None
    days: Days = authorities.IDENTITY_DAYS
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False

    def files_of(self, identities: list[Identity], *notes: str) -> Reply:
        """Make an identity file for each identity; none at all if one of the files exists."""
        authority = Authority.open(self.place)
        paths = _paths_of(identities, self.out or self.place)
        for path in () if self.force else paths:
            if path.exists():
                raise CertificateError(
                    path=str(path),
                    reason="exists: 'koinon certs renew' gives it a new key and certificate, "
                    "--force overwrites it",
                )
        for identity, path in zip(identities, paths, strict=True):
            authority.issue(identity, path, now=_now(), days=self.days, overwrite=self.force)
        return _written("made", paths, *notes)


def _paths_of(identities: list[Identity], out: Path) -> list[Path]:
    if out.suffix != ".pem":
        return [out / identity.file_name for identity in identities]
    if len(identities) > 1:
        raise typer.BadParameter(f"--out {out} is one file: name a directory for several")
    return [out]


def _written(what: str, paths: list[Path], *notes: str) -> Reply:
    """Return a reply that lists the written files."""
    found = [_file(path) for path in paths]
    lines = [
        f"{file.path}: {file.certificate.who}, until {file.certificate.expires:%Y-%m-%d}"
        for file in found
        if file.certificate is not None
    ]
    done = f"{count(len(paths), 'file')} {what}, but their list"
    return Reply({what: found}, lines, done=done, notes=notes)


def _servers(kind: Kind, given: list[str], hosts: list[str] | None) -> list[Identity]:
    if hosts and len(given) > 1:
        raise typer.BadParameter("--host is for one NAME: it would make each pass for the others")
    return [Identity(kind=kind, name=name, hosts=tuple(hosts or ())) for name in _once(given)]


def _once(given: list[str]) -> list[str]:
    return list(dict.fromkeys(given))


@command(
    app,
    examples=["certs coordinator c1 c2 c3", "certs coordinator c1 --out /etc/koinon/c1.pem"],
    panel=MAKE,
    connects=False,
)
def coordinator(
    session: Session,
    name: Names,
    *,
    host: Hosts = None,
    issue: Issue,
) -> Reply:
    """Make identity files of coordinators. NAME is the --id of 'koinon coordinator'."""
    return issue.files_of(_servers(Kind.COORDINATOR, name, host))


@command(
    app,
    examples=["certs node n1 n2 n3", "certs node n1 --host store1.example.com --host 10.0.0.7"],
    panel=MAKE,
    connects=False,
)
def node(
    session: Session,
    name: Names,
    *,
    host: Hosts = None,
    issue: Issue,
) -> Reply:
    """Make identity files of nodes. NAME is the --id of 'koinon node'."""
    return issue.files_of(_servers(Kind.NODE, name, host))


@command(
    app,
    examples=["certs user root", "certs user app --days 90 --out app.pem"],
    panel=MAKE,
    connects=False,
)
def user(
    session: Session,
    name: Names,
    *,
    issue: Issue,
) -> Reply:
    """Make identity files of users. Roles say what a user may do; root may do everything."""
    identities = [Identity(kind=Kind.USER, name=each) for each in _once(name)]
    warning = "root may do everything in the cluster, always: give its file to nobody else"
    return issue.files_of(identities, *[warning] * (ROOT in name))


@command(app, examples=["certs client"], panel=MAKE, connects=False)
def client(
    session: Session,
    *,
    issue: Issue,
) -> Reply:
    """Make the identity file for programs that show a token. It names no user; all programs may
    share it.
    """
    return issue.files_of([Identity(kind=Kind.CLIENT)])


# --- renewing ------------------------------------------------------------------------------------


@command(
    app,
    examples=[
        "certs renew",
        "certs renew certs/node-n1.pem",
        "certs renew --days-left 60   (from cron)",
    ],
    panel=REPLACE,
    connects=False,
)
def renew(
    session: Session,
    paths: Files = None,
    *,
    place: Place = DEFAULT_AUTHORITY,
    days: Days = authorities.IDENTITY_DAYS,
    left: Annotated[
        int | None,
        typer.Option(
            "--days-left",
            min=0,
            help="Only files whose certificates are valid for fewer days than this.",
        ),
    ] = None,
) -> Reply:
    """Give identity files a new key and a new certificate, with the same names.

    Servers and clients that use a file read it again by themselves.
    """
    authority, renewed, now = Authority.open(place), [], _now()
    for path in _targets(paths, place):
        view = inspection.view_file(path, now=now)
        if left is None or view.own is None or view.own.days_left < left:
            authority.renew(path, now=now, days=days)
            renewed.append(path)
    return _written("renewed", renewed, *["nothing to renew"] * (not renewed))


def _targets(paths: list[Path] | None, place: Path) -> list[Path]:
    """Return the identity files that the paths name, or if none are given, those of the authority's
    directory.
    """
    if paths:
        return files.identity_files(paths)
    try:
        return files.identity_files([place])
    except CertificateError:
        return []


@command(app, examples=["certs trust app.pem --ca ca.pem"], panel=REPLACE, connects=False)
def trust(
    session: Session,
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR")],
    *,
    place: Annotated[
        Path,
        typer.Option(
            "--ca", metavar="FILE|DIR", help="An authority's ca.pem: its key is not needed."
        ),
    ] = DEFAULT_AUTHORITY,
) -> Reply:
    """Let identity files trust exactly the authorities of a ca.pem; their keys and certificates
    stay.

    This is how files that are not beside the authority follow 'rotate-ca add' and 'drop'.
    """
    trusted, targets = trusted_by(place), files.identity_files(paths)
    for path in targets:
        set_trust(path, trusted)
    return _written("changed", targets)


@command(rotation, "add", examples=["certs rotate-ca add --ca certs"], connects=False)
def add_authority(
    session: Session,
    paths: Files = None,
    *,
    place: Place = DEFAULT_AUTHORITY,
    days: AuthorityDays = authorities.AUTHORITY_DAYS,
) -> Reply:
    """First step: make a new authority beside the old one, and let identity files trust both.

    The old authority still issues. Take the next step when every server and every client has its
    new file: earlier, some of them would refuse the renewed certificates.
    """
    authority = Authority.open(place)
    targets = _targets(paths, place)
    for path in targets:
        authorities.check_trust(path, authority.trusted)
    authority = authority.add_successor(now=_now(), days=days)
    for path in targets:
        set_trust(path, authority.trusted)
    return _written("changed", targets, _next_step("koinon certs rotate-ca issue"))


@command(rotation, "issue", examples=["certs rotate-ca issue --ca certs"], connects=False)
def issue_anew(
    session: Session,
    paths: Files = None,
    *,
    place: Place = DEFAULT_AUTHORITY,
    days: Days = authorities.IDENTITY_DAYS,
) -> Reply:
    """Second step: let the new authority issue, and renew identity files by it.

    The old authority's key is deleted. Files that the new authority has already issued stay as they
    are.
    """
    authority = Authority.open(place)
    targets = _targets(paths, place)
    authority = authority.succeed(targets)
    renewed = [path for path in targets if not authority.has_issued(path)]
    for path in renewed:
        authority.renew(path, now=_now(), days=days)
    return _written("renewed", renewed, _next_step("koinon certs rotate-ca drop"))


@command(rotation, "drop", examples=["certs rotate-ca drop --ca certs"], connects=False)
def drop_authority(
    session: Session, paths: Files = None, *, place: Place = DEFAULT_AUTHORITY
) -> Reply:
    """Third step: let identity files trust the new authority alone.

    Certificates of the old authority are refused from then on, so take this step when every server
    and every client has been renewed.
    """
    targets = _targets(paths, place)
    Authority.open(place).drop_predecessor(targets)
    return _written("changed", targets)


def _next_step(command_line: str) -> str:
    return (
        "next, when these files are where they are used, and the same was done with all "
        f"others ('koinon certs trust', 'renew'): '{command_line}'"
    )


# --- checking ------------------------------------------------------------------------------------


@command(
    app,
    examples=["certs show certs/node-n1.pem", "certs show certs/ca.pem --json"],
    panel=LOOK,
    connects=False,
)
def show(session: Session, path: Annotated[Path, typer.Argument(metavar="FILE")]) -> Reply:
    """Show the content of an identity file or a ca.pem. The private key is not shown."""
    found = _file(path)
    trusted = Table(TRUSTED, found.trusted)
    if found.certificate is None:
        return Reply(found, [trusted])
    key = "yes" if found.private_key else "no"
    return Reply(found, [facts({**_facts(found.certificate), "private key": key}), "", trusted])


TRUSTED = (
    Column("TRUSTED AUTHORITY", "subject"),
    Column("SERIAL", "serial", narrow=2),
    Column("ISSUED", lambda each: f"{each.issued:%Y-%m-%d}", narrow=1),
    Column("EXPIRES", lambda each: f"{each.expires:%Y-%m-%d}"),
    Column(">DAYS LEFT", "days_left"),
)


def _facts(seen: CertificateAnswer) -> dict[str, str | None]:
    return {
        "who": seen.who or "nobody of a Koinon cluster",
        "names": ", ".join(seen.names),
        "serial": seen.serial,
        "issued": f"{seen.issued:%Y-%m-%d %H:%M:%S} UTC",
        "expires": f"{seen.expires:%Y-%m-%d %H:%M:%S} UTC",
        "days left": f"{seen.days_left:,}",
        "issuer": seen.issuer,
        "SHA-256": seen.sha256,
    }


@command(
    app,
    examples=["certs check certs", "certs check /etc/koinon/n1.pem --days 7 || alert"],
    panel=LOOK,
    connects=False,
)
def check(
    session: Session,
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR")],
    *,
    days: Annotated[
        int,
        typer.Option(min=0, max=authorities.DAYS_MAX, help="How soon is too soon to expire."),
    ] = inspection.SOON_DAYS,
) -> Reply:
    """Check identity files, and in directories all certificates and keys.

    Exit code 1 if a certificate has expired or is about to, belongs to another key, comes from an
    authority that its file does not hold, or if others can read a file. Exit code 2 if a file
    cannot be read.
    """
    reports = inspection.check_paths(paths, now=_now(), soon_days=days)
    found = [_checked(report) for report in reports]
    ok = not any(file.problems for file in found)
    blocks = [line for file in found for line in _lines(file)]
    return Reply({"ok": ok, "files": found}, blocks, code=0 if ok else NOT_FOUND)


def _checked(report: Report) -> CheckedFile:
    own = report.view.own if report.view is not None else None
    return CheckedFile(
        path=str(report.path),
        who=own.who or None if own is not None else None,
        expires_at_s=int(own.expires.timestamp()) if own is not None else None,
        days_left=own.days_left if own is not None else None,
        problems=[ProblemAnswer(fault=p.fault.value, text=p.text) for p in report.problems],
    )


def _lines(file: CheckedFile) -> list[Block]:
    who = "" if file.days_left is None else f" ({file.who or 'nobody'})"
    if file.problems:
        head = f"{file.path}{who}:"
        return [remark(head, "bold red", problem.text) for problem in file.problems]
    left = ": well" if file.days_left is None else f": {file.days_left:,} days left"
    return [f"{file.path}{who}{left}"]


def _day(certificate: Any) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


root = typer.Typer()
app.add_typer(rotation, name="rotate-ca", rich_help_panel=REPLACE)
root.add_typer(app, name="certs", rich_help_panel="The cluster")
