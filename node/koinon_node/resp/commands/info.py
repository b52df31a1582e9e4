"""INFO and SLOWLOG: facts about this node in the format that tools for Redis parse."""

from __future__ import annotations

import os
import resource
import sys
from itertools import islice
from pathlib import Path

from koinon_node.resp import slow_log, wire
from koinon_node.resp.commands.arguments import integer
from koinon_node.resp.commands.server import REDIS_VERSION
from koinon_node.resp.commands.spec import COMMANDS, Spec, subcommands
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.server.requests import OK

Facts = dict[str, object]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ONLY_WHEN_NAMED = ("commandstats",)
_SLOWLOG_SHOWN = 10


def _sections(session: Session) -> dict[str, Facts]:
    service, served = session.service, session.served
    table, keyspace = service.table(), served.keyspace()
    return {
        "server": {
            "redis_version": REDIS_VERSION.decode(),
            "redis_mode": "cluster",
            "arch_bits": 64,
            "server_name": "koinon",
            "process_id": os.getpid(),
            "run_id": service.node_id,
            "uptime_in_seconds": service.uptime_s(),
            "uptime_in_days": service.uptime_s() // 86_400,
        },
        "clients": {"connected_clients": service.listening.connected, "blocked_clients": 0},
        "memory": _memory(),
        "persistence": {"loading": 0, "aof_enabled": 1, "aof_last_write_status": "ok"},
        "stats": _stats(session),
        "replication": {
            "role": "master",
            "connected_slaves": 0,
            "master_repl_offset": table.table_version,
        },
        "cpu": _processor(),
        "commandstats": {
            f"cmdstat_{spec.name.lower()}": _of_command(spec)
            for spec in COMMANDS.values()
            if spec.method.outcomes
        },
        "cluster": {"cluster_enabled": 1},
        "keyspace": _keyspace(session),
        "koinon": {
            "cluster_id": table.cluster.cluster_id,
            "table_version": table.table_version,
            "keyspace": keyspace.name,
            "partitioner": keyspace.partitioner,
            "partitions_led": len(served.led()),
        },
    }


def _memory() -> Facts:
    """Return the memory section. The process has one heap, so its resident size is its used
    memory.
    """
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "used_memory": resident,
        "used_memory_rss": resident,
        "used_memory_peak": max(peak, resident),
        "total_system_memory": os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES,
        "maxmemory": 0,
        "maxmemory_policy": "noeviction",
        "mem_fragmentation_ratio": "1.00",
        "mem_allocator": f"python-{sys.version_info.major}.{sys.version_info.minor}",
    }


def _stats(session: Session) -> Facts:
    service = session.service
    outcomes = [spec.method.outcomes for spec in COMMANDS.values()]
    ended = sum(sum(known.values()) for known in outcomes)
    rows = service.counts.rows
    return {
        "total_connections_received": service.listening.received,
        "total_commands_processed": ended,
        "rejected_connections": service.listening.rejected,
        "keyspace_hits": rows["get", "ok"],
        "keyspace_misses": rows["get", "absent"],
        "evicted_keys": 0,
        "total_error_replies": ended - sum(known.get(OK, 0) for known in outcomes),
    }


def _processor() -> Facts:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"used_cpu_sys": f"{used.ru_stime:.6f}", "used_cpu_user": f"{used.ru_utime:.6f}"}


def _of_command(spec: Spec) -> str:
    method = spec.method
    calls, spent_us = sum(method.outcomes.values()), int(1_000_000 * method.seconds)
    failed = calls - method.outcomes.get(OK, 0)
    return (
        f"calls={calls},usec={spent_us},usec_per_call={spent_us / calls:.2f},"
        f"rejected_calls=0,failed_calls={failed}"
    )


def _keyspace(session: Session) -> Facts:
    """Return the number of records in the partitions led here, by the last background count.
    Records with an expiry are not counted separately.
    """
    records = session.service.records_in(session.served.led())
    return {"db0": f"keys={records},expires=0,avg_ttl=0"}


def info(session: Session, arguments: Arguments) -> Outcome:
    """Return facts about the server, by sections."""
    sections = _sections(session)
    wanted = {name.decode("ascii", "replace").lower() for name in arguments[1:]} or {"default"}
    if not wanted & {"all", "everything"}:
        usual = sections.keys() - _ONLY_WHEN_NAMED if "default" in wanted else frozenset()
        sections = {name: f for name, f in sections.items() if name in wanted | usual}
    lines = []
    for name, facts in sections.items():
        lines += [f"# {name.capitalize()}", *(f"{k}:{v}" for k, v in facts.items()), ""]
    return wire.bulk("\r\n".join(lines).encode())


# --- SLOWLOG -------------------------------------------------------------------------------------


def _shown(session: Session, arguments: Arguments) -> Outcome:
    count = integer(arguments[2]) if len(arguments) > 2 else _SLOWLOG_SHOWN
    if count < -1 or len(arguments) > 3:
        raise RefusedError("ERR count should be greater than or equal to -1")
    entries = session.service.slow_log.entries
    return wire.array(
        [_entry(entry) for entry in islice(entries, len(entries) if count < 0 else count)]
    )


def _entry(entry: slow_log.SlowCommand) -> bytes:
    numbers = (entry.number, entry.unix_s, entry.elapsed_us)
    words = wire.bulks([entry.command])
    return wire.array(
        [*map(wire.integer, numbers), words, wire.bulk(entry.peer), wire.bulk(entry.client_name)]
    )


def _how_many(session: Session, arguments: Arguments) -> Outcome:
    return wire.integer(len(session.service.slow_log.entries))


def _forget(session: Session, arguments: Arguments) -> Outcome:
    session.service.slow_log.entries.clear()
    return wire.OK


_SLOWLOG = subcommands({b"GET": (-2, _shown), b"LEN": (2, _how_many), b"RESET": (2, _forget)})


def slowlog(session: Session, arguments: Arguments) -> Outcome:
    """Return the commands that were slow lately."""
    action = Action.OPERATE if arguments[1].upper() == b"RESET" else Action.VIEW
    if not session.caller.may_on_cluster(action):
        raise PermissionDeniedError(principal=session.caller.name, action=action.name.lower())
    return _SLOWLOG(session, arguments)
