"""The description of one command, and of its subcommands. ``table`` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from koinon_node.resp import error_replies
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action
from koinon_proto.server.requests import Method

Handler = Callable[[Session, Arguments], Outcome]
"""Checks a command's arguments; a KoinonError that it raises is the reply, in the command's
dialect (``error_replies``).
"""
Needs = tuple[Action, ...]
_COUNT_DIGITS = 10  # no command has so many arguments


@dataclass(frozen=True, slots=True)
class Spec:
    """One command. ``arity`` counts the name too; negative: at least so many words."""

    name: str
    arity: int
    handler: Handler
    summary: str
    method: Method  # counts and times its requests
    needs: Needs = ()
    """The actions that a user needs on each key of the command or, if it names none, on some key of
    the connection's keyspace. Empty: everybody may send it, or its handler checks the caller."""
    flags: frozenset[str] = frozenset()
    keys: tuple[int, int, int] = (0, 0, 0)
    """The places of the keys: first, last (-1: the last argument), step. First 0: none."""
    counts_keys: bool = False
    """The second argument is the number of keys, and they follow it."""
    is_about_all_keys: bool = False
    """The command goes through a keyspace without naming keys."""
    tips: tuple[str, ...] = ()
    """The nodes that clients of a cluster ask, and how they join the answers, in Redis's words."""

    @property
    def is_own(self) -> bool:
        """True if it is a command of Koinon's own clients, who understand whole errors."""
        return self.name.startswith("KOINON.")

    @property
    def fail(self) -> error_replies.Fail:
        """The function that makes a reply of an error."""
        return error_replies.own if self.is_own else error_replies.guest

    @property
    def is_about_keys(self) -> bool:
        """True if it is about keys of a keyspace: those that it names, or all."""
        return self.names_keys or self.is_about_all_keys

    @property
    def names_keys(self) -> bool:
        """True if there are keys among its arguments."""
        return self.counts_keys or bool(self.keys[0])

    def keys_in(self, arguments: Arguments) -> Arguments:
        """Return the keys among the arguments."""
        if self.counts_keys:
            count = arguments[2]
            number = int(count) if count.isdigit() and len(count) < _COUNT_DIGITS else 0
            return arguments[3 : 3 + number]
        first, last, step = self.keys
        return arguments[first : last + 1 or None : step] if first else []

    def takes(self, arguments: int) -> bool:
        """Return whether it may have so many arguments, its name included."""
        return arguments == self.arity if self.arity > 0 else arguments >= -self.arity


COMMANDS: dict[bytes, Spec] = {}
"""The commands by name, in capital letters; the module ``table`` fills it once."""


def find(name: bytes) -> Spec | None:
    """Return the command of this name, in letters of any case."""
    return COMMANDS.get(name) or COMMANDS.get(name.upper())


Subcommands = Mapping[bytes, tuple[int, Handler]]
"""By name, in capital letters: with how many arguments each is called, the two names included
(negative: at least so many), and its handler.
"""


def subcommands(table: Subcommands) -> Handler:
    """Return the handler of a command whose second word names one of these subcommands."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        command_name = arguments[0].decode("ascii").lower()
        arity, chosen = table.get(arguments[1].upper(), (0, None))
        name = ascii(arguments[1][:64].decode("utf-8", "replace"))
        if chosen is None:
            raise RefusedError(f"ERR unknown subcommand {name} of '{command_name}'")
        if len(arguments) != arity and not 0 < -arity <= len(arguments):
            raise wrong_number(f"{command_name}|{name.strip(chr(39)).lower()}")
        return chosen(session, arguments)

    return handler


def wrong_number(command: str) -> RefusedError:
    """Build Redis's error for a command with another number of arguments."""
    return RefusedError(f"ERR wrong number of arguments for '{command}' command")
