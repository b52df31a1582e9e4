"""Tests of the page in a real browser, before a real cluster: what it shows, its keyboard, hostile
keys, a failover as it happens, and earlier versions of the table.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from koinon.local import LocalCluster
from koinon.operate.judge.answers import KeyAnswer, key_answers
from koinon.web_console.web_server import ConsoleServer, ConsoleSettings
from koinon_proto.contract.table import Table
from tests.conftest import ClusterFactory
from tests.kit.waiting import TIMEOUT_S
from tests.web_console.conftest import CODE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE_TEXT = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TIMEOUT_MS = TIMEOUT_S * 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed here: none of {', '.join(BROWSERS)}")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def page_of(browser: Browser, url: str, **context: Any) -> Iterator[Page]:
    """Open the page; at the end nothing may have gone wrong in it: no error, no blocked content."""
    opened = browser.new_context(viewport={"width": 1300, "height": 950}, **context)
    page = opened.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    try:
        page.goto(url)
        yield page
        assert faults == []
    finally:
        opened.close()


@contextmanager
def console_of(cluster: LocalCluster, **settings: Any) -> Iterator[ConsoleServer]:
    given = ConsoleSettings(listen="127.0.0.1:0", interval_s=0.3, **settings)
    with ConsoleServer(cluster.coordinators, given, timeout_ms=5_000) as server:
        server.start()
        yield server


@pytest.fixture
def page(cluster: LocalCluster, browser: Browser) -> Iterator[Page]:
    """The page of the shared cluster, which shows it."""
    with ExitStack() as opened:
        server = opened.enter_context(console_of(cluster))
        page = opened.enter_context(page_of(browser, server.url, reduced_motion="reduce"))
        page.locator("#legend button").first.wait_for()
        yield page


def table_of(cluster: LocalCluster) -> Table:
    table = cluster.status().table
    assert table is not None
    return table


def place_of(cluster: LocalCluster, key: bytes) -> KeyAnswer:
    (answer,) = key_answers(table_of(cluster), "", [key])
    return answer


def says(page: Page, selector: str, pattern: str) -> None:
    """Wait until an element has text that matches."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_contain_text(re.compile(pattern), timeout=TIMEOUT_MS)


def leads(page: Page) -> dict[str, int]:
    """Return how many partitions each node leads, as the map's legend says."""
    legend = page.locator("#legend").inner_text()
    return {
        name: int(n.replace(",", "")) for name, n in re.findall(r"(n\d+) leads ([\d,]+)", legend)
    }


def test_page_shows_the_cluster_as_it_is(page: Page, cluster: LocalCluster) -> None:
    says(page, "#summary", "partitions")
    count = table_of(cluster).cluster.partition_count
    says(page, "#tiles", rf"{count:,}\s*of {count:,} partitions online")
    assert sum(leads(page).values()) == count
    assert page.locator("#nodes tbody tr").count() == len(table_of(cluster).nodes)
    assert page.locator("#coordinators tbody tr").count() == 3
    says(page, "#live", "live")


def test_keyboard_reaches_every_square_and_says_all_of_it(
    page: Page, cluster: LocalCluster
) -> None:
    page.focus("#map")
    says(page, "#cell-title", "Partition 0")
    page.keyboard.press("ArrowRight")
    says(page, "#cell-title", "^Partition 1$")
    row = table_of(cluster).rows[1]
    primary = table_of(cluster).nodes[row.primary].node_id
    says(page, "#cell", rf"Leader\s*{primary}")
    says(page, "#cell", "Copies on")
    page.keyboard.press("End")
    says(page, "#cell-title", f"Partition {table_of(cluster).cluster.partition_count - 1:,}")
    page.keyboard.press("Escape")
    says(page, "#cell-title", "^Partition$")


