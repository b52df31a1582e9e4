"""admin users, roles, tokens and certificates, against a coordinator of this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.certs.authority import CLOCK_SKEW
from koinon.cli.app import make_app
from koinon.cli.console.session import USAGE
from koinon.operate.admin import Admin
from koinon.operate.unknown_outcomes import ChangeFateError
from koinon_proto.contract.access import Access, Action, Effect, Grant, Role, parse_token
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, KeyspaceList
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
    """Runs ``koinon admin ARGS``; returns what it prints, read as JSON with ``--json``. ``code``
    None: it is to fail.
    """
    monkeypatch.setenv("COLUMNS", "200")

    def run(line: str, *more: str, code: int | None = 0) -> Any:
        arguments = ["admin", *line.split(), *more, "--coordinators", operator.address]
        result = CliRunner().invoke(make_app(), arguments)
        is_as_said = result.exit_code == code or (code is None and result.exit_code)
        assert is_as_said, (line, result.output, result.stderr)
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
        "keyspace": None,
        "keyspace_id": None,
    }
    shown = koinon("roles").stdout
    assert "read, scan" in shown
    assert "orders/closed/" in shown
    koinon("roles revoke orders --deny write --prefix orders/closed/")
    assert len(operator.access.roles[0].grants) == 2
    assert koinon("roles drop orders --yes --json") == {"dropped": "orders"}
    assert operator.access.roles == ()


def with_keyspaces(operator: FakeOperator, *keyspaces: Keyspace) -> None:
    listed = KeyspaceList(changed_at=1, keyspaces=keyspaces)
    operator.table = replace(operator.table, keyspace_list=listed)


def test_grants_in_a_keyspace_are_made_shown_and_revoked_by_its_name(
    koinon: Run, operator: FakeOperator
) -> None:
    default = operator.table.keyspaces.default
    vip = replace(default, keyspace_id=KeyspaceId(7), name="vip", base=default.partition_count)
    with_keyspaces(operator, vip)
    koinon("roles create app --allow read --prefix app: --keyspace vip")
    koinon("roles grant app --deny read --keyspace default")
    answer = koinon("roles grant app --allow view --json")
    assert [grant.keyspace_id for grant in operator.access.roles[0].grants] == [7, 0, None]
    told = [(grant["keyspace"], grant["keyspace_id"]) for grant in answer["grants"]]
    assert told == [("vip", 7), ("default", 0), (None, None)]
    lines = koinon("roles").stdout.splitlines()
    assert "vip" in next(line for line in lines if "app:" in line)
    koinon("roles revoke app --allow read --prefix app:", code=USAGE)  # it is not in every keyspace
    koinon("roles revoke app --deny read --keyspace default")
    assert [grant.keyspace_id for grant in operator.access.roles[0].grants] == [7, None]
    before = operator.access
    refused = koinon("roles grant app --allow operate --keyspace vip", code=USAGE)
    assert "operate concerns no keyspace" in " ".join(refused.stderr.replace("│", " ").split())
    unknown = koinon("roles grant app --allow read --keyspace vap", code=None)
    assert "keyspace 'vap' has been dropped, or was never created" in unknown.stderr
    assert operator.access == before


def test_grant_in_a_keyspace_that_was_dropped_is_shown_and_revoked_by_its_id(
    koinon: Run, operator: FakeOperator
) -> None:
    default = operator.table.keyspaces.default
    vip = replace(default, keyspace_id=KeyspaceId(7), name="vip", base=default.partition_count)
    with_keyspaces(operator, vip)
    koinon("roles create app --allow read --keyspace vip")
    with_keyspaces(operator, replace(vip, keyspace_id=KeyspaceId(8)))  # another one of this name
    assert "id:7 (dropped)" in koinon("roles").stdout
    (grant,) = koinon("roles --json")["roles"][0]["grants"]
    assert (grant["keyspace"], grant["keyspace_id"]) == (None, 7)
    koinon("roles grant app --allow write --keyspace id:7", code=None)
    koinon("roles revoke app --allow read --keyspace vip", code=USAGE)
    koinon("roles revoke app --allow read --keyspace id:7")
    assert operator.access.roles[0].grants == ()


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
    with Admin(operator.address, timeout_ms=60_000) as admin:
        admin.access.put_role(Role(name="orders"))
    operator.silent.add("ChangeAccessRequest")
    changed = "users, roles or tokens may have been changed"
    with (
        Admin(operator.address, timeout_ms=1_500) as admin,
        pytest.raises(ChangeFateError, match=changed),
    ):
        admin.access.drop_role("orders")
    changes = [r for r in operator.requests if isinstance(r, admin_pb2.ChangeAccessRequest)]
    assert [change.WhichOneof("change") for change in changes] == ["put_role", "drop_role"]


def test_nodes_that_have_not_confirmed_a_change_are_named(
    koinon: Run, operator: FakeOperator
) -> None:
    assert koinon("certificates revoke a1f").stderr == ""
    operator.nodes_behind = ["n3"]
    told = koinon("certificates revoke a2f").stderr
    assert "not confirmed by n3: until then it serves nobody" in told
    assert koinon("certificates revoke a3f --json")["nodes_behind"] == ["n3"]
