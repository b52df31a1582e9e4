"""MULTI, EXEC, DISCARD, WATCH, UNWATCH: a transaction of Redis is an atomic batch.

Commands after MULTI are checked as far as possible (name, number of arguments, rights, whether this
node serves the keys) and queued. EXEC builds one batch of all of them
(core/writes/atomic_batch.py): checks of the versions that WATCH read, then the reads and writes in
their order, each on the result of the ones before. As in Redis a command that is refused when it is
queued makes EXEC fail; a command that fails during EXEC replies with its error, and the others take
effect. No client sees a part of a transaction, whichever process crashes.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, cast

from koinon_node.core.formats import records
from koinon_node.core.writes.atomic_batch import Check, Step
from koinon_node.core.writes.updates import Look, Result
from koinon_node.resp import error_replies, wire
from koinon_node.resp.commands import accounting, rules
from koinon_node.resp.commands.arguments import keys_of_one_slot
from koinon_node.resp.commands.spec import Spec, find
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import (
    Arguments,
    Call,
    Encoded,
    Jointly,
    Outcome,
    Read,
    Switch,
    Write,
)
from koinon_node.resp.session import Session
from koinon_node.resp.transaction_queue import WATCHED_MAX, Transaction
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import CheckFailedError, KoinonError, NotPrimaryError

AT_ONCE: Final = frozenset(("MULTI", "EXEC", "DISCARD", "WATCH", "QUIT", "RESET"))
"""Commands that are executed at once even after MULTI."""
_WITHOUT_KEYS: Final = frozenset(
    ("DBSIZE", "ECHO", "KEYS", "PING", "SCAN", "SELECT", "TIME", "UNWATCH")
)
"""The commands without keys that may be queued."""
Queued = bytes | Read | Write | Jointly
Scan = Coroutine[Any, Any, bytes]
_QUEUED: Final = wire.simple("QUEUED")
_LOOK: Final = Look()


def multi(session: Session, arguments: Arguments) -> Outcome:
    """Queue the following commands until EXEC."""
    if session.transaction is not None:
        raise RefusedError("ERR MULTI calls can not be nested")
    session.transaction = Transaction()
    return wire.OK


def discard(session: Session, arguments: Arguments) -> Outcome:
    """Drop the queued commands and the watched keys."""
    if session.transaction is None:
        return wire.error("ERR DISCARD without MULTI")
    session.forget_transaction()
    return wire.OK


def unwatch(session: Session, arguments: Arguments) -> Outcome:
    """Forget the watched keys."""
    session.watched = {}
    return wire.OK


def watch(session: Session, arguments: Arguments) -> Outcome:
    """Have EXEC execute nothing if one of these keys was written in between."""
    if session.transaction is not None:
        raise RefusedError("ERR WATCH inside MULTI is not allowed")
    keys = keys_of_one_slot(arguments[1:])
    if len(session.watched.keys() | set(keys)) > WATCHED_MAX:
        raise RefusedError(f"ERR a connection watches {WATCHED_MAX:,} keys at most")
    return _watch(session, keys)


async def _watch(session: Session, keys: Sequence[bytes]) -> bytes:
    """Read the versions of the keys. This is no ``Read``, which the connection may join with
    others: commands after WATCH must read after it.
    """
    watched = session.watched

    def note(found: Sequence[Encoded]) -> bytes:
        for key, record in zip(keys, found, strict=True):
            watched.setdefault(key, _version_of(record))
        return wire.OK

    (answer,) = await session.service.read(session.served, [Read(keys, note)])
    if isinstance(answer, KoinonError):
        raise session.served.redirected(answer, keys[0])
    return answer


def _version_of(record: Encoded) -> int:
    return records.decode_record(record).sequence if record is not None else 0


# --- queueing ----------------------------------------------------------------------------------


def queue(session: Session, transaction: Transaction, spec: Spec, arguments: Arguments) -> Outcome:
    """Queue a command.

    Raises:
        KoinonError: the command cannot be part of a transaction, or its keys are not served here.
    """
    if not may_be_queued(spec):
        raise RefusedError(f"ERR {spec.name} is not allowed inside a transaction")
    keys = keys_of_one_slot(spec.keys_in(arguments))
    if keys and session.service.passing is None:
        session.served.check_served(keys[0])
    transaction.add(arguments, keys)
    return _QUEUED


def may_be_queued(spec: Spec) -> bool:
    """Return whether the command may be part of a transaction."""
    return (
        spec.name not in AT_ONCE
        and not spec.is_own
        and (spec.names_keys or spec.name in _WITHOUT_KEYS)
    )


# --- execution ---------------------------------------------------------------------------------


def exec_(session: Session, arguments: Arguments) -> Outcome:
    """Execute the queued commands atomically."""
    transaction, watched = session.transaction, session.watched
    if transaction is None:
        return wire.error("ERR EXEC without MULTI")
    session.forget_transaction()
    if transaction.is_spoilt:
        return wire.error("EXECABORT Transaction discarded because of previous errors.")
    return _carry_out(session, transaction, watched)


def carried_out_for(acting: Session, transaction: Transaction) -> Scan:
    """Return the execution, as a coroutine, of a transaction that another node has passed on."""
    return _carry_out(acting, transaction, {})


async def _carry_out(
    session: Session, transaction: Transaction, watched: dict[bytes, int]
) -> bytes:
    looked_up = [(cast(Spec, find(words[0])), words) for words in transaction.queued]
    queued = [(spec, _outcome(session, spec, words)) for spec, words in looked_up]
    try:
        return await _replies(session, watched, queued)
    except KoinonError as error:
        passing = session.service.passing
        is_elsewhere = NotPrimaryError in (type(error), type(error.__cause__))
        if passing is None or watched or not is_elsewhere or session.is_acting:
            raise
        key = next(key for spec, words in looked_up for key in spec.keys_in(words))
        return await passing.transaction(session, key, transaction.queued)
    finally:
        for _, outcome in queued:
            if isinstance(outcome, Coroutine):
                outcome.close()


async def _replies(
    session: Session, watched: dict[bytes, int], queued: Sequence[tuple[Spec, Queued | Scan]]
) -> bytes:
    keys = list(watched)
    steps: list[Step] = [Check(version) for version in watched.values()]
    for _, outcome in queued:
        if isinstance(outcome, Read):
            keys += outcome.keys
            steps += [_LOOK] * len(outcome.keys)
        elif isinstance(outcome, Jointly):
            keys += outcome.keys
            steps += outcome.steps
        elif isinstance(outcome, Write):
            keys += [row.key for row in outcome.rows]
            steps += [row.step for row in outcome.rows]
    results: Sequence[Result] = ()
    if steps:
        session.served.check_one_slot(keys)
        try:
            results = await session.service.commit(session.served, keys, steps)
        except CheckFailedError:
            return wire.NULL if session.resp3 else wire.NIL_ARRAY
        except KoinonError as error:
            raise session.served.redirected(error, keys[0]) from error
    left = iter(results[len(watched) :])
    replies: list[bytes] = []
    for spec, outcome in queued:
        if isinstance(outcome, Coroutine):
            replies.append(await _scanned(spec, outcome))
        else:
            replies.append(_reply(spec, outcome, left))
    return wire.array(replies)


def _outcome(session: Session, spec: Spec, arguments: Arguments) -> Queued | Scan:
    """Return the outcome of a queued command, checked again now; the error reply if it is
    refused.
    """
    try:
        if session.gate is not None:  # rights may have been taken away since it was queued
            session.check_known()
            rules.check(spec, arguments, session)
        outcome = spec.handler(session, arguments)
    except KoinonError as error:
        request_id, outcome_name = request_ids.fresh(), error_replies.outcome_of(error)
        accounting.audit(session, spec, outcome=outcome_name, request_id=request_id, error=error)
        return spec.fail(error, request_id, "")
    assert not isinstance(outcome, Call | Switch), "no command with such an outcome is queued"
    return outcome


def _reply(spec: Spec, outcome: Queued, left: Iterator[Result]) -> bytes:
    """Build the reply of a command from the results of its steps, which it takes from ``left``."""
    if isinstance(outcome, bytes):
        return outcome
    if isinstance(outcome, Read):
        found = [next(left) for _ in outcome.keys]
        return outcome.reply([r if isinstance(r, bytes) else None for r in found])
    if isinstance(outcome, Jointly):
        result, *_ = [next(left) for _ in outcome.keys]
        results = [result]
    else:
        results = [next(left) for _ in outcome.rows]
    for result in results:
        if isinstance(result, KoinonError):
            return spec.fail(result, request_ids.fresh(), "")
    if isinstance(outcome, Jointly):
        return outcome.reply(results[0])
    rows = zip(outcome.rows, results, strict=True)
    return outcome.reply([row.written(result) for row, result in rows])


async def _scanned(spec: Spec, scan: Scan) -> bytes:
    """Return the reply of a command on many keys, which runs right after the batch and not
    atomically with it.
    """
    try:
        return await scan
    except KoinonError as error:
        return spec.fail(error, request_ids.fresh(), "")


async def carried_out(session: Session, jointly: Jointly) -> bytes:
    """Execute a single operation on several keys atomically; return its reply.

    Raises:
        UnknownFateError: the operation may have been executed.
        KoinonError: the operation had no effect.
    """
    session.served.check_one_slot(jointly.keys)
    result, *_ = await session.service.commit(session.served, jointly.keys, jointly.steps)
    if isinstance(result, KoinonError):
        raise result
    return jointly.reply(result)
