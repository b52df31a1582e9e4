"""Rules and dashboard name metrics that there are; each alert fires when rules/*.yml say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.observe.shipped import (
    DASHBOARD,
    OBSERVE,
    RULES,
    RUNBOOK,
    alerts,
    anchors,
    dashboard_queries,
    documented,
    metrics_in,
    needs,
    rules,
)

UNIT_TESTS = sorted((Path(__file__).parent / "rules").glob("*.yml"))
SEVERITIES = {"critical", "warning", "info"}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
def test_rules_and_configuration_are_valid() -> None:
    promtool("check", "rules", *RULES)
    promtool("check", "config", "--syntax-only", OBSERVE / "prometheus.yml")


@needs("promtool")
def test_rules_fire_when_they_are_to_and_only_then() -> None:
    promtool("test", "rules", *UNIT_TESTS)


def test_every_alert_is_tried_by_a_unit_test() -> None:
    tried = "".join(path.read_text() for path in UNIT_TESTS)
    for alert in alerts():
        name, severity = alert["alert"], alert["labels"]["severity"]
        fires = f'alertname="{name}", alertstate="firing", severity="{severity}"'
        assert fires in tried, f"{name} ({severity}) fires in no case of {UNIT_TESTS[0].parent}"


def test_every_alert_says_what_it_is_and_where_to_read_on() -> None:
    sections = anchors(RUNBOOK)
    for alert in alerts():
        name, notes = alert["alert"], alert["annotations"]
        assert alert["labels"]["severity"] in SEVERITIES
        assert notes["summary"], name
        link = f"docs/runbook.md#{name.lower()}"
        assert notes["description"].endswith(f"See {link}."), name
        assert name.lower() in sections, f"{RUNBOOK.name} has no section on {name}"


def test_runbook_has_no_section_on_an_alert_that_there_is_not() -> None:
    names = {alert["alert"] for alert in alerts()}
    assert set(re.findall(r"^#+ (Koinon[A-Z]\w+)$", RUNBOOK.read_text(), re.M)) == names


def test_rules_and_dashboard_name_only_metrics_that_there_are() -> None:
    known = documented()
    for rule in rules():
        unknown = metrics_in(rule["expr"]) - known
        assert not unknown, f"{rule.get('alert', rule.get('record'))} asks for {unknown}"
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for title, expr in dashboard_queries():
        assert metrics_in(expr) <= known, f"{title}: {expr}"
        named = set(re.findall(r"koinon:[\w:]+", expr))
        assert named <= recorded, f"{title}: {expr}"


def test_metrics_that_any_process_may_have_are_asked_of_the_cluster_alone() -> None:
    for title, expr in dashboard_queries():
        for selected in re.findall(r"\b(?:up|process_\w+|python_\w+)(\{[^}]*\})?", expr):
            assert 'job=~"koinon-.+"' in selected, f"{title}: {expr}"


@needs("promtool")
def test_every_query_of_the_dashboard_parses(tmp_path: Path) -> None:
    records = [
        {"record": f"panel:{number}", "expr": expr}
        for number, (_, expr) in enumerate(dashboard_queries())
    ]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    promtool("check", "rules", path)


def test_dashboard_is_what_its_program_makes() -> None:
    program = OBSERVE / "grafana" / "dashboard.py"
    done = subprocess.run([sys.executable, str(program), "--check"], check=False, timeout=60)
    assert done.returncode == 0, f"{DASHBOARD.name} is old: run python {program}"


def test_dashboard_asks_the_provisioned_source() -> None:
    provisioning = OBSERVE / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "koinon.yml").read_text())[
        "datasources"
    ]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [one for panel in panels for one in (panel, *panel.get("targets", ()))]
    assert {one["datasource"]["uid"] for one in asked if "datasource" in one} == {source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
