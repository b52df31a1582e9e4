"""EVAL, EVALSHA and SCRIPT: a script runs atomically on the records of its keys."""

from __future__ import annotations

from koinon_node.core.writes.updates import Result
from koinon_node.resp import wire
from koinon_node.resp.commands.arguments import integer, keys_of_one_slot
from koinon_node.resp.commands.spec import subcommands
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Jointly, Outcome
from koinon_node.resp.scripts.compiler import STEPS_MAX
from koinon_node.resp.scripts.script_cache import NO_SCRIPT
from koinon_node.resp.scripts.script_calls import ScriptRun
from koinon_node.resp.session import Session
from koinon_proto.contract.table import MAX_ATOMIC_OPERATIONS


def eval_(session: Session, arguments: Arguments) -> Outcome:
    """Run a script over its keys."""
    return _run(session, session.service.scripts.add(arguments[1]), arguments)


def evalsha(session: Session, arguments: Arguments) -> Outcome:
    """Run a script by its SHA1."""
    return _run(session, arguments[1], arguments)


def _run(session: Session, name: bytes, arguments: Arguments) -> Outcome:
    count, rest = integer(arguments[2]), arguments[3:]
    if count > len(rest):
        raise RefusedError("ERR Number of keys can't be greater than number of args")
    if count < 0:
        raise RefusedError("ERR Number of keys can't be negative")
    if count > MAX_ATOMIC_OPERATIONS:
        raise RefusedError(f"ERR a script has {MAX_ATOMIC_OPERATIONS:,} keys at most")
    if len(rest) - count > STEPS_MAX:
        raise RefusedError(f"ERR a script has {STEPS_MAX:,} arguments at most beside its keys")
    script = session.service.scripts.find(name)
    if script is None:
        raise RefusedError(NO_SCRIPT)
    keys = keys_of_one_slot(rest[:count])
    run = ScriptRun(session, script, keys, rest[count:])
    return Jointly(keys, run, _replied) if keys else run.reply()


def _replied(result: Result) -> bytes:
    assert isinstance(result, bytes)
    return result


def _load(session: Session, arguments: Arguments) -> Outcome:
    return wire.bulk(session.service.scripts.add(arguments[2]))


def _exists(session: Session, arguments: Arguments) -> Outcome:
    found = [session.service.scripts.find(name) for name in arguments[2:]]
    return wire.array([wire.integer(script is not None) for script in found])


def _flush(session: Session, arguments: Arguments) -> Outcome:
    session.service.scripts.clear()
    return wire.OK


script = subcommands({b"LOAD": (3, _load), b"EXISTS": (-3, _exists), b"FLUSH": (-2, _flush)})
