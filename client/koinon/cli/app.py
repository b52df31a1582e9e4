"""The command tree. A command's module is imported when the command is called, or when all commands
are listed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from koinon.cli.console import command as commands
from koinon.cli.console import output
from koinon.cli.console.help import Command, Group
from koinon.cli.console.reply import Reply
from koinon_proto.process.child_python import module_command
from koinon_proto.process.printable import OutputError, flush, protect_streams, tell

MODULES = {
    "koinon.cli.data.key_value": ("put", "get", "delete", "scan"),
    "koinon.cli.data.watch": ("watch",),
    "koinon.cli.data.batch": ("batch",),
    "koinon.cli.operate.partitions": ("where",),
    "koinon.cli.data.load": ("load",),
    "koinon.cli.data.copy": ("copy",),
    "koinon.cli.data.ingest": ("ingest",),
    "koinon.cli.data.backup": ("backup",),
    "koinon.cli.data.restore": ("restore",),
    "koinon.cli.local": ("up", "down"),
    "koinon.cli.certs": ("certs",),
    "koinon.cli.operate.admin": ("admin",),
    "koinon.cli.operate.top": ("top",),
    "koinon.cli.web_console": ("console",),
    "koinon.cli.bench": ("bench",),
}
"""The modules with commands (in their ``app``), in the order of the list of commands."""

# Commands of the other packages, which this one does not import: name -> (module, help)
PASSED_THROUGH = {
    "coordinator": ("koinon_coordinator", "Run one coordinator in the foreground"),
    "node": ("koinon_node", "Run one storage node in the foreground"),
    "recover-coordinators": (
        "koinon_coordinator.recover",
        "Make a new coordinator group after a majority of the old one is lost for good",
    ),
}


def version(session: commands.Session) -> Reply:
    """Print the version of the client and of the servers that this package brings."""
    import koinon

    return Reply({"version": koinon.__version__}, f"koinon {koinon.__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        import koinon

        tell(f"koinon {koinon.__version__}")
        raise typer.Exit


def root(
    context: typer.Context,
    coordinators: commands.Coordinators = "",
    tls_bundle: commands.TlsBundle = "",
    token_file: commands.TokenFile = "",
    timeout: commands.Timeout = "",
    json: commands.Json = False,
    debug: commands.Debug = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keep the common options that precede the command's name."""
    context.obj = context.params


def _comes_first(context: typer.Context) -> None:
    """Refuse options before a command of another package: ``run`` passes it on unparsed."""
    name = context.info_name
    output.problem(
        f"'{name}' takes its own options only, after its name\n  'koinon {name} --help' lists them."
    )
    raise typer.Exit(commands.USAGE)


def make_app(modules: Iterable[str] = MODULES) -> typer.Typer:
    """Return the command line with the commands of these modules."""
    app = typer.Typer(
        name="koinon",
        cls=Group,
        help="Koinon: a key-value store cluster.\n\n"
        "\b\n  $ koinon up --detach          start a cluster on this machine\n"
        "  $ koinon put greeting hello   write a record\n"
        "  $ koinon get greeting         read it\n"
        "  $ koinon admin status         how the cluster is\n"
        "  $ koinon down                 stop it; the data stays",
        epilog="Exit codes: 0 done, 1 not found or a condition that did not hold, 2 wrong usage or "
        "input, 3 not available or of unknown fate, 4 output that cannot be written, 130 "
        "interrupted.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for module in modules:
        added = import_module(module).root
        app.registered_commands += added.registered_commands
        app.registered_groups += added.registered_groups
    commands.command(app, panel="The cluster", connects=False)(version)
    for name, (_, what) in PASSED_THROUGH.items():
        app.command(
            name,
            cls=Command,
            help=f"{what} (all options: koinon {name} --help).",
            rich_help_panel="Servers",
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_comes_first)
    return app


def command_line() -> Callable[[], NoReturn]:
    """Return a function that runs the command named in ``sys.argv``."""
    protect_streams(drop_messages=True)
    arguments = sys.argv[1:]
    if arguments and arguments[0] in PASSED_THROUGH:
        _become(PASSED_THROUGH[arguments[0]][0], arguments[1:])
    called = arguments[0] if arguments else ""
    if called in ("version", "--version"):
        return partial(run, make_app(()))
    only = [module for module, commands in MODULES.items() if called in commands]
    return partial(run, make_app(only or MODULES))


def run(app: typer.Typer) -> NoReturn:
    """Run the command and end the process. The exit code of a failed command stands even if its
    output fails too; a command that succeeded exits with another code if its output failed.
    """
    code: Any = 0
    try:
        app(prog_name="koinon")
    except SystemExit as ended:
        code = ended.code
    except OutputError as error:
        sys.exit(output.tell_unprinted(error))
    try:
        flush()
    except OutputError as error:
        unprinted = output.tell_unprinted(error)
        code = code or unprinted
    sys.exit(code)


def _become(module: str, arguments: list[str]) -> None:
    """Replace this process by the other package's, which then handles its own signals and exit
    codes.
    """
    from koinon.local.servers import missing_for_servers

    if missing := missing_for_servers():
        sys.exit(f"koinon: the servers need {', '.join(missing)}: pip install 'koinon[server]'")
    command = module_command(module, *arguments)
    os.execv(command[0], command)
