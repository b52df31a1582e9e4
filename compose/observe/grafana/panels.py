"""The kinds of panels and queries that the dashboard is made of, as Grafana's JSON has them."""

from __future__ import annotations

from typing import Any

SOURCE = {"type": "prometheus", "uid": "koinon-prometheus"}
# Labels of every query: the chosen cluster, and the chosen servers.
C = 'cluster=~"$cluster"'
S = 'cluster=~"$cluster", instance=~"$instance"'
# For metrics that other programs export too: only those of Koinon's servers.
OURS = 'job=~"koinon-.+"'

Panel = dict[str, Any]


def query(expr: str, legend: str = "", *, instant: bool = False, table: bool = False) -> Panel:
    """Return one query of a panel."""
    return {
        "datasource": SOURCE,
        "expr": expr,
        "legendFormat": legend or "__auto",
        "format": "table" if table else "time_series",
        "instant": instant,
        "range": not instant,
    }


def panel(
    kind: str, title: str, queries: list[Panel], *, wide: int, high: int, **more: Any
) -> Panel:
    """Return a panel; ``laid_out`` decides where it stands."""
    targets = [{"refId": chr(ord("A") + i), **one} for i, one in enumerate(queries)]
    made: Panel = {"type": kind, "title": title, "datasource": SOURCE, "targets": targets}
    return made | more | {"gridPos": {"w": wide, "h": high, "x": 0, "y": 0}}


def graph(
    title: str, *queries: Panel, unit: str = "short", about: str = "", wide: int = 8
) -> Panel:
    """Lines over time."""
    custom = {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never", "spanNulls": False}
    return panel(
        "timeseries",
        title,
        list(queries),
        wide=wide,
        high=7,
        description=about,
        fieldConfig={
            "defaults": {"unit": unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        options={
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def stat(title: str, one: Panel, *, bad_from: float | None = None, good: bool = False) -> Panel:
    """A number: red from ``bad_from`` up, or, with ``good``, below it."""
    low, high = ("red", "green") if good else ("green", "red")
    steps: list[Panel] = [{"color": low if bad_from is not None else "text", "value": None}]
    if bad_from is not None:
        steps.append({"color": high, "value": bad_from})
    return panel(
        "stat",
        title,
        [one],
        wide=3,
        high=4,
        fieldConfig={
            "defaults": {"thresholds": {"mode": "absolute", "steps": steps}, "noValue": "-"},
            "overrides": [],
        },
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
        },
    )


def table(title: str, one: Panel, *, hidden: tuple[str, ...], wide: int, unit: str) -> Panel:
    """Return the answer of an instant query as a table, the greatest values first."""
    return panel(
        "table",
        title,
        [one],
        wide=wide,
        high=8,
        fieldConfig={"defaults": {"unit": unit}, "overrides": []},
        options={"showHeader": True, "sortBy": [{"displayName": "Value", "desc": True}]},
        transformations=[
            {"id": "organize", "options": {"excludeByName": dict.fromkeys(("Time", *hidden), True)}}
        ],
    )


def quantiles(histogram: str, by: str = "", only: str = S) -> list[Panel]:
    """Return median and 99th percentile of a histogram, by a label."""
    keys = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        query(
            f"histogram_quantile({q}, sum by ({keys}) (rate({histogram}_bucket{{{only}}}"
            "[$__rate_interval])))",
            name + legend,
        )
        for q, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def rates(counter: str, by: str, more: str = "") -> Panel:
    """Return how fast a counter grows, by labels, as the sum over servers."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return query(f"sum by ({by}) (rate({counter}{{{S}{more}}}[$__rate_interval]))", legend)


def mean(histogram: str) -> Panel:
    """Return the mean of a histogram's values, by server."""
    over = f"{{{S}}}[$__rate_interval]"
    return query(f"rate({histogram}_sum{over}) / rate({histogram}_count{over})", "{{instance}}")


def each(expr: str, legend: str = "{{instance}}") -> Panel:
    """Return a metric of the chosen servers, unchanged."""
    return query(f"{expr}{{{S}}}", legend)


def of_leader(metric: str, legend: str = "") -> Panel:
    """Return a metric as one coordinator exports it: the leader, if there is one."""
    return query(
        f"{metric}{{{C}}} and on (cluster, job, instance) koinon:coordinator:authority", legend
    )


def variable(name: str, label: str, metric: str) -> Panel:
    """Return a choice among the values of a label; at first all are chosen."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({metric}, {name})", "refId": name},
        "definition": f"label_values({metric}, {name})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
