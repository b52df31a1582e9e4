"""MULTI, EXEC, DISCARD, WATCH, UNWATCH: a transaction of Redis is an atomic batch.

What comes after MULTI is checked as far as it can be (name, number of arguments, leave, whether
this node serves the keys) and queued. EXEC makes one batch of all of it (core/atomic_batch.py):
checks of the versions that WATCH has found, then reads and writes in their order, each over what
those before it have left. As in Redis a command that is refused when it is queued spoils the
transaction; one that fails when it is carried out has its error in its place, and the others take
place. No client sees a part of it, whatever crashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from koinon_node.core import records
from koinon_node.core.atomic_batch import Check, Step
from koinon_node.core.updates import Look, Put, Remove, Result
from koinon_node.resp import errors, wire
from koinon_node.resp.commands import rules
from koinon_node.resp.commands.arguments import keys_of_one_slot
from koinon_node.resp.commands.table import (
    Arguments,
    Encoded,
    Outcome,
    Read,
    Row,
    Spec,
    Write,
    Written,
    command,
)
from koinon_node.resp.errors import RefusedError
from koinon_node.resp.session import Session
from koinon_node.resp.transaction_queue import WATCHED_MAX, Transaction
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import CheckFailedError, KoinonError

AT_ONCE: Final = frozenset(("MULTI", "EXEC", "DISCARD", "WATCH", "QUIT", "RESET"))
"""Carried out also after MULTI, never queued."""
_A_BATCH: Final = "MSETNX"
"""The command with keys that cannot be a part of a batch: it is one itself."""
_WITHOUT_KEYS: Final = frozenset(("ECHO", "PING", "SELECT", "UNWATCH"))
"""The commands that may be queued beside those that have keys."""
_QUEUED: Final = wire.simple("QUEUED")
_LOOK: Final = Look()
_FLAGS: Final = ("fast", "noscript")


@command("MULTI", 1, errors.guest, flags=_FLAGS)
def multi(session: Session, arguments: Arguments) -> Outcome:
    """Queue what follows, until EXEC."""
    if session.transaction is not None:
        return wire.error("ERR MULTI calls can not be nested")
    session.transaction = Transaction()
    return wire.OK


@command("DISCARD", 1, errors.guest, flags=_FLAGS)
def discard(session: Session, arguments: Arguments) -> Outcome:
    """Forget what is queued, and watched."""
    if session.transaction is None:
        return wire.error("ERR DISCARD without MULTI")
    session.forget_transaction()
    return wire.OK


@command("UNWATCH", 1, errors.guest, flags=_FLAGS)
def unwatch(session: Session, arguments: Arguments) -> Outcome:
    """Forget what is watched."""
    session.watched = {}
    return wire.OK


@command("WATCH", -2, errors.guest, flags=_FLAGS, keys=(1, -1, 1))
def watch(session: Session, arguments: Arguments) -> Outcome:
    """Have EXEC carry out nothing if one of these keys has been written to."""
    if session.transaction is not None:
        return wire.error("ERR WATCH inside MULTI is not allowed")
    keys = keys_of_one_slot(arguments[1:])
    if len(session.watched.keys() | set(keys)) > WATCHED_MAX:
        raise RefusedError(f"ERR a connection watches {WATCHED_MAX:,} keys at most")
    return _watch(session, keys)


async def _watch(session: Session, keys: Sequence[bytes]) -> bytes:
    """No ``Read``, which others join: what comes after WATCH must be read after it."""
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
        KoinonError: it cannot be part of a transaction, or not here.
    """
    is_own = spec.fail is errors.own
    may_be = spec.name in _WITHOUT_KEYS or (spec.keys[0] and spec.name != _A_BATCH)
    if is_own or not may_be:
        raise RefusedError(f"ERR {spec.name} is not allowed inside a transaction")
    keys = keys_of_one_slot(spec.keys_in(arguments))
    if keys:
        session.served.check_served(keys[0])
    transaction.add(spec, arguments, keys)
    return _QUEUED


# --- carrying out ------------------------------------------------------------------------------


@command("EXEC", 1, errors.guest, flags=("noscript",))
def exec_(session: Session, arguments: Arguments) -> Outcome:
    """Carry out what is queued, in one step."""
    transaction, watched = session.transaction, session.watched
    if transaction is None:
        return wire.error("ERR EXEC without MULTI")
    session.forget_transaction()
    if transaction.is_spoilt:
        return wire.error("EXECABORT Transaction discarded because of previous errors.")
    return _carry_out(session, transaction, watched)


async def _carry_out(
    session: Session, transaction: Transaction, watched: dict[bytes, int]
) -> bytes:
    outcomes = [_outcome(session, spec, arguments) for spec, arguments in transaction.queued]
    keys = list(watched)
    steps: list[Step] = [Check(version) for version in watched.values()]
    for outcome in outcomes:
        if isinstance(outcome, Read):
            keys += outcome.keys
            steps += [_LOOK] * len(outcome.keys)
        elif isinstance(outcome, Write):
            keys += [row.key for row in outcome.rows]
            steps += map(_step_of, outcome.rows)
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
    specs = (spec for spec, _ in transaction.queued)
    return wire.array([_reply(s, o, left) for s, o in zip(specs, outcomes, strict=True)])


def _outcome(session: Session, spec: Spec, arguments: Arguments) -> bytes | Read | Write:
    """Return what a queued command comes to, looked at now; its reply, if it is refused."""
    try:
        if session.gate is not None:  # leave may have been taken since
            session.check_known()
            rules.check(spec, arguments, session)
        outcome = spec.handler(session, arguments)
    except KoinonError as error:
        request_id = request_ids.fresh()
        session.note(spec, errors.outcome_of(error), request_id, error=error)
        return spec.fail(error, request_id, "")
    assert isinstance(outcome, bytes | Read | Write), "no other command is queued"
    return outcome


def _step_of(row: Row) -> Step:
    if row.update is not None:
        return row.update
    return Remove() if row.is_delete else Put(row.value, row.ttl_ms)


def _reply(spec: Spec, outcome: bytes | Read | Write, left: Iterator[Result]) -> bytes:
    """Return the reply of a command; take the results of its steps."""
    if isinstance(outcome, bytes):
        return outcome
    if isinstance(outcome, Read):
        found = [next(left) for _ in outcome.keys]
        return outcome.reply([r if isinstance(r, bytes) else None for r in found])
    results = [next(left) for _ in outcome.rows]
    for result in results:
        if isinstance(result, KoinonError):
            return spec.fail(result, request_ids.fresh(), "")
    rows = zip(outcome.rows, results, strict=True)
    return outcome.reply([_written(row, result) for row, result in rows])


def _written(row: Row, result: Result) -> Written:
    """A row's version is only looked at as to whether something was written."""
    return Written(int(result is not False) if row.is_delete else 1, result)
