"""The one console by which styled text reaches a terminal: rich's, with text escaped.

Strings are escaped before they are laid out, so that columns stay aligned, and all text once more
where it becomes segments (a ``Text`` that somebody has built by hand). What rich adds itself,
colours and movements of the cursor, passes; links to elsewhere do not: markup may be part of a
stranger's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.segment import Segment
from rich.text import Text

from koinon_proto.process import printable


class Console(rich.console.Console):
    """Writes to the stream beneath ``printable.protect_streams``."""

    def __init__(self, *, file: TextIO | None = None, stderr: bool = False, **options: Any) -> None:
        file = file or printable.stream_of(stderr=stderr)
        super().__init__(file=file, stderr=stderr, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable.printable_lines(text), **options)

    def render(
        self, renderable: Any, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        return map(_harmless, super().render(renderable, options))


def _harmless(segment: Segment) -> Segment:
    text, style, control = segment
    if control:  # rich's own: a movement of the cursor
        return segment
    if style is not None and style.link:
        style = style.update_link(None)
    return Segment(printable.printable_lines(text), style)


def replace_console() -> None:
    """Give this console to all code that imports rich's from now on, as typer does to print."""
    rich.console.Console = Console  # type: ignore[assignment,misc]
