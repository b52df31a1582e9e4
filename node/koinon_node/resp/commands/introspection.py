"""COMMAND and CONFIG: describe this server to clients that ask before they begin.

COMMAND is built from the table of commands. CONFIG has the settings that clients read.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from koinon_node.resp import wire
from koinon_node.resp.commands.spec import COMMANDS, Spec, find, subcommands
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_node.resp.slow_log import ENTRIES_MAX, SLOWER_THAN_S

_CONFIG = {
    "appendfsync": "always",
    "appendonly": "yes",
    "cluster-enabled": "yes",
    "databases": "1",
    "maxmemory": "0",
    "maxmemory-policy": "noeviction",
    "proto-max-bulk-len": "1048576",
    "save": "",
    "slowlog-log-slower-than": str(int(SLOWER_THAN_S * 1_000_000)),
    "slowlog-max-len": str(ENTRIES_MAX),
    "timeout": "0",
}
"""This node's properties as settings of Redis."""
_PATTERNS_MAX, _PATTERN_BYTES_MAX = 64, 64  # each is compiled


# --- COMMAND -----------------------------------------------------------------------------------


def _described(spec: Spec) -> bytes:
    first, last, step = spec.keys
    return wire.array(
        [
            wire.bulk(spec.name.lower().encode()),
            wire.integer(spec.arity),
            wire.array([wire.simple(flag) for flag in sorted(spec.flags)]),
            *(wire.integer(number) for number in (first, last, step)),
            wire.array([]),  # categories of ACLs
            wire.bulks([tip.encode() for tip in spec.tips]),
            wire.array([]),  # key specifications: the three numbers suffice
            wire.array([]),  # subcommands
        ]
    )


def _all_of(session: Session, arguments: Arguments) -> Outcome:
    return wire.array([_described(spec) for spec in COMMANDS.values()])


def _count(session: Session, arguments: Arguments) -> Outcome:
    return wire.integer(len(COMMANDS))


def _command_info(session: Session, arguments: Arguments) -> Outcome:
    if len(arguments) == 2:
        return _all_of(session, arguments)
    specs = (find(name) for name in arguments[2:])
    return wire.array([_described(spec) if spec else wire.NIL_ARRAY for spec in specs])


def _list(session: Session, arguments: Arguments) -> Outcome:
    return wire.bulks([name.lower() for name in COMMANDS])


def _docs(session: Session, arguments: Arguments) -> Outcome:
    names = arguments[2:] or list(COMMANDS)
    specs = [spec for name in names if (spec := find(name)) is not None]
    pairs = [(wire.bulk(spec.name.lower().encode()), _doc(session, spec)) for spec in specs]
    return wire.map_of(pairs, resp3=session.resp3)


def _doc(session: Session, spec: Spec) -> bytes:
    group = "cluster" if spec.name in ("CLUSTER", "READONLY", "READWRITE") else "string"
    facts = {b"summary": spec.summary.encode(), b"group": group.encode()}
    pairs = [(wire.bulk(name), wire.bulk(value)) for name, value in facts.items()]
    return wire.map_of(pairs, resp3=session.resp3)


def _getkeys(session: Session, arguments: Arguments) -> Outcome:
    called = arguments[2:]
    spec = find(called[0])
    if spec is None:
        raise RefusedError("ERR Invalid command specified")
    if not spec.takes(len(called)):
        raise RefusedError("ERR Invalid number of arguments specified for command")
    if not (keys := spec.keys_in(called)):
        raise RefusedError("ERR The command has no key arguments")
    return wire.bulks(keys)


_COMMAND = subcommands(
    {
        b"COUNT": (2, _count),
        b"DOCS": (-2, _docs),
        b"GETKEYS": (-3, _getkeys),
        b"INFO": (-2, _command_info),
        b"LIST": (2, _list),
    }
)


def command(session: Session, arguments: Arguments) -> Outcome:
    """Describe the commands of this server."""
    return (_all_of if len(arguments) == 1 else _COMMAND)(session, arguments)


# --- CONFIG --------------------------------------------------------------------------------------


def _get(session: Session, arguments: Arguments) -> Outcome:
    if len(arguments) > _PATTERNS_MAX + 2 or max(map(len, arguments)) > _PATTERN_BYTES_MAX:
        raise RefusedError("ERR too many patterns, or too long ones")
    patterns = [pattern.decode("ascii", "replace").lower() for pattern in arguments[2:]]
    found = {
        name: value
        for name, value in _CONFIG.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    pairs = [(wire.bulk(name.encode()), wire.bulk(v.encode())) for name, v in found.items()]
    return wire.map_of(pairs, resp3=session.resp3)


config = subcommands({b"GET": (-3, _get)})
