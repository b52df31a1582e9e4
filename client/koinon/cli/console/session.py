"""The common part of every command: the cluster's addresses, the form of answers, exit codes.

``command`` registers a function whose first parameter is a :class:`Session`; it adds the common
options to it, and turns errors into one line on standard error and an exit code:

0 done · 1 not found, or a condition that did not hold · 2 wrong usage or input ·
3 not available, refused, or of unknown fate · 130 interrupted
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from koinon.certs.errors import CertificateError
from koinon.cli.console import output
from koinon.cli.console.help import Command
from koinon.core.quantities import parse_duration_ms
from koinon.local.files import ClusterFile, LocalClusterError, running_cluster
from koinon.local.members import coordinators_of
from koinon.operate.unknown_outcomes import ChangeFateError
from koinon_proto.contract import cluster_errors, errors
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import MAX_TTL_MS
from koinon_proto.process import printable

if TYPE_CHECKING:
    from koinon import Client
    from koinon.operate.admin import Admin

DONE = 0
NOT_FOUND = 1
USAGE = 2
UNAVAILABLE = 3
INTERRUPTED = 130
BROKEN_PIPE = 141

DEFAULT_COORDINATORS = "127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402"
DEFAULT_TIMEOUT_MS = 5000
BUNDLE_VARIABLE = "KOINON_TLS_BUNDLE"  # as security.transport has both, which imports gRPC
TOKEN_FILE_VARIABLE = "KOINON_TOKEN_FILE"
CLUSTER_ID = "KOINON_CLUSTER_ID"
"""Names the cluster that an operator means: any other refuses."""
CONNECTION_PANEL = "Connection and output"

_EXIT_CODES: dict[type[KoinonError], int] = {
    errors.InvalidArgumentError: USAGE,
    errors.ConfigurationError: USAGE,
    cluster_errors.DataDirectoryError: USAGE,
    errors.PartitionerMismatchError: USAGE,
    cluster_errors.MembershipChangeError: USAGE,
    LocalClusterError: USAGE,
    CertificateError: USAGE,
    errors.ConditionFailedError: NOT_FOUND,
    cluster_errors.UnknownNodeError: NOT_FOUND,
    errors.UnknownKeyspaceError: USAGE,
    cluster_errors.KeyspaceChangeError: USAGE,
}


@dataclass(frozen=True, kw_only=True)
class Session:
    """The common options, resolved."""

    coordinators: str
    timeout_ms: int
    timeout_given: bool
    json: bool
    debug: bool
    keyspace: str = ""

    def timeout_or(self, default_ms: int) -> int:
        """Return the value of --timeout, or else the command's own default."""
        return self.timeout_ms if self.timeout_given else default_ms

    def connect(self) -> Client:
        """Connect the blocking client."""
        import koinon

        return koinon.connect(self.coordinators, timeout_ms=self.timeout_ms, keyspace=self.keyspace)

    def admin(self, default_timeout_ms: int = DEFAULT_TIMEOUT_MS) -> Admin:
        """Connect to the coordinators for an operator's calls."""
        from koinon.operate.admin import Admin

        return Admin(
            self.coordinators,
            timeout_ms=self.timeout_or(default_timeout_ms),
            cluster_id=os.environ.get(CLUSTER_ID, ""),
        )

    def say(self, message: str, answer: Mapping[str, Any]) -> None:
        """Answer in words, or for programs."""
        if self.json:
            output.print_json(answer)
        else:
            output.console().print(message, markup=False)

    def refuse(
        self, problem: str, advice: str, *, code: int = USAGE, error: str = "", **more: Any
    ) -> int:
        """Say why nothing is done and what would help; return the exit code.

        Args:
            error: the problem as programs are told it, where that differs.
            more: for programs, beside the error.
        """
        output.problem(f"{problem}\n  {advice}")
        if self.json:
            output.print_json({"error": error or problem, **more})
        return code


