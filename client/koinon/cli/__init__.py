"""The ``koinon`` command, which ``koinon_command`` starts. Its dependencies beyond the client's
come with the ``[cli]`` extra.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable


def command_line() -> Callable[[], None]:
    """Import the command named in ``sys.argv``; return a function that runs it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"koinon: the command line needs {' and '.join(missing)}: pip install 'koinon[cli]'"
        )
    from koinon.cli import app

    return app.command_line()
