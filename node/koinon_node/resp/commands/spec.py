"""The specification of a command and its subcommands. The module ``table`` has all commands."""

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
"""Checks a command's arguments and returns the outcome. If it raises a KoinonError, the reply is
that error in the command's format (``error_replies``).
"""
Needs = tuple[Action, ...]
_COUNT_DIGITS = 10  # of a count of keys; a command has fewer arguments


@dataclass(frozen=True, slots=True)
class Spec:
    """One command. ``arity`` counts the words including the name; negative: at least so many."""

    name: str
    arity: int
    handler: Handler
    summary: str
    method: Method  # counts and times its requests
    needs: Needs = ()
    """The actions that a user needs on each key of the command or, without keys, on some key of the
    connection's keyspace. Empty: everybody may send it, or its handler checks the caller."""
    flags: frozenset[str] = frozenset()
    keys: tuple[int, int, int] = (0, 0, 0)
    """The positions of the keys: first, last (-1: the last argument), step. First 0: no keys."""
    counts_keys: bool = False
    """The second argument is the number of keys, and they follow it."""
    is_about_all_keys: bool = False
    """The command reads or writes a whole keyspace without naming keys."""
    tips: tuple[str, ...] = ()
    """Redis's command tips: which nodes a cluster's client asks, and how it joins the replies."""

    @property
    def is_own(self) -> bool:
        """True for a command of Koinon's own clients, whose error replies carry typed errors."""
        return self.name.startswith("KOINON.")

    @property
    def fail(self) -> error_replies.Fail:
        """The function that formats an error as a reply."""
        return error_replies.own if self.is_own else error_replies.guest

    @property
    def is_about_keys(self) -> bool:
        """True if the command concerns keys of a keyspace: named ones, or all."""
        return self.names_keys or self.is_about_all_keys

    @property
    def names_keys(self) -> bool:
        """True if the command has keys among its arguments."""
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
        """Return whether the command may have so many words, including its name."""
        return arguments == self.arity if self.arity > 0 else arguments >= -self.arity


COMMANDS: dict[bytes, Spec] = {}
"""The commands by name, in capital letters; the module ``table`` fills it once."""


def find(name: bytes) -> Spec | None:
    """Return the command with this name, in letters of any case."""
    return COMMANDS.get(name) or COMMANDS.get(name.upper())


Subcommands = Mapping[bytes, tuple[int, Handler]]
"""By name, in capital letters: the number of words including the two names (negative: at least so
many), and the handler.
"""


def subcommands(table: Subcommands) -> Handler:
    """Build the handler of a command whose second word names one of these subcommands."""

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
    """Build Redis's error for a wrong number of arguments."""
    return RefusedError(f"ERR wrong number of arguments for '{command}' command")
