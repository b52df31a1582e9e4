"""The common part of every command: the cluster's addresses, the form of answers, exit codes.

``command`` registers a function whose first parameter is a :class:`Session`; it adds the common
options to it, prints its reply, and turns errors into one line on standard error and an exit code:

0 done · 1 not found, or a condition that did not hold · 2 wrong usage or input ·
3 not available, refused, or of unknown fate · 4 the output cannot be written · 130 interrupted
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

from koinon.certs.certificate_error import CertificateError
from koinon.cli.console import output
from koinon.cli.console.help import Command
from koinon.cli.console.reply import Reply
from koinon.cli.console.units import as_given, options_of
from koinon.cli.console.which_cluster import (
    BUNDLE_VARIABLE,
    COORDINATORS_VARIABLE,
    default_coordinators,
    local_cluster,
    take_local_identity,
    variable,
)
from koinon.core.quantities import parse_duration_ms
from koinon.local.cluster_files import ClusterStoppedError, LocalClusterError
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

DEFAULT_TIMEOUT_MS = 5000
# the default of security.transport, whose import would import gRPC
TOKEN_FILE_VARIABLE = "KOINON_TOKEN_FILE"
KEYSPACE_VARIABLE = "KOINON_KEYSPACE"
CLUSTER_ID = "KOINON_CLUSTER_ID"
"""The id of the expected cluster: any other cluster refuses the call."""
CONNECTION_PANEL = "Connection and output"

_EXIT_CODES: dict[type[KoinonError], int] = {
    errors.InvalidArgumentError: USAGE,
    errors.ConfigurationError: USAGE,
    cluster_errors.DataDirectoryError: USAGE,
    errors.PartitionerMismatchError: USAGE,
    cluster_errors.MembershipChangeError: USAGE,
    ClusterStoppedError: UNAVAILABLE,
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
        """Connect a blocking client."""
        import koinon

        return koinon.connect(self.coordinators, timeout_ms=self.timeout_ms, keyspace=self.keyspace)

    def admin(self, default_timeout_ms: int = DEFAULT_TIMEOUT_MS) -> Admin:
        """Connect to the coordinators for operators' calls."""
        from koinon.operate.admin import Admin

        return Admin(
            self.coordinators,
            timeout_ms=self.timeout_or(default_timeout_ms),
            cluster_id=variable(CLUSTER_ID),
        )

    def ask(self, question: str, *, yes: bool, shows: str = "") -> None:
        """Ask the operator to confirm a change; return if the answer is yes, or at once with
        ``yes``.

        Args:
            shows: a clause about the option that only shows the change, for the advice.

        Raises:
            RefusedError: there is no terminal to ask on.
            typer.Exit: the answer was no.
        """
        if yes:
            return
        if self.json or not output.somebody_is_there():
            raise RefusedError(
                "not carried out: there is no terminal to ask on",
                f"--yes carries it out without asking{shows}.",
                error="not carried out: --yes is missing",
            )
        if not typer.confirm(question, err=True):
            output.note("nothing was changed")
            raise typer.Exit(USAGE)


class RefusedError(Exception):
    """A command refuses to do something; the text says why and what to do instead.

    Args:
        error: the error for ``--json``, if it differs from the text.
        better: the suggested alternative, for ``--json``.
    """

    def __init__(
        self,
        problem: str,
        advice: str,
        *,
        code: int = USAGE,
        error: str = "",
        better: Sequence[str] | None = None,
    ) -> None:
        super().__init__(problem)
        self.text = f"{problem}\n  {advice}"
        self.code = code
        self.answer: dict[str, Any] = {"error": error or problem}
        if better is not None:
            self.answer["better"] = list(better)


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


