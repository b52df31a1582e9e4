"""certs: a cluster's certificate authority, and the identity files of who takes part in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from koinon.certs import authority as authorities
from koinon.certs import files, inspection
from koinon.certs.authority import Authority, Identity, set_trust, trusted_by
from koinon.certs.errors import CertificateError
from koinon.certs.inspection import CertificateView, FileView, Report
from koinon.cli.console import output
from koinon.cli.console.help import Group
from koinon.cli.console.session import NOT_FOUND, Body, Session, command
from koinon_proto.contract.access import ROOT
from koinon_proto.security.names import Kind

app = typer.Typer(
    cls=Group,
    help="Make, renew and check the certificates by which servers and users are known.\n\n"
    "\b\n  $ koinon certs ca                    make an authority in ./certs\n"
    "  $ koinon certs coordinator c1 c2 c3  one identity file for each\n"
    "  $ koinon certs node n1 n2 n3\n"
    "  $ koinon certs user root             the user who may do everything\n"
    "  $ koinon certs check certs           what is about to expire, or wrong",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
rotation = typer.Typer(
    cls=Group,
    help="Replace the authority of a cluster that goes on, in three steps. Between them, bring "
    "the files to where they are used: servers and clients read them again by themselves.\n\n"
    "\b\n  $ koinon certs rotate-ca add    a new authority; all trust both\n"
    "  $ koinon certs rotate-ca issue  new certificates, by the new one\n"
    "  $ koinon certs rotate-ca drop   the old one is trusted no more",
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
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="Where to write: a directory, or a file (*.pem) for one NAME. By default beside the "
        "authority.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")]


def _now() -> datetime:
    return datetime.now(UTC)


# --- making --------------------------------------------------------------------------------------


def ca(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="[DIR]")] = DEFAULT_AUTHORITY,
    *,
    days: AuthorityDays = authorities.AUTHORITY_DAYS,
) -> None:
    """Make a certificate authority: ca.pem and ca.key in a directory that only you can read.

    Who has ca.key can be anybody in the cluster: keep the directory on a machine that runs none of
    the cluster, and in a backup. Only the files that 'koinon certs node' and the like make go to
    servers and users.
    """
    made = Authority.create(directory, now=_now(), days=days)
    path = directory / authorities.CERTIFICATE_FILE
    session.say(
        f"Made an authority in {directory}. It holds until {_day(made.certificate)}.",
        {"ca": str(path), "certificate": _file_json(inspection.view_file(path, now=_now()))},
    )


def _issue(
    session: Session,
    identities: list[Identity],
    place: Path,
    out: Path | None,
    days: int,
    force: bool,
) -> None:
    authority = Authority.open(place)
    paths = _paths_of(identities, out or place)
    if not force:  # all of them or none
        for path in paths:
            if path.exists():
                raise CertificateError(
                    path=str(path),
                    reason="exists: 'koinon certs renew' gives it a new key and certificate, "
                    "--force overwrites it",
                )
    for identity, path in zip(identities, paths, strict=True):
        authority.issue(identity, path, now=_now(), days=days, overwrite=force)
    _tell_written(session, "made", paths)


def _paths_of(identities: list[Identity], out: Path) -> list[Path]:
    if out.suffix != ".pem":
        return [out / identity.file_name for identity in identities]
    if len(identities) > 1:
        raise typer.BadParameter(f"--out {out} is one file: name a directory for several")
    return [out]


def _tell_written(session: Session, what: str, paths: list[Path]) -> None:
    views = [inspection.view_file(path, now=_now()) for path in paths]
    if session.json:
        output.print_json({what: [_file_json(view) for view in views]})
        return
    for view in views:
        assert view.own is not None
        output.console().print(
            f"{view.path}: {view.own.who}, until {view.own.expires:%Y-%m-%d}", markup=False
        )


def _servers(kind: Kind, given: list[str], hosts: list[str] | None) -> list[Identity]:
    if hosts and len(given) > 1:
        raise typer.BadParameter("--host is for one NAME: it would make each pass for the others")
    return [Identity(kind=kind, name=name, hosts=tuple(hosts or ())) for name in _once(given)]


def _once(given: list[str]) -> list[str]:
    return list(dict.fromkeys(given))


def coordinator(
    session: Session,
    name: Names,
    *,
    place: Place = DEFAULT_AUTHORITY,
    host: Hosts = None,
    out: Out = None,
    days: Days = authorities.IDENTITY_DAYS,
    force: Force = False,
) -> None:
    """Make identity files of coordinators. NAME is what 'koinon coordinator --id' is told."""
    _issue(session, _servers(Kind.COORDINATOR, name, host), place, out, days, force)


def node(
    session: Session,
    name: Names,
    *,
    place: Place = DEFAULT_AUTHORITY,
    host: Hosts = None,
    out: Out = None,
    days: Days = authorities.IDENTITY_DAYS,
    force: Force = False,
) -> None:
    """Make identity files of nodes. NAME is what 'koinon node --id' is told."""
    _issue(session, _servers(Kind.NODE, name, host), place, out, days, force)


def user(
    session: Session,
    name: Names,
    *,
    place: Place = DEFAULT_AUTHORITY,
    out: Out = None,
    days: Days = authorities.IDENTITY_DAYS,
    force: Force = False,
) -> None:
    """Make identity files of users. What a user may do is said by roles; root may do everything."""
    identities = [Identity(kind=Kind.USER, name=each) for each in _once(name)]
    _issue(session, identities, place, out, days, force)
    if ROOT in name and not session.json:
        output.note("root may do everything in the cluster, always: give its file to nobody else")


def client(
    session: Session,
    *,
    place: Place = DEFAULT_AUTHORITY,
    out: Out = None,
    days: Days = authorities.IDENTITY_DAYS,
    force: Force = False,
) -> None:
    """Make the identity file of programs that show a token: it names no one; one serves all."""
    _issue(session, [Identity(kind=Kind.CLIENT)], place, out, days, force)


# --- renewing ------------------------------------------------------------------------------------


def renew(
    session: Session,
    paths: Files = None,
    *,
    place: Place = DEFAULT_AUTHORITY,
    days: Days = authorities.IDENTITY_DAYS,
    left: Annotated[
        int | None,
        typer.Option("--days-left", min=0, help="Only those that hold for fewer days than this."),
    ] = None,
) -> None:
    """Give identity files a new key and a new certificate, with the same names.

    Servers and clients that use a file read it again by themselves.
    """
    authority, renewed, now = Authority.open(place), [], _now()
    for path in _targets(paths, place):
        view = inspection.view_file(path, now=now)
        if left is None or view.own is None or view.own.days_left < left:
            authority.renew(path, now=now, days=days)
            renewed.append(path)
    if not renewed and not session.json:
        output.note("nothing to renew")
    _tell_written(session, "renewed", renewed)


def _targets(paths: list[Path] | None, place: Path) -> list[Path]:
    """The identity files that are meant; none where none are named, and the authority has none."""
    if paths:
        return files.identity_files(paths)
    try:
        return files.identity_files([place])
    except CertificateError:
        return []


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
) -> None:
    """Let identity files trust exactly the authorities of a ca.pem, and keep key and certificate.

    This is how files that are not beside the authority follow 'rotate-ca add' and 'drop'.
    """
    trusted, targets = trusted_by(place), files.identity_files(paths)
    for path in targets:
        set_trust(path, trusted)
    _tell_written(session, "changed", targets)


def add_authority(
    session: Session,
    paths: Files = None,
    *,
    place: Place = DEFAULT_AUTHORITY,
    days: AuthorityDays = authorities.AUTHORITY_DAYS,
) -> None:
    """First step: make a new authority beside the old one, and let identity files trust both.

    The old one goes on issuing. The next step is for when every server and every client has its
    new file: until then, some would refuse who is renewed.
    """
    authority = Authority.open(place)
    targets = _targets(paths, place)
    for path in targets:
        authorities.check_trust(path, authority.trusted)
    authority = authority.add_successor(now=_now(), days=days)
    for path in targets:
        set_trust(path, authority.trusted)
    _tell_written(session, "changed", targets)
    _tell_next(session, "koinon certs rotate-ca issue")


def issue_anew(
    session: Session,
    paths: Files = None,
    *,
    place: Place = DEFAULT_AUTHORITY,
    days: Days = authorities.IDENTITY_DAYS,
) -> None:
    """Second step: let the new authority issue, and renew identity files by it.

    The old one's key is deleted. Files that the new one has issued already stay as they are.
    """
    authority = Authority.open(place)
    targets = _targets(paths, place)
    authority = authority.succeed(targets)
    renewed = [path for path in targets if not authority.has_issued(path)]
    for path in renewed:
        authority.renew(path, now=_now(), days=days)
    _tell_written(session, "renewed", renewed)
    _tell_next(session, "koinon certs rotate-ca drop")


def drop_authority(
    session: Session, paths: Files = None, *, place: Place = DEFAULT_AUTHORITY
) -> None:
    """Third step: let identity files trust the new authority alone.

    A certificate of the old one is refused from then on, so this is for when every server and
    every client has been renewed.
    """
    targets = _targets(paths, place)
    Authority.open(place).drop_predecessor(targets)
    _tell_written(session, "changed", targets)


def _tell_next(session: Session, command_line: str) -> None:
    if not session.json:
        output.note(
            "next, when these files are where they are used, and the same was done with all "
            f"others ('koinon certs trust', 'renew'): '{command_line}'"
        )


# --- looking -------------------------------------------------------------------------------------


def show(session: Session, path: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Show what an identity file, or a ca.pem, says. It shows nothing of the key."""
    view = inspection.view_file(path, now=_now())
    if session.json:
        output.print_json(_file_json(view))
        return
    if view.own is not None:
        facts = output.table("", "")
        facts.show_header = False
        for name, value in _facts(view.own):
            facts.add_row(f"[dim]{name}[/]", output.escape(value))
        facts.add_row("[dim]private key[/]", "yes" if view.has_key else "no")
        output.show(facts)
        output.console().print()
    trusted = output.table("TRUSTED AUTHORITY", "SERIAL", "ISSUED", "EXPIRES", ">DAYS LEFT")
    for each in view.authorities:
        trusted.add_row(
            output.escape(each.subject),
            each.serial,
            f"{each.issued:%Y-%m-%d}",
            f"{each.expires:%Y-%m-%d}",
            f"{each.days_left:,}",
        )
    output.show(trusted, expendable=("ISSUED", "SERIAL"))