def test_key_that_is_typed_is_found_where_the_client_puts_it(
    page: Page, cluster: LocalCluster
) -> None:
    page.fill("#find-key", "user:17")
    place = place_of(cluster, b"user:17")
    says(page, "#steps", rf"Partition\s*{place.partition_id:,} of")
    says(page, "#steps", rf"Leader\s*{place.primary}")
    page.press("#find-key", "Enter")
    page.check("input[value=hex]")
    page.fill("#find-key", "00ff7f")
    binary = place_of(cluster, b"\x00\xff\x7f")
    says(page, "#steps", rf"Partition\s*{binary.partition_id:,} of")
    says(page, "#steps", "00 ff 7f")
    says(page, "#found", rf"user:17\s*{place.partition_id:,}")
    page.fill("#find-key", "0")
    says(page, "#find-error", "pairs")


def test_hostile_key_is_text_on_the_page(page: Page, cluster: LocalCluster) -> None:
    page.fill("#find-key", HOSTILE_TEXT)
    place = place_of(cluster, HOSTILE_TEXT.encode())
    says(page, "#steps", rf"Partition\s*{place.partition_id:,} of")
    page.press("#find-key", "Enter")
    page.fill("#find-key", "\u202eafter")
    says(page, "#found", r"\\u202e")
    assert HOSTILE_TEXT in page.locator("#found").inner_text()
    assert page.locator("main img, main script").count() == 0


def test_choices_of_the_map_say_what_they_show(page: Page) -> None:
    for mode, said in (("state", "online"), ("load", "rows/s"), ("size", "B"), ("lag", "ms")):
        page.check(f"#modes input[value={mode}]", force=True)
        says(page, "#legend", said)
    page.check("#modes input[value=leader]", force=True)
    page.locator("#legend button").first.click()
    assert page.locator("#legend button").first.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_the_page(cluster: LocalCluster, browser: Browser, scheme: str) -> None:
    """By the rules of axe: contrast, names, roles, the order of headings, and many more."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with console_of(cluster) as server:
        # axe is put into the page, which the page's own policy forbids.
        options = {"color_scheme": scheme, "reduced_motion": "reduce", "bypass_csp": True}
        with page_of(browser, server.url, **options) as page:
            page.locator("#legend button").first.wait_for()
            for key in ("user:1", "user:2"):
                page.fill("#find-key", key)
                page.press("#find-key", "Enter")
            says(page, "#found", "user:2")
            found = axe.Axe().run(page).response["violations"]
    assert [(one["id"], [n["target"] for n in one["nodes"]]) for one in found] == []


def test_failover_is_shown_as_it_happens_and_can_be_looked_back_at(
    make_cluster: ClusterFactory, browser: Browser
) -> None:
    cluster = make_cluster(nodes=3)
    cluster.start()
    cluster.wait_ready()
    with console_of(cluster) as server, page_of(browser, server.url) as page:
        says(page, "#legend", r"n3 leads [1-9]")
        before = leads(page)
        cluster.kill("n3")
        says(page, "#legend", "n3 leads 0")
        says(page, "#summary", "node n3 .* is down")
        says(page, "#events", "n3 is down")
        page.focus("#slider")
        page.keyboard.press("Home")
        says(page, "#past", "As it was at")
        says(page, "#legend", rf"n3 leads {before['n3']}\b")
        assert leads(page) == before
        page.click("#now")
        says(page, "#legend", "n3 leads 0")


def test_code_of_the_address_lets_one_in_and_is_gone_from_it(
    cluster: LocalCluster, browser: Browser
) -> None:
    with console_of(cluster, code=CODE) as server:
        with page_of(browser, server.url) as page:
            says(page, "#legend", "leads")
            assert CODE not in page.url
        bare = server.url.partition("#")[0]
        opened = browser.new_context()
        page = opened.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(bare)
        page.locator("#login[open]").wait_for()
        page.fill("#login-code", "wrong-code-of-somebody")
        page.press("#login-code", "Enter")
        says(page, "#login-error", "not the code")
        page.fill("#login-code", CODE)
        page.press("#login-code", "Enter")
        says(page, "#legend", "leads")
        opened.close()
