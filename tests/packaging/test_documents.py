"""The documents name files, headings and tests that exist, and ARCHITECTURE.md stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import koinon
from tests.observe.shipped import anchors

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (".", "docs", "docs/systemd", "compose")
    for path in (ROOT / folder).glob("*.md")
)
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = {
    "client": ROOT / "client/koinon",
    "coordinator": ROOT / "coordinator/koinon_coordinator",
    "node": ROOT / "node/koinon_node",
    "proto": ROOT / "proto/koinon_proto",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def test_architecture_is_short_and_has_its_diagrams() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 250
    assert ARCHITECTURE.count("```mermaid") == 3


def test_walks_of_architecture_name_modules_that_exist_in_ten_steps_at_most() -> None:
    steps = re.findall(r"^\| (\d+) \| `(\w+)/([\w/]+\.py)` \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    assert len(steps) > 40
    for number, package, module, text in steps:
        assert int(number) <= 10
        assert (PACKAGES[package] / module).exists(), f"{package}/{module}"
        for other in re.findall(r"`([\w/]+\.py)`", text):
            folder, _, rest = other.partition("/")
            places = (
                (PACKAGES[folder] / rest,)
                if folder in PACKAGES
                else ((PACKAGES[package] / module).parent / other, PACKAGES[package] / other)
            )
            assert any(place.exists() for place in places), f"{package}/{module}: {other}"


def test_rules_of_architecture_are_numbered_and_name_modules_and_tests_that_exist() -> None:
    rows = [line.strip("| ").split(" | ") for line in ARCHITECTURE.splitlines()]
    rules = [row for row in rows if len(row) == 4 and row[0].isdigit()]
    assert [int(number) for number, *_ in rules] == list(range(1, 26))
    modules = {path.stem for folder in PACKAGES.values() for path in folder.rglob("*.py")}
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for number, _, where, tested in rules:
        for module in re.findall(r"`([\w/]+)`", where):
            assert module.rpartition("/")[2] in modules, f"rule {number}: {module}"
        named = re.findall(r"\btest_\w+", tested)
        assert named, f"rule {number}: no test"
        assert set(named) <= tests, f"rule {number}: {set(named) - tests}"


def test_reference_names_what_is_public() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    left_out = {
        name
        for name in koinon.__all__
        if name not in ("aio", "__version__") and f":: koinon.{name}\n" not in pages
    }
    assert not left_out
    assert ":: koinon_proto.contract.errors\n" in pages
