"""The console through which all styled text reaches a terminal: rich's, with text escaped.

Strings are escaped before rich lays them out, so that columns stay aligned, and again when they
become segments (for a ``Text`` built by hand). The codes that rich adds itself, colours and cursor
movements, pass. Hyperlinks do not pass, since markup may be part of untrusted text.
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
    if control:  # cursor movements that rich adds itself
        return segment
    if style is not None and style.link:
        style = style.update_link(None)
    return Segment(printable.printable_lines(text), style)


def replace_console() -> None:
    """Make this console rich's own, for all code that imports rich from now on; typer prints
    on it.
    """
    rich.console.Console = Console  # type: ignore[assignment,misc]
