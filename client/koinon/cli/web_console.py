"""console: serves the cluster as a page in a browser."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import USAGE, RefusedError, Session, command, not_empty
from koinon.cli.console.signals import StopSignals
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process.printable import flush

if TYPE_CHECKING:
    from koinon.web_console.web_server import ConsoleSettings

root = typer.Typer()
NEEDS = ("starlette", "uvicorn", "sse_starlette")
TIMEOUT_MS = 1_500
CODE_CHARS_MIN, CODE_CHARS_MAX = 16, 512
WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Door:
    """The options for the console's address and access."""

    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            callback=not_empty,
            help="The address that the console listens on. If other machines reach it, browsers "
            "have to show a code.",
        ),
    ] = "127.0.0.1:7480"
    certificate: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            callback=not_empty,
            help="Speak HTTPS: a PEM file with a private key and a certificate that browsers take.",
        ),
    ] = ""
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A host name by which browsers reach the console, beside 127.0.0.1 and localhost; "
            "may be repeated. Requests with another Host are refused.",
        ),
    ] = None
    code_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            callback=not_empty,
            help="A file with the code that browsers have to show, 16 characters or more. By "
            "default each start makes a new code, if one is required.",
        ),
    ] = ""


@command(
    root,
    panel="The cluster",
    examples=[
        "console --open",
        "console --listen 0.0.0.0:7480 --host-name ops.example --certificate ops.pem",
    ],
)
def console(
    session: Session,
    *,
    door: Door,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in this machine's browser.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60.0, help="The interval of polls, in seconds.")
    ] = 1.0,
) -> None:
    """Serve a page that shows the cluster in a browser: partitions, nodes, the place of a key, and
    recent changes.

    The page changes nothing. It shows what the console's own user may see. Ctrl-C ends it.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise RefusedError(
            f"the console needs {', '.join(missing)}", "pip install 'koinon[console]'", code=USAGE
        )
    from koinon.web_console.web_server import ConsoleServer

    timeout_ms = session.timeout_or(TIMEOUT_MS)
    settings = _settings(door, interval)
    with (
        StopSignals() as stopping,
        ConsoleServer(session.coordinators, settings, timeout_ms=timeout_ms) as server,
    ):
        try:
            server.start()
            with stopping.deferred():
                _tell(session, server.url, settings)
                if open_browser and not webbrowser.open(server.url):
                    output.note("no browser was found here: open the address above")
                while not stopping.wait(WAIT_S):
                    pass
        except KeyboardInterrupt:
            if not session.json:
                output.note("stopped")


def _settings(door: Door, interval_s: float) -> ConsoleSettings:
    from koinon.web_console.web_server import ConsoleSettings

    return ConsoleSettings(
        listen=door.listen,
        certificate=door.certificate,
        host_names=tuple(door.host_name or ()),
        code=_code_in(door.code_file) if door.code_file else "",
        interval_s=interval_s,
    )


def _code_in(path: str) -> str:
    with Path(path).open(encoding="ascii", errors="replace") as file:
        code = file.read(CODE_CHARS_MAX + 2).strip()
    plain = code.isascii() and code.isprintable() and " " not in code
    if not plain or not CODE_CHARS_MIN <= len(code) <= CODE_CHARS_MAX:
        raise ConfigurationError(
            reason=f"--code-file {path}: must have one line of {CODE_CHARS_MIN} to "
            f"{CODE_CHARS_MAX} printable ASCII characters, without blanks"
        )
    return code


def _tell(session: Session, url: str, settings: ConsoleSettings) -> None:
    if session.json:
        output.print_json({"url": url, "asks_for_code": "#" in url})
    else:
        output.write_line(f"The console is at {url}")
        output.note("Ctrl-C ends it.")
        if not settings.is_local and not settings.certificate:
            output.note(
                "Others in the network can read along: --certificate FILE has it speak HTTPS."
            )
    flush()
