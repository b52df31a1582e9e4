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
from koinon.cli.console.command import USAGE
from koinon.operate.admin import Admin
from koinon.operate.unknown_outcomes import ChangeFateError
from koinon_proto.contract.access import Access, Action, Effect, Grant, Role, parse_token
from koinon_proto.v1 import admin_pb2
from tests.cli.fake_operator import FakeOperator
from tests.kit.command_line import koinon_app

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
        result = CliRunner().invoke(koinon_app(), arguments)
        is_as_said = result.exit_code == code or (code is None and result.exit_code)
        assert is_as_said, (line, result.output, result.stderr)
        return json.loads(result.stdout) if "--json" in arguments else result

    return run


def test_certificates_of_a_user_that_were_issued_before_now_expire(
    koinon: Run, operator: FakeOperator
) -> None:
    koinon("users create app")
    koinon("users expire-certificates app")
    back_s = CLOCK_SKEW.total_seconds()  # from when a certificate holds that is issued now
    assert 0 <= time.time() - back_s - operator.access.users[0].certificates_from_s < 60


def test_token_is_told_once_or_written_for_its_owner_alone(
    koinon: Run, operator: FakeOperator, tmp_path: Path
) -> None:
    koinon("users create app")
    text = koinon("tokens create app").stdout.strip()
    assert getattr(Access(operator.access).token_of(text, time.time()), "user", None) == "app"
    answer = koinon("tokens create app --expires 90d --description batch --json")
    token_id, _ = parse_token(answer["token"]) or ("", "")
    assert answer["id"] == token_id
    assert 90 * 86_400 - 60 < answer["expires_s"] - time.time() <= 90 * 86_400
    file = tmp_path / "app.token"
    said = koinon("tokens create app", "--file", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    written = Access(operator.access).token_of(file.read_text().strip(), time.time())
    assert getattr(written, "user", None) == "app"
    assert file.read_text().strip() not in said.output
    before = file.read_text()
    koinon("tokens create app", "--file", str(file), code=USAGE)  # it is there
    assert file.read_text() == before
    listed = koinon("tokens").stdout
    assert listed.count("app") == 3
    assert "never" in listed
    assert "koinon_" not in listed + json.dumps(koinon("tokens --json"))
    koinon(f"tokens revoke {text.split('_')[1]}")
    assert Access(operator.access).token_of(text, time.time()) is None


def test_token_that_is_refused_leaves_no_file(koinon: Run, tmp_path: Path) -> None:
    file = tmp_path / "app.token"
    koinon("tokens create app", "--file", str(file), code=USAGE)
    assert not file.exists()


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
