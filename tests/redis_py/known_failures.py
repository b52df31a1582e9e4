"""What redis-py's own tests may fail in against Koinon, and why: a plugin of pytest for them.

Of the tests of commands it keeps those of the groups that are served.
"""

from __future__ import annotations

import re
import tracemalloc
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

GROUPS = ("BASIC KEY COMMANDS", "SCAN COMMANDS")
"""As comments in test_commands.py name them. The groups of other types, of Lua, modules and the
administration of a server are left out.
"""

_CLUSTER = "TestClusterRedisCommands::test_"
_OBJECT = "TestRedisClusterObj::test_"
_COMMANDS = "TestRedisCommands::test_"

REASONS: dict[str, tuple[str, ...]] = {
    "there are strings only: no lists, sets, sorted sets, hashes, HyperLogLogs and places": (
        *(_CLUSTER + name for name in ("*lmove", "*blpop", "*brpop*", "*rpoplpush", "*sort_store")),
        *(_CLUSTER + name for name in ("*_sdiff*", "*_sinter*", "*_smove", "*_sunion*")),
        *(_CLUSTER + name for name in ("*_z*", "*_bzpop*", "*_pf*", "*geo*", "cluster_scan_type")),
        *(
            _COMMANDS + name
            for name in ("type", "sscan*", "hscan*", "zscan", "zscan_iter", "hrandfield")
        ),
        *("Test*Pipeline::test_" + name for name in ("exec_error_in_*", "exec_error_raised")),
        *("Test*Pipeline::test_" + name for name in ("parse_error_raised", "error_is_truncated")),
        *("Test*Pipeline::test_" + name for name in ("pipeline", "pipeline_readonly")),
        *("TestClusterTransaction::test_" + name for name in ("exec_error*", "parse_error*")),
        "TestCluster*MetricsRecording::test_*_error_records_metric*",
    ),
    "there is no BITFIELD": ("TestPipeline::test_pipeline_with_bitfield",),
    "keys cannot be dumped or drawn": (
        _CLUSTER + "*_randomkey",
        _COMMANDS + "dump_and_restore*",
    ),
    "nothing lives longer than a hundred years": (_COMMANDS + "*expiretime",),
    "clients see no replicas: reads go to primaries": (
        _OBJECT + "execute_command_node_flag_replicas",
        _CLUSTER + "cluster_scan",
        _CLUSTER + "cluster_scan_iter",
        "TestReadOnlyPipeline::*replicas_strategies*",
    ),
    "slots move by koinon admin; Redis's bus and shards are not there": (
        _OBJECT + "not_require_full_coverage_cluster_down_error",
        _CLUSTER + "cluster_links",
        _CLUSTER + "cluster_myshardid",
    ),
    "a server is administered by koinon admin": (
        *(_CLUSTER + name for name in ("config_set", "*config_resetstat", "slowlog_*", "acl_log")),
        *(_CLUSTER + name for name in ("bgsave", "lastsave", "memory_*s*", "client_tracking*")),
        *(_CLUSTER + name for name in ("client_*pause", "client_unblock", "client_getredir")),
        _CLUSTER + "client_kill",
        "TestClusterMonitor::test_[!f]*",
    ),
    "INFO counts records in the background": (_CLUSTER + "info",),
    "there is no SUBSCRIBE": (_CLUSTER + "*pubsub_*",),
    "it takes more than three nodes for granted": (
        _OBJECT + "address_remap",
        _OBJECT + "timeout_error_topology_refresh_reuse_connections",
    ),
}
"""The tests by reason: their names without the file, as patterns."""


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the tracing of memory, which takes most of the time."""
    tracemalloc.start = lambda nframe=1: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the groups that are not served; mark what is known to fail."""
    left_out = [item for item in items if not _is_served(item)]
    items[:] = [item for item in items if _is_served(item)]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        reason = _reason(item.nodeid.split("::", 1)[1])
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _reason(name: str) -> str | None:
    for reason, patterns in REASONS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reason
    return None


_GROUP = re.compile(r"    # [A-Z ]+")
_groups: dict[Path, list[tuple[int, str]]] = {}


def _is_served(item: pytest.Item) -> bool:
    if item.path.name != "test_commands.py":
        return True
    if item.path not in _groups:
        lines = item.path.read_text().splitlines()
        _groups[item.path] = [
            (number, line.strip("# ").strip())
            for number, line in enumerate(lines)
            if _GROUP.fullmatch(line)
        ]
    line = item.location[1] or 0
    before = [name for number, name in _groups[item.path] if number <= line]
    return bool(before) and before[-1] in GROUPS
