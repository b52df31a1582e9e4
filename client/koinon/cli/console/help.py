"""Prints typer's help and usage errors on our console. rich takes as long to import as everything
else that a single ``get`` needs, so it is imported only when typer is about to print.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

_USAGE_ERROR: Any = typer.BadParameter.__base__  # typer depends on click, or contains it


def _give_console() -> None:
    from koinon.cli.console.terminal import replace_console

    replace_console()


@contextmanager
def _printing_errors() -> Iterator[None]:
    """Put our console in place when an error is raised here, before typer prints it. typer.Exit
    passes.
    """
    try:
        yield
    except typer.Exit:
        raise
    except BaseException:
        _give_console()
        raise


class Command(TyperCommand):
    """A command whose help our console prints. Its errors suggest ``--`` where an argument that
    begins with a dash was taken for an option.
    """

    def parse_args(self, context: Any, given: list[str]) -> list[str]:
        words = list(given)
        try:
            return super().parse_args(context, given)
        except _USAGE_ERROR as error:
            taken = getattr(error, "option_name", None)  # for an option
            if taken and getattr(error, "possibilities", ()) in ([], None) and self._takes_text:
                word = next((word for word in words if word.startswith(taken)), taken)
                error.message += (
                    ". An argument that begins with a dash goes behind '--', and options go before "
                    f"that: {context.command_path} … -- {word}"
                )
            raise

    @property
    def _takes_text(self) -> bool:
        return any(isinstance(parameter, TyperArgument) for parameter in self.params)

    def format_help(self, *given: Any) -> None:
        _give_console()
        super().format_help(*given)


class Group(TyperGroup):
    """A group of commands that prints its help, and its commands' errors, on our console."""

    def format_help(self, *given: Any) -> None:
        _give_console()
        super().format_help(*given)

    def make_context(self, *given: Any, **more: Any) -> Any:
        with _printing_errors():
            return super().make_context(*given, **more)

    def invoke(self, *given: Any) -> Any:
        with _printing_errors():
            return super().invoke(*given)
