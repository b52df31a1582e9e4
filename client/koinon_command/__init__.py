"""Starts the ``koinon`` command, and handles Ctrl-C while Python still imports the rest.

It is a package of its own because an import of ``koinon.cli`` runs ``koinon`` first, and an
interrupt during an import ends in a traceback, or is lost. So only ``signal`` is imported here
before the handler is set.
"""

import signal


def main() -> None:
    """Run the command line. Until it begins, Ctrl-C ends the process as it ends other programs."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:  # a process in the background ignores SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from koinon.cli import command_line

    command = command_line()
    signal.signal(signal.SIGINT, interrupted)
    command()
