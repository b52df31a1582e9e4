"""KOINON.PASSED: executes a command that another node forwards for a client (``resp/passing``).

    KOINON.PASSED user command [argument …]
    KOINON.PASSED user EXEC {count word …} …
        -> the reply, as a bulk string

The command runs with that user's rights, and this node never forwards it again. Where callers must
authenticate, only nodes may send KOINON.PASSED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from koinon_node.resp import error_replies, wire
from koinon_node.resp.commands import rules, transactions
from koinon_node.resp.commands.spec import find
from koinon_node.resp.error_replies import ChangingHandsError, RefusedError
from koinon_node.resp.outcomes import Arguments, Jointly, Outcome, Read, Write
from koinon_node.resp.session import Session
from koinon_node.resp.transaction_queue import Transaction
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError

F = TypeVar("F")


def passed(session: Session, arguments: Arguments) -> Outcome:
    """Execute a forwarded command with the rights of the client's user."""
    user, words = arguments[1].decode("utf-8", "replace"), arguments[2:]
    if session.service.passing is None:
        raise InvalidArgumentError(field="command", reason="this node has no --resp-proxy")
    acting = session.acting_for(user)
    try:
        outcome = _outcome(acting, words)
    except RefusedError as refused:
        return _error_reply(refused)
    if isinstance(outcome, Read):
        return replace(outcome, reply=_wrapped(outcome.reply), fails_at_once=True)
    if isinstance(outcome, Write):
        return replace(outcome, reply=_wrapped(outcome.reply), fails_at_once=True)
    if isinstance(outcome, Jointly):
        return _awaited(transactions.carried_out(acting, outcome))
    if isinstance(outcome, bytes):
        return wire.bulk(outcome)
    assert asyncio.iscoroutine(outcome), "no command with such an outcome is passed on"
    return _awaited(outcome)


def _outcome(acting: Session, words: Sequence[bytes]) -> Outcome:
    """Check the user's rights to the command; return the command's outcome."""
    if words[0] == b"EXEC":
        return transactions.carried_out_for(acting, _transaction(words[1:]))
    spec = find(words[0])
    if spec is None or spec.is_own or spec.name == "WATCH" or not spec.names_keys:
        raise InvalidArgumentError(field="command", reason="this command is not passed on")
    if not spec.takes(len(words)):
        raise InvalidArgumentError(field="command", reason="wrong number of arguments")
    rules.check(spec, [*words], acting)
    return spec.handler(acting, [*words])


def _transaction(words: Sequence[bytes]) -> Transaction:
    """Parse the commands of a transaction, each preceded by the number of its words.

    Raises:
        InvalidArgumentError: a count is wrong, or a command may not be part of a transaction.
    """
    transaction, left = Transaction(), iter(words)
    for count in left:
        command = _take_words(left, int(count) if count.isdigit() and len(count) < 10 else 0)
        spec = find(command[0]) if command else None
        if spec is None or not transactions.may_be_queued(spec) or not spec.takes(len(command)):
            raise InvalidArgumentError(field="command", reason="it may not be in a transaction")
        transaction.add(command, spec.keys_in(command))
    return transaction


def _take_words(words: Iterator[bytes], count: int) -> list[bytes]:
    return [word for _, word in zip(range(count), words, strict=False)]


def _wrapped(reply: Callable[[F], bytes]) -> Callable[[F], bytes]:
    return lambda found: wire.bulk(reply(found))


async def _awaited(work: Coroutine[Any, Any, bytes]) -> bytes:
    """Await the command's reply; return it as a bulk string.

    Raises:
        KoinonError: a typed error; the forwarding node makes Redis's error line of it.
    """
    try:
        return wire.bulk(await work)
    except (RefusedError, ChangingHandsError) as refused:
        if isinstance(refused.__cause__, KoinonError):
            raise refused.__cause__ from None
        return _error_reply(refused)


def _error_reply(error: KoinonError) -> bytes:
    return wire.bulk(error_replies.guest(error, "", ""))