def duration_ms(text: str) -> int:
    """Return the milliseconds of a duration with a unit, such as ``500ms``, ``30s`` or ``2h``."""
    try:
        value = parse_duration_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except OverflowError:
        value = MAX_TTL_MS + 1
    if value > MAX_TTL_MS:
        raise typer.BadParameter("a duration may be a hundred years at most")
    if value < 1:
        raise typer.BadParameter("a duration must be at least 1ms")
    return value


def default_data_dir() -> Path:
    """Return the directory in which ``koinon up`` keeps its cluster by default."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "koinon" / "local"


def default_coordinators() -> str:
    """The running local cluster of the default directory, else the usual local addresses."""
    running = _default_cluster()
    return DEFAULT_COORDINATORS if running is None else coordinators_of(running)


def _default_directory() -> Path:
    return Path(os.environ.get("KOINON_DATA") or default_data_dir())


def _default_cluster() -> ClusterFile | None:
    """The local cluster that runs on the default directory."""
    try:
        return running_cluster(_default_directory())
    except KoinonError:
        return None


def _take_local_identity(coordinators: str) -> None:
    """Connect with the certificate that the local cluster of the default directory has made, if
    these are its coordinators and the environment names no other. What connects looks there.
    """
    if os.environ.get(BUNDLE_VARIABLE):
        return
    running = _default_cluster()
    if running is None or not running.tls_bundle:
        return
    if set(coordinators.split(",")) <= set(coordinators_of(running).split(",")):
        os.environ[BUNDLE_VARIABLE] = str(_default_directory() / running.tls_bundle)


Coordinators = Annotated[
    str,
    typer.Option(
        "--coordinators",
        envvar="KOINON_COORDINATORS",
        help="Where the cluster is: HOST:PORT,HOST:PORT,… By default the cluster of "
        "[bold]koinon up[/bold].",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
TlsBundle = Annotated[
    str,
    typer.Option(
        "--tls-bundle",
        metavar="FILE",
        help="Your identity file: key, certificate and the CA's (koinon certs). By default the one "
        "that KOINON_TLS_BUNDLE names, or the local cluster's.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="A user's token, beside the identity file that 'koinon certs client' makes. By "
        "default the one that KOINON_TOKEN_FILE names.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
KeyspaceName = Annotated[
    str,
    typer.Option(
        "--keyspace",
        envvar="KOINON_KEYSPACE",
        metavar="NAME",
        help="The keyspace that keys are in. By default 'default'.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout",
        help="How long one operation may take, such as 500ms or 10s (default 5s).",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Answer for programs.", rich_help_panel=CONNECTION_PANEL)
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show the traceback of an error.", rich_help_panel=CONNECTION_PANEL
    ),
]

_COMMON: tuple[tuple[str, Any, Any], ...] = (
    ("coordinators", Coordinators, ""),
    ("tls_bundle", TlsBundle, ""),
    ("token_file", TokenFile, ""),
    ("keyspace", KeyspaceName, ""),
    ("timeout", Timeout, ""),
    ("json", Json, False),
    ("debug", Debug, False),
)
CONNECTION_OPTIONS = {"coordinators", "tls_bundle", "token_file", "timeout"}


def root_options(context: typer.Context, **given: Any) -> None:
    """Keep the common options that were given before the command's name."""
    context.obj = given


