"""A real Prometheus that scrapes a local cluster, with the shipped rules made quick."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.kit.addresses import free_address
from tests.observe.shipped import RULES

WAIT_S = 120.0
POLL_S = 0.2


def quick_rules(directory: Path) -> list[Path]:
    """Copies of the shipped rules, expressions and all, that wait for half a second only."""
    copies = []
    for path in RULES:
        rules = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = "500ms"
        copies.append(directory / path.name)
        copies[-1].write_text(yaml.safe_dump(rules, sort_keys=False))
    return copies


class Prometheus:
    """A Prometheus server, asked through its API."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._address = address
        self._process = process
        self._log = log

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query: ``metric`` (labels) and ``value``."""
        parameters = urllib.parse.urlencode({"query": expr})
        answer = self._get(f"/api/v1/query?{parameters}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name; one of each."""
        found = self._get("/api/v1/alerts")["data"]["alerts"]
        return {one["labels"]["alertname"]: one for one in found if one["state"] == "firing"}

    def broken_rules(self) -> dict[str, str]:
        """Rules whose last evaluation failed, and why."""
        groups = self._get("/api/v1/rules")["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule["lastError"] for rule in rules if rule["health"] == "err"}

    def wait_true(self, expr: str) -> None:
        """Wait until an expression finds something."""
        deadline = time.monotonic() + WAIT_S
        while not self.query(expr):
            assert time.monotonic() < deadline, f"not in time: {expr}"
            time.sleep(POLL_S)

    def wait_until(self, *, fire: Sequence[str] = (), gone: Sequence[str] = ()) -> None:
        """Wait until the ones fire and the others do not."""
        deadline = time.monotonic() + WAIT_S
        while True:
            now = set(self.firing())
            if now >= set(fire) and not now & set(gone):
                return
            assert time.monotonic() < deadline, f"not in time: {fire} or not {gone}; firing: {now}"
            time.sleep(POLL_S)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            try:
                self._open("/-/ready")
                return
            except OSError:
                assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(POLL_S)

    def _get(self, path: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._open(path))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from None
        return answer

    def _open(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=10) as response:
            body: bytes = response.read()
            return body


@contextmanager
def prometheus(directory: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """Run Prometheus on the targets (addresses by job), scraping twice a second."""
    address = free_address()
    config = {
        "global": {
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "evaluation_interval": "250ms",
        },
        "rule_files": [str(path) for path in quick_rules(directory)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(members)}]}
            for job, members in targets.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=output,
        )
        try:
            running = Prometheus(address, process, log)
            running.wait_ready()
            yield running
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