def _facts(view: CertificateView) -> list[tuple[str, str]]:
    return [
        ("who", view.who or "nobody of a Koinon cluster"),
        ("names", ", ".join(view.alternative_names)),
        ("serial", view.serial),
        ("issued", f"{view.issued:%Y-%m-%d %H:%M:%S} UTC"),
        ("expires", f"{view.expires:%Y-%m-%d %H:%M:%S} UTC"),
        ("days left", f"{view.days_left:,}"),
        ("issuer", view.issuer),
        ("SHA-256", view.fingerprint),
    ]


def check(
    session: Session,
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR")],
    *,
    days: Annotated[
        int,
        typer.Option(min=0, max=authorities.DAYS_MAX, help="How soon is too soon to expire."),
    ] = inspection.SOON_DAYS,
) -> int | None:
    """Check identity files, and in directories all certificates and keys.

    Exit code 1 if one has expired or is about to, has another certificate's key, is of no
    authority that it holds, or can be read by others. 2 if a file cannot be read.
    """
    reports = inspection.check_paths(paths, now=_now(), soon_days=days)
    if session.json:
        output.print_json(
            {
                "ok": not any(report.problems for report in reports),
                "files": [_report_json(report) for report in reports],
            }
        )
    else:
        _print_reports(reports)
    return NOT_FOUND if any(report.problems for report in reports) else None


