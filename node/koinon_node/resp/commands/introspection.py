"""COMMAND, INFO and CONFIG: what this server is, for clients that ask before they begin.

COMMAND is made of the table of commands. INFO and CONFIG tell what clients look for; metrics and
the admin commands tell operators more.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from koinon_node.resp import errors, wire
from koinon_node.resp.commands.server import REDIS_VERSION
from koinon_node.resp.commands.table import (
    COMMANDS,
    Arguments,
    Outcome,
    Spec,
    Subcommands,
    command,
    subcommand,
)
from koinon_node.resp.errors import RefusedError
from koinon_node.resp.session import Session

_CONFIG = {
    "appendfsync": "always",
    "appendonly": "yes",
    "cluster-enabled": "yes",
    "databases": "1",
    "maxmemory": "0",
    "maxmemory-policy": "noeviction",
    "proto-max-bulk-len": "1048576",
    "save": "",
    "timeout": "0",
}
"""The facts of this node, in the words of Redis's configuration."""
_PATTERNS_MAX, _PATTERN_BYTES_MAX = 64, 64  # each is compiled


_TIPS = {
    "DBSIZE": ("request_policy:all_shards", "response_policy:agg_sum"),
    "DEL": ("request_policy:multi_shard", "response_policy:agg_sum"),
    "EXISTS": ("request_policy:multi_shard", "response_policy:agg_sum"),
    "INFO": ("nondeterministic_output", "request_policy:all_shards", "response_policy:special"),
    "MGET": ("request_policy:multi_shard",),
    "MSET": ("request_policy:multi_shard", "response_policy:all_succeeded"),
    "PING": ("request_policy:all_shards", "response_policy:all_succeeded"),
    "SCAN": ("nondeterministic_output", "request_policy:special", "response_policy:special"),
    "UNLINK": ("request_policy:multi_shard", "response_policy:agg_sum"),
    "WAIT": ("request_policy:all_shards", "response_policy:agg_min"),
}
"""Whom clients of a cluster ask, and what they make of the answers; as Redis says."""


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
            wire.bulks([tip.encode() for tip in _TIPS.get(spec.name, ())]),
            wire.array([]),  # specifications of keys: the three numbers tell all
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
    specs = (COMMANDS.get(name.upper()) for name in arguments[2:])
    return wire.array([_described(spec) if spec else wire.NIL_ARRAY for spec in specs])


def _list(session: Session, arguments: Arguments) -> Outcome:
    return wire.bulks([name.lower() for name in COMMANDS])


def _docs(session: Session, arguments: Arguments) -> Outcome:
    names = arguments[2:] or list(COMMANDS)
    specs = [spec for name in names if (spec := COMMANDS.get(name.upper())) is not None]
    pairs = [(wire.bulk(spec.name.lower().encode()), _doc(session, spec)) for spec in specs]
    return wire.map_of(pairs, resp3=session.resp3)


def _doc(session: Session, spec: Spec) -> bytes:
    text = (spec.handler.__doc__ or "").strip().partition("\n")[0]
    group = "cluster" if spec.name in ("CLUSTER", "READONLY", "READWRITE") else "string"
    facts = {b"summary": text.encode(), b"group": group.encode()}
    pairs = [(wire.bulk(name), wire.bulk(value)) for name, value in facts.items()]
    return wire.map_of(pairs, resp3=session.resp3)


def _getkeys(session: Session, arguments: Arguments) -> Outcome:
    called = arguments[2:]
    spec = COMMANDS.get(called[0].upper())
    if spec is None or not spec.takes(len(called)):
        raise RefusedError("ERR Invalid command specified")
    first, last, step = spec.keys
    if not first:
        raise RefusedError("ERR The command has no key arguments")
    end = len(called) + last + 1 if last < 0 else last + 1
    return wire.bulks(called[first:end:step])


_COMMAND: Subcommands = {
    b"COUNT": (2, _count),
    b"DOCS": (-2, _docs),
    b"GETKEYS": (-3, _getkeys),
    b"INFO": (-2, _command_info),
    b"LIST": (2, _list),
}


@command("COMMAND", -1, errors.guest)
def command_(session: Session, arguments: Arguments) -> Outcome:
    """Describe the commands that there are."""
    if len(arguments) == 1:
        return _all_of(session, arguments)
    return subcommand(_COMMAND, session, arguments)


# --- INFO and CONFIG ---------------------------------------------------------------------------


def _sections(session: Session) -> dict[str, dict[str, object]]:
    table, keyspace = session.service.table(), session.served.keyspace()
    return {
        "server": {
            "redis_version": REDIS_VERSION.decode(),
            "redis_mode": "cluster",
            "arch_bits": 64,
            "server_name": "koinon",
            "run_id": session.service.node_id,
        },
        "clients": {"connected_clients": session.service.connected()},
        "replication": {"role": "master", "connected_slaves": 0},
        "cluster": {"cluster_enabled": 1},
        "koinon": {
            "cluster_id": table.cluster.cluster_id,
            "table_version": table.table_version,
            "keyspace": keyspace.name,
            "partitioner": keyspace.partitioner,
            "partitions_led": len(session.served.led()),
        },
    }


@command("INFO", -1, errors.guest)
def info(session: Session, arguments: Arguments) -> Outcome:
    """Tell facts about the server, by sections."""
    sections = _sections(session)
    wanted = {name.decode("ascii", "replace").lower() for name in arguments[1:]}
    if wanted and not wanted & {"all", "default", "everything"}:
        sections = {name: facts for name, facts in sections.items() if name in wanted}
    lines = []
    for name, facts in sections.items():
        lines += [f"# {name.capitalize()}", *(f"{k}:{v}" for k, v in facts.items()), ""]
    return wire.bulk("\r\n".join(lines).encode())


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


@command("CONFIG", -2, errors.guest)
def config(session: Session, arguments: Arguments) -> Outcome:
    """Tell how the server is configured."""
    return subcommand({b"GET": (-3, _get)}, session, arguments)
