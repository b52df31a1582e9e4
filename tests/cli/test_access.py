"""admin users, roles, tokens and certificates, against a coordinator of this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.certs.authority import CLOCK_SKEW
from koinon.cli.app import make_app
from koinon.cli.console.session import USAGE
from koinon.operate.admin import Admin
from koinon.operate.fates import ChangeFateError
from koinon_proto.contract.access import Access, Action, Effect, Grant, Role, parse_token
from koinon_proto.v1 import admin_pb2
from tests.cli.fake_operator import FakeOperator

Run = Callable[..., Any]


@pytest.fixture
def operator() -> Iterator[FakeOperator]:
    made = FakeOperator(nodes=1)
    yield made
    made.close()


@pytest.fixture
def koinon(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``koinon admin ARGS``; returns what it prints, read as JSON with ``--json``."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(line: str, *more: str, code: int = 0) -> Any:
        arguments = ["admin", *line.split(), *more, "--coordinators", operator.address]
        result = CliRunner().invoke(make_app(), arguments)
        assert result.exit_code == code, (line, result.output, result.stderr)
        return json.loads(result.stdout) if "--json" in arguments else result

    return run


def test_roles_are_made_changed_shown_and_dropped(koinon: Run, operator: FakeOperator) -> None:
    assert "koinon admin roles create" in koinon("roles").output
    koinon("roles create orders --allow read,scan --prefix orders/")
    koinon("roles grant orders --deny write --prefix orders/closed/")
    answer = koinon("roles grant orders --allow view --json")
    assert operator.access.roles[0].grants == (
        Grant(effect=Effect.ALLOW, actions=(Action.READ, Action.SCAN), prefix=b"orders/"),
        Grant(effect=Effect.DENY, actions=(Action.WRITE,), prefix=b"orders/closed/"),
        Grant(effect=Effect.ALLOW, actions=(Action.VIEW,)),
    )
    assert answer == koinon("roles --json")["roles"][0]
    assert answer["grants"][1] == {
        "effect": "deny",
        "actions": ["write"],
        "prefix": "orders/closed/",
    }
    shown = koinon("roles").stdout
    assert "read, scan" in shown
    assert "orders/closed/" in shown
    koinon("roles revoke orders --deny write --prefix orders/closed/")
    assert len(operator.access.roles[0].grants) == 2
    assert koinon("roles drop orders --yes --json") == {"dropped": "orders"}
    assert operator.access.roles == ()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("roles create orders", "role orders is there"),
        ("roles create or/ders", "letters, digits"),
        ("roles grant oders --allow read", "no role 'oders'"),
        ("roles grant orders", "give --allow or --deny"),
        ("roles grant orders --allow reed", "there are read, write"),
        ("roles revoke orders --allow write", "has no such grant"),
        ("roles drop orders --yes", "belongs to app"),
        ("users create app", "user app is there"),
        ("users create root", "by its certificate"),
        ("users create b --role oders", "no role 'oders'"),
        ("users block ap", "no user 'ap'"),
        ("users drop ap --yes", "there are app"),
        ("tokens create ap", "no user 'ap'"),
        ("tokens create app --expires soon", "no duration"),
        ("tokens revoke aaaaaaaaaa", "there is no token"),
        ("certificates revoke hello", "hello"),
    ],
)
def test_what_cannot_be_is_refused_and_says_why(
    koinon: Run, operator: FakeOperator, line: str, says: str
) -> None:
    koinon("roles create orders --allow read")
    koinon("users create app --role orders")
    before = operator.access
    refused = koinon(line, code=USAGE)
    assert says in " ".join(refused.stderr.replace("│", " ").split())
    assert operator.access == before


def test_users_are_made_changed_shown_and_dropped(koinon: Run, operator: FakeOperator) -> None:
    assert "koinon admin users create" in koinon("users").output
    for role in ("a", "b", "c"):
        koinon(f"roles create {role}")
    koinon("users create app --role a --role b")
    koinon("users grant app --role c")
    koinon("users revoke app --role a --role b")
    assert operator.access.users[0].roles == ("c",)
    koinon("users block app")
    assert "blocked" in koinon("users").stdout
    (user,) = koinon("users --json")["users"]
    assert (user["user"], user["roles"], user["blocked"]) == ("app", ["c"], True)
    koinon("users unblock app")
    assert not operator.access.users[0].blocked
    koinon("users expire-certificates app")
    back_s = CLOCK_SKEW.total_seconds()  # from when a certificate holds that is issued now
    assert 0 <= time.time() - back_s - operator.access.users[0].certificates_from_s < 60
    koinon("users drop app --yes")
    assert operator.access.users == ()


def test_token_is_told_once_or_written_for_its_owner_alone(
    koinon: Run, operator: FakeOperator, tmp_path: Path
) -> None:
    koinon("users create app")
    text = koinon("tokens create app").stdout.strip()
    assert Access(operator.access).user_of_token(text, time.time()) == "app"
    answer = koinon("tokens create app --expires 90d --description batch --json")
    token_id, _ = parse_token(answer["token"]) or ("", "")
    assert answer["id"] == token_id
    assert 90 * 86_400 - 60 < answer["expires_s"] - time.time() <= 90 * 86_400
    file = tmp_path / "app.token"
    said = koinon("tokens create app", "--file", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert Access(operator.access).user_of_token(file.read_text().strip(), time.time()) == "app"
    assert file.read_text().strip() not in said.output
    before = file.read_text()
    koinon("tokens create app", "--file", str(file), code=USAGE)  # it is there
    assert file.read_text() == before
    listed = koinon("tokens").stdout
    assert listed.count("app") == 3
    assert "never" in listed
    assert "koinon_" not in listed + json.dumps(koinon("tokens --json"))
    koinon(f"tokens revoke {text.split('_')[1]}")
    assert Access(operator.access).user_of_token(text, time.time()) is None


def test_token_that_is_refused_leaves_no_file(koinon: Run, tmp_path: Path) -> None:
    file = tmp_path / "app.token"
    koinon("tokens create app", "--file", str(file), code=USAGE)
    assert not file.exists()


def test_certificates_are_revoked_and_restored(koinon: Run, operator: FakeOperator) -> None:
    koinon("certificates revoke 0A:1F")
    assert operator.access.revoked_serials == ("a1f",)
    assert koinon("certificates --json") == {"revoked": ["a1f"]}
    koinon("certificates restore a1f")
    assert not operator.access.revoked_serials


def test_change_that_another_operator_overtakes_is_made_again(operator: FakeOperator) -> None:
    with Admin(operator.address) as admin:
        admin.access.put_role(Role(name="orders"))
        operator.access_changed_meanwhile = 3
        grant = Grant(effect=Effect.ALLOW, actions=(Action.READ,), prefix=b"o")
        admin.access.alter_role("orders", lambda grants: [*grants, grant])
        assert operator.access.roles[0].grants == (grant,)
        asked = [type(request) for request in operator.requests].count(admin_pb2.GetAccessRequest)
        assert asked == 4


def test_change_without_an_answer_is_not_made_twice(operator: FakeOperator) -> None:
    """The second would be refused, as there is no such role any more: and it was dropped."""
    with Admin(operator.address, timeout_ms=500) as admin:
        admin.access.put_role(Role(name="orders"))
        operator.silent.add("ChangeAccessRequest")
        with pytest.raises(ChangeFateError, match="users, roles or tokens may have been changed"):
            admin.access.drop_role("orders")
    changes = [r for r in operator.requests if isinstance(r, admin_pb2.ChangeAccessRequest)]
    assert [change.WhichOneof("change") for change in changes] == ["put_role", "drop_role"]