def _print_reports(reports: list[Report]) -> None:
    printer = output.console()
    for report in reports:
        own = report.view.own if report.view is not None else None
        who = output.escape(f" ({own.who or 'nobody'})" if own is not None else "")
        for problem in report.problems:
            printer.print(
                f"[bold red]{output.escape(str(report.path))}{who}:[/] "
                f"{output.escape(problem.text)}",
                soft_wrap=True,
            )
        if not report.problems:
            left = f": {own.days_left:,} days left" if own is not None else ": well"
            printer.print(f"{output.escape(str(report.path))}{who}{left}", soft_wrap=True)


# --- for programs --------------------------------------------------------------------------------


def _certificate_json(view: CertificateView) -> dict[str, Any]:
    return {
        "who": view.who or None,
        "subject": view.subject,
        "issuer": view.issuer,
        "names": list(view.alternative_names),
        "serial": view.serial,
        "issued_at_s": int(view.issued.timestamp()),
        "expires_at_s": int(view.expires.timestamp()),
        "days_left": view.days_left,
        "sha256": view.fingerprint,
    }


def _file_json(view: FileView) -> dict[str, Any]:
    return {
        "path": str(view.path),
        "private_key": view.has_key,
        "certificate": _certificate_json(view.own) if view.own is not None else None,
        "trusted": [_certificate_json(each) for each in view.authorities],
    }


