"""Commands by which a Koinon process starts another Python process."""

from __future__ import annotations

import sys

SAFE_PATH = "PYTHONSAFEPATH"
"""Set to anything, it does as ``-P`` does for each Python that is started with it."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module (``python -m``) by this Python.

    ``-P`` keeps the working directory out of the module search path: a ``random.py`` that lies in
    the folder from which a user calls us would else run in place of the standard library's.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
