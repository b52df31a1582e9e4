"""Makes dashboards/koinon.json, which Grafana 10 and later read; ``--check`` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from panels import (
    OURS,
    C,
    Panel,
    S,
    each,
    graph,
    mean,
    of_leader,
    quantiles,
    query,
    rates,
    stat,
    table,
    variable,
)

TARGET = Path(__file__).parent / "dashboards" / "koinon.json"
WIDTH = 24

HEALTH = [
    stat(
        "Leader",
        query(f"koinon_raft_is_leader{{{C}}} == 1", "{{instance}}") | {"instant": True},
    )
    | {
        "options": {
            "textMode": "name",
            "colorMode": "value",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    },
    stat("Online", query(f'sum(koinon:cluster_partitions:view{{{C}, status="online"}})')),
    stat(
        "Offline",
        query(f'sum(koinon:cluster_partitions:view{{{C}, status=~"offline|assigned"}})'),
        bad_from=1,
    ),
    stat(
        "Read-only",
        query(f"sum(koinon:cluster_below_min_in_sync_partitions:view{{{C}}})"),
        bad_from=1,
    ),
    stat(
        "Under-replicated",
        query(f"sum(koinon:cluster_under_replicated_partitions:view{{{C}}})"),
        bad_from=1,
    ),
    stat("Nodes that serve", query(f"sum(koinon_serving{{{C}}})"), bad_from=1, good=True),
    stat(
        "Nodes down",
        query(f'sum(koinon:cluster_nodes:view{{{C}, status="fenced"}})'),
        bad_from=1,
    ),
    stat("Not scraped", query(f"count(up{{{C}, {OURS}}} == 0) or vector(0)"), bad_from=1),
    table(
        "Alerts",
        query(f'ALERTS{{{C}, alertname=~"Koinon.+"}}', instant=True, table=True),
        hidden=("__name__", "cluster", "job", "Value"),
        wide=12,
        unit="short",
    ),
    graph(
        "Partitions",
        query(f"koinon:cluster_partitions:view{{{C}}}", "{{status}}"),
        query(f"koinon:cluster_under_replicated_partitions:view{{{C}}}", "under-replicated"),
        query(f"koinon:cluster_below_min_in_sync_partitions:view{{{C}}}", "read-only"),
        wide=6,
    )
    | {"gridPos": {"w": 6, "h": 8, "x": 0, "y": 0}},
    graph(
        "Sessions",
        of_leader("koinon_sessions", "{{state}}"),
        query(f"koinon:cluster_nodes:view{{{C}}}", "{{status}}"),
        about="Nodes that the leader hears or does not hear, and their status in the table.",
        wide=6,
    )
    | {"gridPos": {"w": 6, "h": 8, "x": 0, "y": 0}},
]
TRAFFIC = [
    graph(
        "Rows by operation", rates("koinon_rows_total", "operation", ', outcome="ok"'), unit="ops"
    ),
    graph(
        "Rows that were not done",
        rates("koinon_rows_total", "operation, outcome", ', outcome!="ok"'),
        unit="ops",
    ),
    graph(
        "Rows refused by limits",
        rates("koinon_quota_refused_rows_total", "keyspace"),
        unit="ops",
        about="What clients asked for above their keyspace's limit of rows or bytes a second.",
    ),
    graph("Bytes by operation", rates("koinon_row_bytes_total", "operation"), unit="Bps"),
    graph(
        "Load of nodes",
        each("koinon_node_load"),
        about="In cores of the reference machine, by counted work: docs/balance.md.",
    ),
    graph(
        "Busiest node over the mean",
        query(f"max(koinon_node_load{{{C}}}) / avg(koinon_node_load{{{C}}})", "by load"),
        query("koinon:node_primaries:max_over_min{" + C + "}", "primaries, over the least"),
        about="Above 1.3 `koinon admin rebalance --by load` is worth a look.",
    ),
    graph("Event loop busy", each("koinon_event_loop_busy_ratio"), unit="percentunit"),
    graph(
        "Requests by method",
        rates("koinon_requests_total", "method", ', job="koinon-node"'),
        unit="reqps",
    ),
    graph(
        "Requests refused or failed",
        rates("koinon_requests_total", "method, outcome", ', outcome!="ok"'),
        unit="reqps",
    ),
    graph(
        "Requests under way",
        query(f"sum by (service) (koinon_requests_in_progress{{{S}}})", "{{service}}"),
    ),
    graph(
        "Bytes in flight / limit",
        query(
            f"koinon_admitted_bytes{{{S}}} / koinon_admitted_bytes_limit{{{S}}}",
            "{{lane}} {{direction}} {{instance}}",
        ),
        unit="percentunit",
        about="At 100 % calls wait before their messages are received.",
    ),
    graph("Calls that wait for room", each("koinon_waiting_calls", "{{lane}} {{instance}}")),
    graph(
        "Calls refused or cut short for want of room",
        rates("koinon_admission_refusals_total", "lane, reason"),
        unit="reqps",
    ),
    graph(
        "Latency by method",
        *quantiles("koinon_request_duration_seconds", "method", f'{S}, service="KeyValue"'),
        unit="s",
        about="Clients' calls, measured on the server. A batch counts as one call.",
        wide=12,
    ),
    graph(
        "Latency by server (p99)",
        quantiles("koinon_request_duration_seconds", "instance", f'{S}, service="KeyValue"')[1],
        unit="s",
        wide=12,
    ),
]
STORAGE = [
    graph("Rows of a commit", mean("koinon_commit_rows"), about="Mean of the group commits."),
    graph("Bytes of a commit", mean("koinon_commit_bytes"), unit="bytes"),
    graph("Time of a commit", *quantiles("koinon_commit_duration_seconds"), unit="s"),
    graph(
        "Time until durable on all required copies",
        *quantiles("koinon_group_completion_seconds"),
        unit="s",
    ),
    graph(
        "Map in use",
        query(f"koinon_store_used_bytes{{{S}}} / koinon_store_map_bytes{{{S}}}", "{{instance}}"),
        unit="percentunit",
    ),
    graph(
        "Disk in use",
        query(
            f"1 - koinon_disk_free_bytes{{{S}}} / koinon_disk_total_bytes{{{S}}}", "{{instance}}"
        ),
        unit="percentunit",
    ),
    graph("Disk that is free", each("koinon_disk_free_bytes"), unit="bytes"),
    graph("Free pages of the store", each("koinon_store_free_pages")),
    graph("Open readers of the store", each("koinon_store_readers")),
]
REPLICATION = [
    graph(
        "Age of the oldest unacknowledged record",
        each("koinon_replication_lag_seconds", "{{follower}} of {{instance}}"),
        unit="s",
    ),
    graph(
        "Records not acknowledged",
        each("koinon_replication_lag_records", "{{follower}} of {{instance}}"),
    ),
    graph(
        "Partitions by copies in sync",
        query(f"sum by (size) (koinon_in_sync_replicas{{{S}}})", "{{size}}"),
    ),
    graph(
        "Streams of followers",
        query(f"sum by (instance) (koinon_follower_streams{{{S}}})", "{{instance}}"),
    ),
    graph(
        "Copies that do not follow yet",
        query(f"sum by (stage) (koinon_copies_in_progress{{{S}}})", "{{stage}}"),
    ),
    graph("Bytes copied", rates("koinon_copied_bytes_total", "direction"), unit="Bps"),
    graph("Copies by role", query(f"sum by (role) (koinon_partitions{{{S}}})", "{{role}}")),
]
COORDINATORS = [
    graph(
        "From proposal to application", *quantiles("koinon_raft_commit_duration_seconds"), unit="s"
    ),
    graph(
        "Writes to the log", *quantiles("koinon_raft_sync_duration_seconds", "instance"), unit="s"
    ),
    graph("Who leads", each("koinon_raft_is_leader")),
    graph(
        "Elections",
        query(f"increase(koinon_raft_elections_started_total{{{S}}}[5m])", "stood {{instance}}"),
        query(f"increase(koinon_raft_leader_changes_total{{{S}}}[5m])", "changes {{instance}}"),
        about="In five minutes.",
    ),
    graph("Applied", each("koinon_raft_applied_index")),
    graph("Entries after the last snapshot", each("koinon_raft_log_entries")),
    graph("Term", each("koinon_raft_term")),
    graph(
        "Nodes fenced", query(f"sum(increase(koinon_fences_total{{{S}}}[5m]))", "in five minutes")
    ),
    graph("Table version", each("koinon_table_version")),
]
PROCESSES = [
    graph("Lease left", each("koinon_lease_remaining_seconds"), unit="s"),
    graph(
        "Leases lost",
        query(f"increase(koinon_lease_losses_total{{{S}}}[5m])", "{{instance}}"),
        about="In five minutes.",
    ),
    graph(
        "Heartbeats (p99)", quantiles("koinon_heartbeat_duration_seconds", "instance")[1], unit="s"
    ),
    graph(
        "Lag of the event loop (p99)",
        quantiles("koinon_event_loop_lag_seconds", "instance")[1],
        unit="s",
    ),
    graph(
        "CPU",
        query(f"rate(process_cpu_seconds_total{{{S}, {OURS}}}[$__rate_interval])", "{{instance}}"),
        about="Cores; without the writer, which is a process of its own.",
    ),
    graph(
        "Memory",
        query(f"process_resident_memory_bytes{{{S}, {OURS}}}", "{{instance}}"),
        unit="bytes",
    ),
]
MOVES = [
    graph("Moves", of_leader("koinon_moves", "{{state}}")),
    graph(
        "Bytes to be received", of_leader("koinon_moves_bytes_remaining", "remaining"), unit="bytes"
    ),
    graph("Received", of_leader("koinon_moves_bytes_per_second", "received"), unit="Bps"),
    graph("Time left", of_leader("koinon_moves_eta_seconds", "about"), unit="s"),
    graph("Bulk loads", of_leader("koinon_loads", "{{state}}")),
    graph(
        "Rows of bulk loads",
        query(f"sum(rate(koinon_staged_rows_total{{{S}}}[$__rate_interval]))", "staged"),
        query(f"sum(rate(koinon_merged_rows_total{{{S}}}[$__rate_interval]))", "merged"),
        unit="ops",
    ),
    graph("Rows of the loads under way", of_leader("koinon_load_rows", "rows")),
    graph(
        "Bytes of the loads under way", of_leader("koinon_load_staged_bytes", "bytes"), unit="bytes"
    ),
    graph("Being staged", each("koinon_staging_bytes"), unit="bytes"),
]
PARTITIONS = [
    graph(
        "Writes: hottest partition / mean",
        query(f"koinon:partition_write_skew:max_over_mean{{{C}}}", "max / mean"),
    ),
    graph(
        "Coefficients of variation",
        query(f"koinon:partition_keys:cv{{{C}}}", "keys"),
        query(f"koinon:partition_traffic:cv{{{C}}}", "traffic"),
        about="Standard deviation / mean, over all partitions.",
    ),
    graph(
        "Nodes: fullest / emptiest",
        query(f"koinon:node_partitions:max_over_min{{{C}}}", "{{role}}"),
        about="By weight.",
    ),
    table(
        "Hottest partitions",
        query(f"topk(15, koinon:partition_traffic:rate5m{{{C}}})", instant=True, table=True),
        hidden=("__name__", "cluster"),
        wide=8,
        unit="ops",
    ),
    table(
        "Largest partitions",
        query(
            f'topk(15, max by (partition) (koinon_partition_bytes{{{C}, role="primary"}}))',
            instant=True,
            table=True,
        ),
        hidden=("__name__", "cluster"),
        wide=8,
        unit="bytes",
    ),
    table(
        "Partitions of nodes",
        query(f"koinon:node_partitions:view{{{C}}}", instant=True, table=True),
        hidden=("__name__", "cluster"),
        wide=8,
        unit="short",
    ),
]
ROWS = {
    "Health": HEALTH,
    "Traffic": TRAFFIC,
    "Storage": STORAGE,
    "Replication": REPLICATION,
    "Coordinators": COORDINATORS,
    "Leases and processes": PROCESSES,
    "Moves and loads": MOVES,
    "Partitions": PARTITIONS,
}


def laid_out() -> list[Panel]:
    """Return all panels with their places: from left to right, row by row."""
    panels: list[Panel] = []
    y = 0
    for title, members in ROWS.items():
        place = {"w": WIDTH, "h": 1, "x": 0, "y": y}
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        )
        y, x, high = y + 1, 0, 0
        for one in members:
            wide, tall = one["gridPos"]["w"], one["gridPos"]["h"]
            if x + wide > WIDTH:
                y, x, high = y + high, 0, 0
            panels.append(one | {"gridPos": {"w": wide, "h": tall, "x": x, "y": y}})
            x, high = x + wide, max(high, tall)
        y += high
    return [{"id": number, **one} for number, one in enumerate(panels, start=1)]


def dashboard() -> Panel:
    """Return the whole dashboard."""
    return {
        "uid": "koinon",
        "title": "Koinon",
        "tags": ["koinon"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                variable("cluster", "Cluster", "koinon_build_info"),
                variable("instance", "Server", "koinon_build_info"),
            ]
        },
        "annotations": {"list": []},
        "panels": laid_out(),
    }


def main() -> int:
    """Write the file, or compare it with what it should be."""
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        return int(not TARGET.exists() or TARGET.read_text() != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
