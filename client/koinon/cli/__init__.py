"""The ``koinon`` command. What it needs beyond the client comes with the ``[cli]`` extra."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line, or say what is missing."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"koinon: the command line needs {' and '.join(missing)}: pip install 'koinon[cli]'"
        )
    from koinon.cli.app import run

    run()
