"""The ``koinon`` command. What it needs beyond the client comes with the ``[cli]`` extra."""

from __future__ import annotations

import importlib.util
import signal
import sys


def main() -> None:
    """Run the command line, or say what is missing."""
    # Until the command begins, Ctrl-C ends the process as it would another program: an interrupt
    # in the middle of an import ends in a traceback, if it is not lost.
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"koinon: the command line needs {' and '.join(missing)}: pip install 'koinon[cli]'"
        )
    from koinon.cli.app import command_line

    app = command_line()
    signal.signal(signal.SIGINT, interrupted)
    app(prog_name="koinon")
