"""The table of Redis commands, and the outcomes that a handler may return.

A handler checks the arguments of a command and returns what is to be done:

=========  =========================================================================================
``bytes``  the reply: nothing has to be looked at
``Read``   keys to read, and how the reply is made of what is found
``Write``  rows to write, and how the reply is made of what came of them
``Call``   what a method of gRPC does; its reply is the method's
``Switch`` another protocol takes the connection over, after the reply +OK
coroutine  anything else; it returns the reply
=========  =========================================================================================

A KoinonError that a handler raises is answered in the command's dialect (``errors``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from koinon_node.core.updates import Result, Update
from koinon_node.resp.errors import RefusedError
from koinon_node.serving.batches import Durability
from koinon_proto.contract.errors import KoinonError
from koinon_proto.server.requests import Method

if TYPE_CHECKING:
    from koinon_node.resp.session import Session

Arguments = list[bytes]
"""The command's name is the first."""
Encoded = bytes | None
"""A stored record, as core/records.py encodes it; None: there is none."""


@dataclass(slots=True)
class Read:
    """``reply`` is made of the records of ``keys``, one for each."""

    keys: Sequence[bytes]
    reply: Callable[[Sequence[Encoded]], bytes]
    table_version: int = 0  # the sender's; 0: not known
    request_id: str = ""


@dataclass(slots=True)
class Row:
    """A row to write. ``ttl_ms`` 0: it never expires; ``if_version`` None: unconditional. Where
    there is an ``update``, it alone says what is written.
    """

    key: bytes
    value: bytes = b""
    is_delete: bool = False
    ttl_ms: int = 0
    if_version: int | None = None
    update: Update | None = None

    @property
    def is_put(self) -> bool:
        """True if it is a put that needs no look at what is there."""
        return not self.is_delete and self.if_version is None and self.update is None

    @property
    def size(self) -> int:
        """The bytes that it brings."""
        return len(self.value) + (self.update.size if self.update is not None else 0)


@dataclass(slots=True)
class Written:
    """The outcome of a row: its version, 0 if nothing was written; what an update answers."""

    version: int
    result: Result = None


@dataclass(slots=True)
class Write:
    """``reply`` is made of what came of each row. If any row failed, its error is the reply."""

    rows: Sequence[Row]
    reply: Callable[[Sequence[Written]], bytes]
    durability: Durability = Durability.ALL_IN_SYNC
    table_version: int = 0
    request_id: str = ""
    weight: int = 0  # see RedisService.weigh


@dataclass(slots=True)
class Call:
    """``begin`` does what a method of gRPC does, and returns its reply."""

    begin: Callable[[], Coroutine[Any, Any, bytes]]
    request_id: str = ""


@dataclass(slots=True)
class Switch:
    """The connection is that protocol's which ``begin`` returns, once +OK has been written. A
    connection may be lost before that, and then nothing has begun.
    """

    begin: Callable[[], asyncio.Protocol]


def first_key(outcome: Outcome) -> bytes | None:
    """Return the key that decides where the command belongs."""
    if isinstance(outcome, Read):
        return outcome.keys[0]
    return outcome.rows[0].key if isinstance(outcome, Write) else None


Outcome = bytes | Read | Write | Call | Switch | Coroutine[Any, Any, bytes]
Handler = Callable[["Session", Arguments], Outcome]
Fail = Callable[[KoinonError, str, str], bytes]
"""Makes the reply of an error, of the id of the request that ended with it, and of where the key is
served, as a redirection names it: ``slot host:port``; '' if that is not known, or not asked for.
"""


_ABOUT_ALL_KEYS = ("DBSIZE", "KOINON.GETMANY", "KOINON.SCAN", "SCAN")


@dataclass(frozen=True, slots=True)
class Spec:
    """One command. ``arity`` counts the name too; negative: at least so many. ``keys`` are (first,
    last, step), as COMMAND tells them; last -1: the last argument.
    """

    name: str
    arity: int
    handler: Handler
    fail: Fail
    method: Method  # counts and times its requests
    flags: frozenset[str] = frozenset()
    keys: tuple[int, int, int] = (0, 0, 0)

    @property
    def is_about_keys(self) -> bool:
        """True if it is about keys of a keyspace: those that it names, or all."""
        return bool(self.keys[0]) or self.name in _ABOUT_ALL_KEYS

    def keys_in(self, arguments: Arguments) -> Arguments:
        """Return the keys among the arguments."""
        first, last, step = self.keys
        return arguments[first : last + 1 or None : step] if first else []

    def takes(self, arguments: int) -> bool:
        """Return whether it may have so many arguments, its name included."""
        return arguments == self.arity if self.arity > 0 else arguments >= -self.arity


Subcommands = Mapping[bytes, tuple[int, Handler]]
"""By name, in capital letters: with how many arguments each is called, the two names included
(negative: at least so many), and its handler.
"""


def subcommand(table: Subcommands, session: Session, arguments: Arguments) -> Outcome:
    """Return the outcome of the subcommand that the arguments name.

    Raises:
        RefusedError: there is none, or it takes another number of arguments.
    """
    command_name = arguments[0].decode("ascii").lower()
    arity, handler = table.get(arguments[1].upper(), (0, None))
    name = ascii(arguments[1][:64].decode("utf-8", "replace"))
    if handler is None:
        raise RefusedError(f"ERR unknown subcommand {name} of '{command_name}'")
    if len(arguments) != arity and not 0 < -arity <= len(arguments):
        raise RefusedError(
            f"ERR wrong number of arguments for '{command_name}|{name.strip(chr(39)).lower()}' "
            "command"
        )
    return handler(session, arguments)


COMMANDS: dict[bytes, Spec] = {}
"""By name, in capital letters."""


def command(
    name: str,
    arity: int,
    fail: Fail,
    *,
    flags: Sequence[str] = (),
    keys: tuple[int, int, int] = (0, 0, 0),
) -> Callable[[Handler], Handler]:
    """Add the handler to the table of commands."""

    def add(handler: Handler) -> Handler:
        method = Method("Redis", name, stream=False)
        spec = Spec(name, arity, handler, fail, method, frozenset(flags), keys)
        COMMANDS[name.encode()] = spec
        return handler

    return add


def find(name: bytes) -> Spec | None:
    """Return the command of this name, in letters of any case."""
    return COMMANDS.get(name) or COMMANDS.get(name.upper())
