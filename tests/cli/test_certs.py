"""`koinon certs` as a shell sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from koinon.certs import authority as authorities
from koinon.cli.app import make_app

Run = Callable[..., Result]


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``koinon certs ARGS`` in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> Result:
        ended = CliRunner().invoke(make_app(["koinon.cli.certs"]), ["certs", *arguments])
        assert ended.exit_code == code, ended.output
        assert "Traceback" not in ended.output
        return ended

    return run


def answer(result: Result) -> Any:
    return json.loads(result.stdout)


def test_authority_and_identities_are_made_and_shown(certs: Run) -> None:
    certs("ca")
    certs("coordinator", "c1", "c2")
    certs("node", "n1", "--host", "store1.example.com")
    assert "give its file to nobody else" in certs("user", "root").stderr
    made = answer(certs("client", "--out", "for/apps.pem", "--json"))["made"]
    assert [file["path"] for file in made] == ["for/apps.pem"]
    assert made[0]["certificate"]["names"] == ["URI:koinon:client"]
    assert sorted(path.name for path in Path("certs").iterdir()) == [
        "ca.key",
        "ca.pem",
        "coordinator-c1.pem",
        "coordinator-c2.pem",
        "node-n1.pem",
        "user-root.pem",
    ]
    text = certs("show", "certs/node-n1.pem").stdout
    assert "koinon:node:n1" in text
    assert "DNS:store1.example.com" in text
    shown = answer(certs("show", "certs/node-n1.pem", "--json"))
    assert set(shown) == {"path", "private_key", "certificate", "trusted"}
    assert shown["certificate"]["who"] == "node n1"
    assert int(shown["certificate"]["serial"], 16) > 0
    assert shown["certificate"]["expires_at_s"] > shown["certificate"]["issued_at_s"]
    assert shown["trusted"][0]["subject"] == shown["certificate"]["issuer"]
    assert certs("show", "certs/ca.pem").stdout.startswith("TRUSTED AUTHORITY")


def test_nothing_shows_a_private_key(certs: Run) -> None:
    said = [certs("ca"), certs("node", "n1"), certs("renew"), certs("rotate-ca", "add")]
    for arguments in (("show", "certs/node-n1.pem"), ("check", "certs")):
        said += [certs(*arguments), certs(*arguments, "--json")]
    secret = Path("certs/node-n1.pem").read_text().splitlines()[1]
    assert all("PRIVATE" not in each.output and secret not in each.output for each in said)


def test_nothing_is_overwritten_unless_forced(certs: Run) -> None:
    certs("ca")
    assert "never overwritten" in certs("ca", code=2).stderr
    certs("node", "n1")
    before = Path("certs/node-n1.pem").read_bytes()
    refused = certs("node", "n0", "n1", "--json", code=2)
    assert "koinon certs renew" in answer(refused)["error"]
    assert not Path("certs/node-n0.pem").exists()
    assert Path("certs/node-n1.pem").read_bytes() == before
    certs("node", "n1", "--force")
    assert Path("certs/node-n1.pem").read_bytes() != before


@pytest.mark.parametrize(
    "arguments",
    [
        ("node", "n 1"),
        ("node", "n1", "--host", "coordinator.koinon"),
        ("node", "n1", "n2", "--host", "a.example.com"),
        ("node", "n1", "n2", "--out", "one.pem"),
        ("node", "n1", "--days", "0"),
        ("node", "n1", "--ca", "nowhere"),
        ("user", "app", "--host", "a"),
        ("show", "missing.pem"),
        ("show", "certs/ca.key"),
        ("check", "missing.pem"),
        ("check", "empty"),
        ("renew", "certs/ca.pem"),
        ("rotate-ca", "issue"),
    ],
)
def test_wrong_usage_ends_with_2_and_writes_nothing(certs: Run, arguments: tuple[str, ...]) -> None:
    certs("ca")
    Path("empty").mkdir()
    before = {path: path.read_bytes() for path in Path("certs").iterdir()}
    assert certs(*arguments, code=2).stderr
    assert {path: path.read_bytes() for path in Path("certs").iterdir()} == before


def test_check_ends_with_1_where_something_is_wrong(certs: Run) -> None:
    certs("ca")
    certs("node", "n1")
    certs("user", "app", "--days", "20")
    assert answer(certs("check", "certs/node-n1.pem", "--json"))["ok"] is True
    found = answer(certs("check", "certs", "--json", code=1))
    assert found["ok"] is False
    assert {Path(f["path"]).name: [p["fault"] for p in f["problems"]] for f in found["files"]} == {
        "ca.key": [],
        "ca.pem": [],
        "node-n1.pem": [],
        "user-app.pem": ["expires_soon"],
    }
    certs("check", "certs", "--days", "7")
    Path("certs/node-n1.pem").chmod(0o644)
    assert "others could read the key" in certs("check", "certs", "--days", "7", code=1).stdout


def test_renew_takes_what_is_asked_for(certs: Run) -> None:
    certs("ca")
    assert "nothing to renew" in certs("renew").stderr
    certs("node", "n1")
    certs("user", "app", "--days", "20")
    renewed = answer(certs("renew", "--days-left", "30", "--json"))["renewed"]
    assert [file["path"] for file in renewed] == ["certs/user-app.pem"]
    certs("check", "certs")
    renewed = answer(certs("renew", "--json"))["renewed"]
    assert [file["certificate"]["who"] for file in renewed] == ["node n1", "user app"]


def test_authority_is_replaced_in_three_steps_with_files_elsewhere(certs: Run) -> None:
    certs("ca")
    certs("node", "n1")
    certs("user", "app", "--out", "elsewhere")
    old = Path("certs/ca.pem").read_bytes()
    assert "rotate-ca issue" in certs("rotate-ca", "add").stderr
    certs("trust", "elsewhere", "--ca", "certs/ca.pem")
    assert len(answer(certs("show", "elsewhere/user-app.pem", "--json"))["trusted"]) == 2
    certs("rotate-ca", "issue")
    assert not answer(certs("rotate-ca", "issue", "--json"))["renewed"]  # it goes on, or has ended
    assert "renew it before" in certs("rotate-ca", "drop", "certs", "elsewhere", code=2).stderr
    certs("renew", "elsewhere")
    certs("rotate-ca", "drop", "certs", "elsewhere")
    certs("check", "certs", "elsewhere")
    assert old != Path("certs/ca.pem").read_bytes()
    shown = answer(certs("show", "elsewhere/user-app.pem", "--json"))
    assert [each["subject"] for each in shown["trusted"]] == [shown["certificate"]["issuer"]]


def test_text_of_a_stranger_is_escaped(certs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorities, "_subject", lambda _: x509.Name([_named("\x1b[2Jme[red]")]))
    certs("ca")
    certs("node", "n1")
    for name, times in (("node-n1.pem", 2), ("ca.pem", 1)):
        for options in ((), ("--json",)):
            said = certs("show", f"certs/{name}", *options).stdout
            assert "\x1b" not in said
            assert said.replace("\\\\", "").count("me[red]") >= times


def _named(text: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(x509.NameOID.COMMON_NAME, text)