def _report_json(report: Report) -> dict[str, Any]:
    own = report.view.own if report.view is not None else None
    return {
        "path": str(report.path),
        "who": own.who or None if own is not None else None,
        "expires_at_s": int(own.expires.timestamp()) if own is not None else None,
        "days_left": own.days_left if own is not None else None,
        "problems": [{"fault": each.fault.value, "text": each.text} for each in report.problems],
    }


def _day(certificate: Any) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


COMMANDS: dict[str, tuple[Body, str, list[str]]] = {
    "ca": (ca, MAKE, ["", "/secure/koinon-ca --days 3652"]),
    "coordinator": (coordinator, MAKE, ["c1 c2 c3", "c1 --out /etc/koinon/c1.pem"]),
    "node": (node, MAKE, ["n1 n2 n3", "n1 --host store1.example.com --host 10.0.0.7"]),
    "user": (user, MAKE, ["root", "app --days 90 --out app.pem"]),
    "client": (client, MAKE, [""]),
    "show": (show, LOOK, ["certs/node-n1.pem", "certs/ca.pem --json"]),
    "check": (check, LOOK, ["certs", "/etc/koinon/n1.pem --days 7 || alert"]),
    "renew": (renew, REPLACE, ["", "certs/node-n1.pem", "--days-left 60   (from cron)"]),
    "trust": (trust, REPLACE, ["app.pem --ca ca.pem"]),
}
"""Commands by name, with their panel and the arguments of their examples."""
STEPS: dict[str, Body] = {"add": add_authority, "issue": issue_anew, "drop": drop_authority}
for _name, (_function, _panel, _arguments) in COMMANDS.items():
    _examples = [f"koinon certs {_name} {text}".rstrip() for text in _arguments]
    command(app, _name, examples=_examples, panel=_panel, connects=False)(_function)
for _name, _function in STEPS.items():
    command(
        rotation, _name, examples=[f"koinon certs rotate-ca {_name} --ca certs"], connects=False
    )(_function)
app.add_typer(rotation, name="rotate-ca", rich_help_panel=REPLACE)


def add_to(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="certs", rich_help_panel="The cluster")
