"""Tests of the console over HTTP: who is let in, what streams bring, and that nothing hostile in
keys or requests becomes markup.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from koinon.operate.judge.answers import key_answers
from koinon.web_console import application
from koinon.web_console.page_requests import BODY_BYTES_MAX, KEYS_MAX
from tests.client.operate.test_health import number, table_of
from tests.kit.waiting import wait_until
from tests.web_console.conftest import CODE, HOSTILE, ServedConsole, changed, events

PAGE = Path(application.__file__).parent / "page"
OWN_ORIGIN = "own origin"


def post(served: ServedConsole, path: str, body: Any) -> httpx.Response:
    with served.client(origin=served.url, **{"content-type": "application/json"}) as client:
        return client.post(path, content=json.dumps(body))


# --- who ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1:7480", 200),
        ("localhost", 200),
        ("OPS.example:443", 200),
        ("[::1]:7480", 200),
        ("evil.example:7480", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("", 403),
    ],
)
def test_request_by_a_name_that_the_console_does_not_have_is_refused(
    served: ServedConsole, host: str, answer: int
) -> None:
    with served.client(host=host) as client:
        assert client.get("/").status_code == answer
        assert client.get("/api/table/1").status_code == answer


@pytest.mark.parametrize(
    ("origin", "answer"),
    [
        (OWN_ORIGIN, 200),
        (None, 403),
        ("null", 403),
        ("http://evil.example", 403),
        ("http://127.0.0.1:1", 403),
    ],
)
def test_question_of_another_site_is_refused(
    served: ServedConsole, origin: str | None, answer: int
) -> None:
    headers = {"origin": served.url if origin == OWN_ORIGIN else origin} if origin else {}
    with served.client(**headers) as client:
        reply = client.post("/api/where", json={"keys": [{"text": "k"}]})
    assert reply.status_code == answer


def test_reads_of_other_sites_are_refused_as_browsers_mark_them(served: ServedConsole) -> None:
    with served.client(**{"sec-fetch-site": "cross-site"}) as client:
        assert client.get("/api/table/1").status_code == 403
    with served.client(origin="http://evil.example") as client:
        assert client.get("/api/events").status_code == 403


def test_without_a_session_nothing_of_the_cluster_is_shown(guarded: ServedConsole) -> None:
    with guarded.client(origin=guarded.url) as client:
        assert client.get("/").status_code == 200
        assert client.get("/page/main.js").status_code == 200
        for path in ("/api/events", "/api/table/1"):
            assert client.get(path).status_code == 401
        for path in ("/api/where", "/api/hot"):
            assert client.post(path, json={}).status_code == 401
        client.cookies.set(f"koinon_console_{guarded.port}", "guessed")
        assert client.get("/api/table/1").status_code == 401


@pytest.mark.parametrize("code", [CODE[:-1], CODE + "x", "", "é" * 8, "x" * 10_000, "b_user"])
def test_wrong_code_opens_no_session(guarded: ServedConsole, code: str) -> None:
    reply = post(guarded, "/api/login", {"code": code})
    assert reply.status_code in (400, 401)
    assert "set-cookie" not in reply.headers


def test_code_opens_a_session_whose_cookie_scripts_and_other_sites_do_not_get(
    guarded: ServedConsole,
) -> None:
    with guarded.client(origin=guarded.url) as client:
        cookie = client.post("/api/login", json={"code": CODE}).headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert CODE not in cookie
        assert client.get("/api/table/1").status_code == 200


def test_token_of_a_user_lets_in_until_the_user_may_look_no_more(
    guarded: ServedConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded.client(origin=guarded.url) as client:
        assert client.post("/api/login", json={"code": "a_user"}).status_code == 200
        assert client.get("/api/table/1").status_code == 200
        assert guarded.gate.tokens == {"a_user"}
        guarded.call(guarded.gate.end_sessions_of, "a_user")
        assert client.get("/api/table/1").status_code == 401
    guarded.coordinators_are_up = False
    assert post(guarded, "/api/login", {"code": "a_user"}).status_code == 503


def test_stream_of_a_session_that_has_ended_ends(guarded: ServedConsole) -> None:
    with guarded.client(origin=guarded.url) as client:
        client.post("/api/login", json={"code": "a_user"})
        with events(client) as stream:
            next(stream)
            guarded.call(guarded.gate.end_sessions_of, "a_user")
            guarded.take(changed(table_of(), 0, number(2)))
            assert len(list(islice(stream, 3))) <= 1  # the moment was on its way; its table follows


# --- what every answer carries --------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/api/table/1", "/api/nothing"])
def test_every_answer_forbids_foreign_and_inline_content(served: ServedConsole, path: str) -> None:
    with served.client() as client:
        headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_refusal_carries_the_policy_too(served: ServedConsole) -> None:
    with served.client(host="evil.example") as client:
        assert "content-security-policy" in client.get("/").headers


def test_page_loads_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    for file in PAGE.iterdir():
        text = file.read_text()
        foreign = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
        assert set(foreign) <= {"http://www.w3.org"}, file.name
        assert "innerHTML" not in text, file.name
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"\son\w+=|style=|javascript:", page) == []
    assert re.findall(r"<script(?![^>]*src=)", page) == []
    assert "<style" not in page
    assert sum(file.stat().st_size for file in PAGE.iterdir()) < 200_000


def test_files_beside_the_page_are_not_served(served: ServedConsole) -> None:
    with served.client() as client:
        for path in ("/page/../gate.py", "/page/%2e%2e/gate.py", "/page/..%2fgate.py", "/page/"):
            assert client.get(path).status_code == 404


# --- streams --------------------------------------------------------------------------------------


def test_stream_begins_with_whole_values_and_goes_on_with_changes(served: ServedConsole) -> None:
    with served.client() as client, events(client) as stream:
        (_, first, table), (_, second, moment) = islice(stream, 2)
        assert (first, second) == ("table", "moment")
        assert table["whole"]
        assert len(table["rows"]) == 12
        assert moment["status"]["summary"].startswith("All is well")
        served.take(changed(table_of(), 4, number(3)))
        news = {name: data for _, name, data in islice(stream, 2)}
        assert not news["table"]["whole"]
        assert [row[0] for row in news["table"]["rows"]] == [4]
        assert news["table"]["steps"][0]["changes"] == ["primaries: n3 leads 1 more"]


def test_stream_that_comes_back_goes_on_where_it_was(served: ServedConsole) -> None:
    table = table_of()
    with served.client() as client:
        with events(client) as stream:
            *_, (last_id, _, _) = islice(stream, 2)
        for p in range(3):
            served.take(table := changed(table, p, number(3)))
        with events(client, **{"Last-Event-ID": last_id}) as stream:
            news = list(islice(stream, 6))
    tables = [data for _, name, data in news if name == "table"]
    assert [(t["whole"], t["base_version"], t["version"]) for t in tables] == [
        (False, 1, 2),
        (False, 2, 3),
        (False, 3, 4),
    ]
    numbers = [int(entry_id.rpartition(".")[2]) for entry_id, _, _ in news]
    assert numbers == list(range(numbers[0], numbers[0] + 6))


def test_stream_of_another_process_begins_anew(served: ServedConsole) -> None:
    with served.client() as client, events(client, **{"Last-Event-ID": "earlier.7"}) as stream:
        assert next(stream)[2]["whole"]


def test_poller_is_told_whether_anybody_looks(served: ServedConsole) -> None:
    with served.client() as client, served.client() as other:
        with events(client) as stream:
            next(stream)
            with events(other) as second:
                next(second)
            wait_until(lambda: len(served.watched) == 3)
            assert served.watched == [True, True, True]
        wait_until(lambda: served.watched[-1] is False)


def test_table_of_a_version_is_given_as_long_as_it_is_kept(served: ServedConsole) -> None:
    served.take(changed(table_of(), 4, number(3)))
    with served.client() as client:
        rows = [client.get(f"/api/table/{v}").json()["rows"][4] for v in (1, 2)]
        assert [row[2] for row in rows] == [table_of().rows[4].primary, 3]
        assert client.get("/api/table/3").status_code == 404


# --- questions ------------------------------------------------------------------------------------


def test_where_answers_as_the_command_does(served: ServedConsole) -> None:
    keys = ["user:1", "user:2", "ключ"]
    reply = post(served, "/api/where", {"keyspace": "", "keys": [{"text": k} for k in keys]})
    expected = key_answers(table_of(), "", [k.encode() for k in keys])
    assert [(a["partition_id"], a["primary"], a["hash"]) for a in reply.json()] == [
        (e.partition_id, e.primary, e.hash) for e in expected
    ]


def test_hostile_key_comes_back_as_harmless_text(served: ServedConsole) -> None:
    reply = post(served, "/api/where", {"keys": [{"hex": HOSTILE.hex()}]})
    assert reply.headers["content-type"] == "application/json"
    (answer,) = reply.json()
    assert answer["shown"] == "<script>alert(1)</script>\\x1b[31m\\xff"
    assert answer["hex"] == HOSTILE.hex()
    (partition,) = post(served, "/api/hot", {"seconds": 0.1}).json()["partitions"]
    assert partition["keys"][0]["shown"] == answer["shown"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "keys"),
        ({"keys": "k"}, "must be a list"),
        ({"keys": [{"text": ""}]}, "keys[0]"),
        ({"keys": [{"text": "k"}, {"hex": "6"}]}, "keys[1]"),
        ({"keys": [{"hex": "zz"}]}, "hexadecimal"),
        ({"keys": [{"text": "k", "hex": "6b"}]}, "either"),
        ({"keys": [{"text": "k" * 501}]}, "501"),
        ({"keys": [{"text": "\ud800"}]}, "Unicode"),
        ({"keys": [{"text": "k"}] * (KEYS_MAX + 1)}, "too many"),
        ({"keys": [], "keyspace": 7}, "keyspace"),
        ({"keys": [{"text": "k" * BODY_BYTES_MAX}]}, "too long"),
    ],
)
def test_bad_question_gets_an_error_that_names_the_fault(
    served: ServedConsole, body: Any, words: str
) -> None:
    reply = post(served, "/api/where", body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]


def test_question_that_is_no_json_is_refused(served: ServedConsole) -> None:
    with served.client(origin=served.url) as client:
        form = client.post("/api/where", data={"keys": "k"})
        deep = client.post(
            "/api/where", content=b"[" * 100_000, headers={"content-type": "application/json"}
        )
    assert (form.status_code, deep.status_code) == (400, 400)


def test_unknown_keyspace_and_bad_seconds_are_refused(served: ServedConsole) -> None:
    assert post(served, "/api/where", {"keyspace": "vip", "keys": []}).status_code == 404
    for seconds in (0, 11, "3", True, None):
        assert post(served, "/api/hot", {"seconds": seconds}).status_code == 400


def test_nothing_can_be_changed_by_any_route(served: ServedConsole) -> None:
    with served.client(origin=served.url) as client:
        for method in ("PUT", "DELETE", "PATCH"):
            for path in ("/", "/api/where", "/api/table/1", "/page/main.js"):
                assert client.request(method, path).status_code == 405
