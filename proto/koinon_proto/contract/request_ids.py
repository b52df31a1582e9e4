"""Ids of requests: a client makes them and sends one along with every call, servers log them.

The wire has one metadata entry, ``koinon-request-id``: the id, a slash, and the number of the call
among those made under the id (``5f0c9a1e-2b/1``). A second entry for the number would cost about
as much again as the first: some 2 % of an empty call.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

KEY = "koinon-request-id"
CHARS_MAX = 64
_CALL_DIGITS_MAX = 9

Metadata = tuple[tuple[str, str], ...]

_prefix = ""
_numbers = itertools.count(1)


def _begin_anew() -> None:
    global _prefix
    _prefix = secrets.token_hex(4)


_begin_anew()
os.register_at_fork(after_in_child=_begin_anew)


def fresh() -> str:
    """Return a new id for a call: eight random digits of this process, and a counter."""
    return f"{_prefix}-{next(_numbers):x}"


def cleaned(text: str) -> str:
    """Return ``text`` as an id: its first 64 characters, with a question mark for each that is not
    printable ASCII or is a blank, so that it can neither end a line of a log nor hide in it.
    """
    text = text[:CHARS_MAX]
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(c if "!" <= c <= "~" else "?" for c in text)


class Handling:
    """The request that a server's task works on. Tasks and callbacks that begin meanwhile inherit
    it, and may outlive it: ``sent`` is '' from its end on.
    """

    __slots__ = ("sent",)

    def __init__(self, sent: str) -> None:
        self.sent = sent
        """The value of ``koinon-request-id``, as it came."""


handling: ContextVar[Handling | None] = ContextVar("koinon_handling", default=None)


@contextmanager
def handled(request_id: str) -> Iterator[None]:
    """Let every line that is logged inside have this request id."""
    before = handling.set(Handling(request_id))
    try:
        yield
    finally:
        handling.reset(before)


def _split(sent: str) -> tuple[str, int]:
    """Return the id and the call's number; 0 if the number is missing."""
    text, slash, number = sent.rpartition("/")
    if slash and number.isascii() and number.isdigit() and len(number) <= _CALL_DIGITS_MAX:
        return cleaned(text), int(number)
    return cleaned(sent), 0


def log_fields() -> dict[str, str | int]:
    """Return the log fields of the request that is being handled here; empty if there is none."""
    handled = handling.get()
    if handled is None or not handled.sent:
        return {}
    request_id, call = _split(handled.sent)
    return {"request_id": request_id, "call": call} if call else {"request_id": request_id}


def onward() -> Metadata:
    """Return the metadata for a call to another server: the id of the request that is being handled
    here, or a new id outside of requests.
    """
    handled = handling.get()
    if handled is None or not handled.sent:
        return ((KEY, fresh()),)
    request_id, call = _split(handled.sent)
    return ((KEY, f"{request_id}/{call}" if call else request_id),)
