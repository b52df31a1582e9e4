"""The command line of ``koinon``, for tests that run commands in their own process: it is made once
for all of them, since that takes 40 ms of CPU.
"""

from __future__ import annotations

import functools

import typer
from typer import testing

from koinon.cli.app import make_app

# CliRunner builds this click command from the typer app at each call; here it is built once.
testing._get_command = functools.cache(testing._get_command)  # type: ignore[attr-defined]


@functools.cache
def koinon_app() -> typer.Typer:
    """Return the app with all commands."""
    return make_app()