def not_empty(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an option with an empty value, which would silently mean the default. ``value``: a
    text, or the texts of an option that may be repeated.
    """
    source = context.get_parameter_source(str(parameter.name))
    is_empty = "" in value if isinstance(value, list) else value == ""
    if is_empty and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("is empty: give it a value, or leave the option out")
    return value


Coordinators = Annotated[
    str,
    typer.Option(
        "--coordinators",
        envvar=COORDINATORS_VARIABLE,
        callback=not_empty,
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
        callback=not_empty,
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
        callback=not_empty,
        help="A user's token, beside the identity file that 'koinon certs client' makes. By "
        "default the one that KOINON_TOKEN_FILE names.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
KeyspaceName = Annotated[
    str,
    typer.Option(
        "--keyspace",
        envvar=KEYSPACE_VARIABLE,
        metavar="NAME",
        callback=not_empty,
        help="The keyspace that keys are in. By default 'default'.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
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


@contextlib.contextmanager
def _identity(chosen: Mapping[str, Any]) -> Iterator[None]:
    """Set the environment variables of the identity file and the token file from the options, while
    this is open: connections look there, also those of Spark's workers, which inherit them.
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
    """Return the common options, from after the command's name or else from before it."""
    before = context.find_root().obj or {}
    return {name: given.get(name) or before.get(name) for name, _, _ in _COMMON}


def _session(chosen: dict[str, Any], *, connects: bool) -> Session:
    coordinators, keyspace = chosen["coordinators"], chosen["keyspace"]
    if connects:
        coordinators = coordinators or default_coordinators()
        keyspace = keyspace or variable(KEYSPACE_VARIABLE)
        take_local_identity(coordinators)
    return Session(
        coordinators=coordinators or "",
        timeout_ms=duration_ms(chosen["timeout"]) if chosen["timeout"] else DEFAULT_TIMEOUT_MS,
        timeout_given=bool(chosen["timeout"]),
        json=bool(chosen["json"]),
        debug=bool(chosen["debug"]),
        keyspace=keyspace or "",
    )


Body = Callable[..., Reply | int | None]
Register = Callable[[Body], Body]


def command(
    app: typer.Typer,
    name: str = "",
    *,
    examples: Sequence[str] = (),
    panel: str | None = None,
    connects: bool = True,
    keyed: bool = False,
) -> Register:
    """Return a decorator that registers ``function(session, …)`` as a command of ``app``; ``name``
    "": the function's name. The function returns a ``Reply``, or an exit code if it has printed its
    answer itself.

    Args:
        connects: True if the command takes the options for a connection to a cluster.
        keyed: True if the command takes keys, and so the option for their keyspace.
    """

    def register(function: Body) -> Body:
        text = _help_text(function)
        if examples:
            text += "\n\n\b\nExamples:\n" + "\n".join(f"  $ koinon {line}" for line in examples)
        shown = name or function.__name__.replace("_", "-")
        app.command(shown, cls=Command, help=text, rich_help_panel=panel)(
            _with_common_options(function, connects=connects, keyed=keyed)
        )
        return function

    return register


def default_command(app: typer.Typer) -> Register:
    """Return a decorator that registers the function for a group of commands without a
    subcommand.
    """

    def register(function: Body) -> Body:
        run = _with_common_options(function)
        app.callback(invoke_without_command=True, help=_help_text(function))(run)
        return function

    return register


def _help_text(function: Body) -> str:
    """Return a docstring with each paragraph on one line, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _with_common_options(
    function: Body, *, connects: bool = True, keyed: bool = False
) -> Callable[..., None]:
    """Return a wrapper of the function with the common options in the signature that Typer
    reads.
    """
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

    options = options_of(parameters)

    def run(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is not None:
            before = context.find_root().obj
            before.update({name: given[name] for name, _, _ in common if given[name]})
            return
        chosen = _chosen(context, {name: given[name] for name, _, _ in common})
        arguments = {parameter.name: given[parameter.name] for parameter in own}
        for name, group in groups.items():
            arguments[name] = group(**{f.name: arguments.pop(f.name) for f in fields(group)})

        def body() -> int:
            ended = function(_session(chosen, connects=connects), **arguments)
            if not isinstance(ended, Reply):
                return ended or DONE
            ended.write(as_json=bool(chosen["json"]))
            return ended.code

        with _identity(chosen):
            guarded(
                body,
                debug=bool(chosen["debug"]),
                as_json=bool(chosen["json"]),
                coordinators=chosen["coordinators"] or "",
                called=context.command_path,
                options=options,
            )

    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _fields_of(group: type) -> list[inspect.Parameter]:
    """Return the fields of a dataclass of options as parameters."""
    return list(inspect.signature(group, eval_str=True).parameters.values())


def guarded(
    function: Callable[[], int],
    *,
    debug: bool,
    as_json: bool,
    coordinators: str = "",
    called: str = "",
    options: Mapping[str, str] = {},
) -> NoReturn:
    """Run a command's body, and end the process with its exit code. Only an OutputError passes,
    which ``app.run`` reports.

    Args:
        coordinators: the value of --coordinators, for the advice; '': the default.
        called: the command's name, for the advice.
        options: the command's options: the flag by the parameter's name.
    """
    try:
        code = function()
    except KeyboardInterrupt:
        code = INTERRUPTED
    # Ctrl-C or Ctrl-D at a question; commands ask before they change anything
    except typer.Abort as abort:
        output.note("\nno answer: nothing was changed")
        code = USAGE if isinstance(abort.__context__, EOFError) else INTERRUPTED
    except RefusedError as refusal:
        output.problem(refusal.text)
        code = refusal.code
        if as_json:
            output.print_failure(refusal.answer)
    except printable.OutputError:
        raise
    except (KoinonError, OSError) as failure:
        error = failure
        if isinstance(failure, errors.InvalidArgumentError):
            error = as_given(failure, options)
        code = fail(error, debug=debug, coordinators=coordinators, called=called)
        if as_json:
            output.print_failure({"error": message_of(error)})
    raise typer.Exit(code)


def message_of(error: KoinonError | OSError) -> str:
    """Return the error in one line, with the file's name if it concerns a file, and with the
    request id by which servers' logs know the request.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error)
    # whose text has several lines, from the end of a log
    if not isinstance(error, LocalClusterError):
        text = printable.printable(text)
    request_id = error.request_id if isinstance(error, KoinonError) else ""
    return text if request_id in text else f"{text} [request {request_id}]"


def fail(
    error: KoinonError | OSError, *, debug: bool, coordinators: str = "", called: str = ""
) -> int:
    """Print the error and advice on standard error; return the exit code."""
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
    running = local_cluster()
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
    """Return advice for the case that no server answers; it leaves out the command that was
    called.
    """
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
            return (
                "\n  Read the key to see; a plain put or delete may be repeated where no other "
                "program writes the key."
            )
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
