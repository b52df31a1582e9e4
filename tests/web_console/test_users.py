"""Tests of logging in as a user of a real cluster with TLS: by a token of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from koinon.certs.authority import Authority, Identity
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.web_console.web_server import ConsoleServer, ConsoleSettings
from koinon_proto.contract.access import Action, Effect, Grant, Role, User, make_token
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import dialing
from tests.kit.clusters import running_cluster
from tests.web_console.conftest import events


@pytest.fixture(scope="module")
def secured() -> Iterator[LocalCluster]:
    with running_cluster(coordinators=1, nodes=1, tls=True) as cluster:
        yield cluster


def connect_as(monkeypatch: pytest.MonkeyPatch, bundle: Path | str, token: Path | None) -> None:
    monkeypatch.setenv("KOINON_TLS_BUNDLE", str(bundle))
    if token is not None:
        monkeypatch.setenv("KOINON_TOKEN_FILE", str(token))


def token_of(admin: Admin, user: str, *actions: Action) -> tuple[str, str]:
    """Make a user who may do this; return the id of a token of its, and the token."""
    admin.access.put_role(
        Role(name=user, grants=(Grant(effect=Effect.ALLOW, actions=actions, prefix=b""),))
    )
    admin.access.put_user(User(name=user, roles=(user,)))
    token, text = make_token(user, created_s=1)
    admin.access.add_token(token)
    return token.id, text


def login(url: str, code: str) -> int:
    with httpx.Client(base_url=url, headers={"origin": url}, timeout=60) as client:
        status = client.post("/api/login", json={"code": code}).status_code
        if status == 200:
            with events(client) as stream:
                next(stream)
        return status


def test_users_who_may_look_log_in_by_their_tokens(
    secured: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "client.pem"
    now = datetime.now(UTC)
    authority = Authority.open(Path(secured.tls_bundle).parent)
    authority.issue(Identity(kind=Kind.CLIENT), bundle, now=now)
    root = dialing(secured.tls_bundle)
    with Admin(secured.coordinators, timeout_ms=20_000, dialing=root) as admin:
        _, own = token_of(admin, "console", Action.VIEW)
        ops_id, ops = token_of(admin, "ops", Action.VIEW)
        _, app = token_of(admin, "app", Action.READ)
        file = tmp_path / "console.token"
        file.write_text(own)
        connect_as(monkeypatch, bundle, file)
        settings = ConsoleSettings(listen="127.0.0.1:0", code="the-code-of-this-console")
        with ConsoleServer(secured.coordinators, settings, timeout_ms=5_000) as server:
            server.start()
            url = server.url.partition("/#")[0]
            assert login(url, settings.code) == 200
            assert login(url, ops) == 200
            assert login(url, app) == 401
            assert login(url, ops[:-1] + ("a" if ops[-1] != "a" else "b")) == 401
            admin.access.drop_token(ops_id)
            assert login(url, ops) == 401


def test_console_with_the_certificate_of_a_user_lets_in_by_its_code_only(
    secured: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server asks no token of a caller whose certificate names a user, so none says anything."""
    connect_as(monkeypatch, secured.tls_bundle, None)
    settings = ConsoleSettings(listen="127.0.0.1:0")
    with ConsoleServer(secured.coordinators, settings, timeout_ms=5_000) as server:
        server.start()
        url, _, code = server.url.partition("/#")
        assert login(url, "anything_at_all") == 401
        assert login(url, code) == 200