@contextlib.contextmanager
def _identity(chosen: Mapping[str, Any]) -> Iterator[None]:
    """Have what connects find the files that the options name: where it looks by itself, as Spark's
    workers do, which inherit it.
    """
    named = {
        BUNDLE_VARIABLE: chosen.get("tls_bundle"),
        TOKEN_FILE_VARIABLE: chosen.get("token_file"),
    }
    given = {name: str(Path(path).absolute()) for name, path in named.items() if path}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _chosen(context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """The common options as given after the command's name, or before it."""
    before = context.find_root().obj or {}
    return {name: given.get(name) or before.get(name) for name, _, _ in _COMMON}


def _session(chosen: dict[str, Any], *, connects: bool) -> Session:
    coordinators = chosen["coordinators"]
    if connects:
        coordinators = coordinators or default_coordinators()
        _take_local_identity(coordinators)
    return Session(
        coordinators=coordinators or "",
        timeout_ms=duration_ms(chosen["timeout"]) if chosen["timeout"] else DEFAULT_TIMEOUT_MS,
        timeout_given=bool(chosen["timeout"]),
        json=bool(chosen["json"]),
        debug=bool(chosen["debug"]),
        keyspace=chosen["keyspace"] or "",
    )


Body = Callable[..., int | None]


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: Sequence[str] = (),
    panel: str | None = None,
    connects: bool = True,
    keyed: bool = False,
) -> Callable[[Body], Body]:
    """Register ``function(session, …) -> exit code or None`` as a command of ``app``; one that
    does not connect to a cluster has no options for it, and one that is about no keys (``keyed``)
    none for the keyspace.
    """

    def register(function: Body) -> Body:
        text = _help_text(function)
        if examples:
            text += "\n\n\b\nExamples:\n" + "\n".join(f"  $ {line}" for line in examples)
        app.command(name, cls=Command, help=text, rich_help_panel=panel)(
            _with_common_options(function, connects=connects, keyed=keyed)
        )
        return function

    return register


def default_command(app: typer.Typer, function: Body) -> None:
    """Register what a group of commands does when it is called without a subcommand."""
    run = _with_common_options(function)
    app.callback(invoke_without_command=True, help=_help_text(function))(run)


