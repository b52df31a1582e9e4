"""Tests of the escaping of text, which nothing that a process writes goes round."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_proto.process.printable import (
    PrintableStream,
    printable,
    printable_bytes,
    printable_lines,
)

ESCAPES = {
    "\x1b]52;c;ZXZpbA==\x07": "\\x1b]52;c;ZXZpbA==\\x07",  # sets the clipboard
    "\x9b2J": "\\x9b2J",  # clears the screen, by C1
    "a\rb\x7f": "a\\rb\\x7f",
    "user\u202egnp.exe": "user\\u202egnp.exe",  # turns the direction of writing
    "one\u2028two\u2029": "one\\u2028two\\u2029",
    "\udc80\ud800": "\\x80\\ud800",  # a byte that was not UTF-8; half a character
    "\U000e0001": "\\U000e0001",
}
AS_IT_IS = ("", "hello", "Ada 42 [red]", "žluťoučký kůň", "日本語", "⚡ ✘ ━", "back\\slash")


@pytest.mark.parametrize(("text", "shown"), ESCAPES.items())
def test_text_that_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == printable_lines(text) == shown


@pytest.mark.parametrize("text", AS_IT_IS)
def test_printable_text_is_shown_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == printable_bytes(text.encode()) == text


def test_line_ends_are_kept_where_text_may_have_lines_only() -> None:
    assert printable("a\n\tb") == "a\\n\\tb"
    assert printable_lines("a\n\tb\x1b") == "a\n\tb\\x1b"


@given(st.text(st.characters(codec=None)))
def test_no_text_leaves_anything_unprintable(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in printable_lines(text).replace("\t", "").split("\n"))
    printable(text).encode()  # no lone surrogate is left


@given(st.binary())
def test_no_bytes_leave_anything_unprintable(data: bytes) -> None:
    assert printable_bytes(data).isprintable()


def test_stream_escapes_what_is_written_and_is_no_terminal() -> None:
    beneath = io.StringIO()
    stream = PrintableStream(beneath)
    print("\x1b[2J", file=stream)
    stream.writelines(["a\x07", "b\n"])
    assert beneath.getvalue() == "\\x1b[2J\na\\x07b\n"
    assert not stream.isatty()


WAYS_OUT = {
    "print": "print(hostile)",
    "error": "print(hostile, file=sys.stderr)",
    "traceback": "raise ValueError(hostile)",
    "exit": "sys.exit(hostile)",
    "warning": "import warnings; warnings.warn(hostile)",
    "thread": "import threading; threading.Thread(target=int, args=(hostile,)).start()",
    "log without a handler": "import logging; logging.getLogger('x').warning(hostile)",
    "log": "import logging; logging.getLogger('x').warning('a b=%s', hostile)",
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_way_out_of_a_server_is_left_unescaped(way: str) -> None:
    program = (
        "import sys; from koinon_proto.process import logs, printable; printable.protect_streams();"
        f"{'logs.configure_logging();' if way == 'log' else ''}"
        "hostile = 'x\\x1b]52;c;ZXZpbA==\\x07\\x9b2J\\u202e'; " + WAYS_OUT[way]
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    shown = (ended.stdout + ended.stderr).decode()
    assert "]52;c;" in shown
    assert all(line.isprintable() for line in shown.split("\n")), shown


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_descriptor_of_a_closed_stream_goes_to_no_other_file(closed: str) -> None:
    program = (
        "import os, sys; from koinon_proto.process import printable; printable.protect_streams();"
        "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    )
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program], check=False
    )
    assert ended.returncode == 0


@pytest.mark.parametrize("fault", ["2>/dev/full", "2>&-"])
def test_server_goes_on_where_its_log_cannot_be_written(fault: str) -> None:
    program = (
        "import logging; from koinon_proto.process import logs, printable;"
        "printable.protect_streams(); logs.configure_logging();"
        "logging.getLogger('x').warning('lost'); print('goes on')"
    )
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {fault}', "sh", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        check=False,
    )
    assert ended.stdout == b"goes on\n"
