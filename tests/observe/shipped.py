"""Files that are shipped to watch a cluster: rules, dashboard, list of metrics, runbook."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OBSERVE = ROOT / "compose" / "observe"
RULES = sorted((OBSERVE / "rules").glob("*.yml"))
DASHBOARD = OBSERVE / "grafana" / "dashboards" / "koinon.json"
METRICS = ROOT / "docs" / "metrics.md"
RUNBOOK = ROOT / "docs" / "runbook.md"

_SUFFIXES = ("_bucket", "_sum", "_count")
_VARIABLES = {"$__rate_interval": "1m", "$cluster": ".*", "$instance": ".*"}


def needs(program: str) -> pytest.MarkDecorator:
    """Skips where a program of Debian's ``prometheus`` package is missing."""
    reason = f"there is no {program}: install Prometheus (Debian's package 'prometheus')"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def rules() -> list[dict[str, Any]]:
    """All rules, in their order."""
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(panel's title, expression) of each query, the variables set as for everything."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"]
            for name, value in _VARIABLES.items():
                expr = expr.replace(name, value)
            yield panel["title"], expr


def metrics_in(expr: str) -> set[str]:
    """The cluster's metrics that an expression names; what rules record is none."""
    expr = re.sub(r'"[^"]*"', '""', expr)
    return set(re.findall(r"(?<![\w:])koinon_\w+(?![\w:])", expr))


def documented() -> set[str]:
    """The metrics in docs/metrics.md, and the series that a histogram has."""
    names: set[str] = set()
    for name, kind in re.findall(r"^\| `(koinon_\w+)` \| (\w+) ", METRICS.read_text(), re.M):
        names |= {name + suffix for suffix in _SUFFIXES} if kind == "histogram" else {name}
    return names


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Git forges make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}