def _help_text(function: Body) -> str:
    """A docstring with its paragraphs' lines joined, to be wrapped to the terminal's width."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _with_common_options(
    function: Body, *, connects: bool = True, keyed: bool = False
) -> Callable[..., None]:
    """Return the function as Typer takes it: with the common options in its signature."""
    common = [
        row
        for row in _COMMON
        if (connects or row[0] not in CONNECTION_OPTIONS) and (keyed or row[0] != "keyspace")
    ]
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    own = [part for p in own for part in (_fields_of(groups[p.name]) if p.name in groups else [p])]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    parameters += [parameter.replace(kind=keyword) for parameter in own]
    parameters += [
        inspect.Parameter(option, keyword, annotation=kind, default=default)
        for option, kind, default in common
    ]

    def run(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is not None:
            before = context.find_root().obj
            before.update({name: given[name] for name, _, _ in common if given[name]})
            return
        chosen = _chosen(context, {name: given[name] for name, _, _ in common})
        arguments = {parameter.name: given[parameter.name] for parameter in own}
        for name, group in groups.items():
            arguments[name] = group(**{f.name: arguments.pop(f.name) for f in fields(group)})
        with _identity(chosen):
            guarded(
                lambda: function(_session(chosen, connects=connects), **arguments),
                debug=bool(chosen["debug"]),
                as_json=bool(chosen["json"]),
                coordinators=chosen["coordinators"] or "",
                called=context.command_path,
            )

    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _fields_of(group: type) -> list[inspect.Parameter]:
    """Return a dataclass of options that several commands have as parameters."""
    return list(inspect.signature(group, eval_str=True).parameters.values())


def guarded(
    function: Callable[[], int | None],
    *,
    debug: bool,
    as_json: bool,
    coordinators: str = "",
    called: str = "",
) -> NoReturn:
    """Run a command's body and end with its exit code, whatever happens. For the advice,
    ``coordinators`` are those that were given ('': the default), and ``called`` is the command.
    """
    try:
        code = _reported(
            function, debug=debug, as_json=as_json, coordinators=coordinators, called=called
        )
    except BrokenPipeError:  # koinon scan | head
        _let_go()
        code = BROKEN_PIPE
    raise typer.Exit(code)


def _let_go() -> None:
    """Give up what cannot be written any more: Python would try again at its end, and complain."""
    for stream in map(printable.stream_of, (False, True)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _reported(
    function: Callable[[], int | None],
    *,
    debug: bool,
    as_json: bool,
    coordinators: str,
    called: str,
) -> int:
    try:
        code = function() or DONE
        printable.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except typer.Abort as abort:  # Ctrl-C or Ctrl-D at a question; all are asked beforehand
        output.note("\nno answer: nothing was changed")
        code = USAGE if isinstance(abort.__context__, EOFError) else INTERRUPTED
    except BrokenPipeError:
        raise
    except (KoinonError, OSError) as error:
        code = fail(error, debug=debug, coordinators=coordinators, called=called)
        if as_json:
            output.print_json({"error": message_of(error)})
    return code


def message_of(error: KoinonError | OSError) -> str:
    """The error in a line, with the file's name where it is about one, and with the id by which
    servers' logs know the request.
    """
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    if not isinstance(error, LocalClusterError):  # which shows the end of a log
        text = printable.printable(text)
    request_id = error.request_id if isinstance(error, KoinonError) else ""
    return text if request_id in text else f"{text} [request {request_id}]"


def fail(
    error: KoinonError | OSError, *, debug: bool, coordinators: str = "", called: str = ""
) -> int:
    """Say what went wrong and what to do next; return the exit code."""
    advice = _advice(error, coordinators, called) if isinstance(error, KoinonError) else ""
    output.problem(f"{message_of(error)}{advice}")
    if debug:
        printable.tell("".join(traceback.format_exception(error)).rstrip(), stderr=True)
    if isinstance(error, OSError):
        return USAGE
    return next(
        (code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), UNAVAILABLE
    )


def _dead_members_advice(coordinators: str) -> str:
    running = _default_cluster()
    ours = running is not None and (
        not coordinators or set(coordinators.split(",")) == set(coordinators_of(running).split(","))
    )
    if running is None or not ours:
        return "\n  'koinon admin status' shows which nodes are down: start them again."
    again = "'koinon up -d'" if running.detached else "Ctrl-C where it runs and 'koinon up' again"
    return (
        f"\n  'koinon admin status' shows which nodes are down; {again} "
        "starts the dead members of this local cluster."
    )


def _reach_advice(called: str) -> str:
    """Return what to try where no server answers: other commands than the one that was called."""
    advice = {
        "koinon up": "'koinon up' starts a local one",
        "": "--coordinators or KOINON_COORDINATORS says where another is",
        "koinon admin status": "'koinon admin status' shows its state",
    }
    helps = [text for command, text in advice.items() if not command or command != called]
    return f"\n  Is the cluster up? {'; '.join(helps)}."


def _advice(error: KoinonError, coordinators: str, called: str) -> str:
    if isinstance(error.__cause__, errors.PartitionOfflineError | errors.LeaseExpiredError):
        return _dead_members_advice(coordinators)
    match error:
        case errors.UnavailableError() | errors.ClusterNotReadyError():
            return _reach_advice(called)
        case errors.PartitionOfflineError() | errors.LeaseExpiredError():
            return _dead_members_advice(coordinators)
        case ChangeFateError():
            again = "; to repeat it does no harm" if error.repeatable else ""
            return f"\n  '{error.shown_by}' shows whether it was{again}."
        case errors.UnknownFateError() if called == "koinon batch":
            return "\n  Read one of its keys to see: all of it was written, or nothing."
        case errors.UnknownFateError():
            return "\n  Read the key to see; a plain put or delete may simply be repeated."
        case errors.ConditionFailedError():
            return "\n  'koinon get KEY --json' shows the record and its version."
        case errors.InternalError():
            return "\n  This is a defect; the log of the server that answered has the whole story."
        case errors.QuotaExceededError():
            return "\n  'koinon admin keyspaces' shows its limits; 'alter' changes them."
        case errors.ResourceExhaustedError():
            return "\n  Try again in a moment."
        case _:
            return ""
