"""admin users, roles, tokens and certificates, against a coordinator and a node with TLS."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import koinon
from koinon_proto.contract.errors import PermissionDeniedError, UnauthenticatedError
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import Kind
from tests.kit.command_line import koinon_app
from tests.security.servers import Servers, serving


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("access")) as found:
        yield found


@pytest.fixture(autouse=True)
def as_root(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOINON_TLS_BUNDLE", str(servers.identities.file(Kind.USER, "root")))
    monkeypatch.setenv("KOINON_COORDINATORS", servers.coordinator)


def admin(*arguments: str, code: int = 0) -> str:
    ended = CliRunner().invoke(koinon_app(), ["admin", *arguments])
    assert ended.exit_code == code, ended.output
    return ended.output


def listed(group: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(admin(group, "--json"))[group]
    return found


def test_a_user_is_made_comes_in_by_a_token_and_is_blocked(
    servers: Servers, tmp_path: Path
) -> None:
    admin("roles", "create", "app", "--allow", "read,write", "--prefix", "app:")
    admin("roles", "grant", "app", "--deny", "read", "--prefix", "app:secret:")
    assert "app:secret:" in admin("roles")
    admin("users", "create", "app", "--role", "app")
    file = tmp_path / "token"
    assert "koinon_" not in admin("tokens", "create", "app", "--file", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    bundle = str(servers.identities.file(Kind.CLIENT))
    with koinon.connect(servers.coordinator, tls_bundle=bundle, token_file=str(file)) as client:
        assert is_let_in(client)
        with pytest.raises(PermissionDeniedError):
            client.get(b"app:secret:1")
        admin("users", "block", "app")
        assert not is_let_in(client)
        admin("users", "unblock", "app")
    (token,) = listed("tokens")
    admin("tokens", "revoke", str(token["id"]))
    assert listed("tokens") == []
    with pytest.raises(UnauthenticatedError):
        koinon.connect(servers.coordinator, tls_bundle=bundle, token_file=str(file))
    assert "first" in admin("roles", "drop", "app", "--yes", code=2)
    admin("users", "drop", "app", "--yes")
    admin("roles", "drop", "app", "--yes")
    assert listed("users") == listed("roles") == []


def is_let_in(client: koinon.Client) -> bool:
    try:
        client.put(b"app:1", b"x")
    except UnauthenticatedError:
        return False
    return True


def test_roles_of_a_user_and_grants_of_a_role_come_and_go(servers: Servers) -> None:
    for name in ("one", "two"):
        admin("roles", "create", name)
    admin("users", "create", "u")
    admin("users", "grant", "u", "--role", "one", "--role", "two")
    admin("users", "revoke", "u", "--role", "one")
    (user,) = (user for user in listed("users") if user["user"] == "u")
    assert user["roles"] == ["two"]
    admin("roles", "grant", "two", "--allow", "view,read")
    (role,) = (role for role in listed("roles") if role["role"] == "two")
    grants = role["grants"]
    assert [grant["actions"] for grant in grants] == [["read"], ["view"]]  # type: ignore[attr-defined]
    admin("roles", "revoke", "two", "--allow", "view")
    (role,) = (role for role in listed("roles") if role["role"] == "two")
    assert len(role["grants"]) == 1  # type: ignore[arg-type]
    admin("users", "expire-certificates", "u")
    (user,) = (user for user in listed("users") if user["user"] == "u")
    later = servers.identities.file(Kind.USER, "u")
    principal = BundleFile(later).current().principal
    assert 0 < int(str(user["certificates_from_s"])) <= principal.issued_at_s


def test_a_certificate_is_revoked_by_its_serial_number_and_restored(servers: Servers) -> None:
    serial = BundleFile(servers.identities.file(Kind.USER, "u")).current().principal.serial
    admin("certificates", "revoke", f"{serial:x}")
    assert json.loads(admin("certificates", "--json")) == {"revoked": [f"{serial:x}"]}
    admin("certificates", "restore", f"{serial:X}")
    assert json.loads(admin("certificates", "--json")) == {"revoked": []}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("roles", "create", "r", "--allow", "fly"), "'fly' is no action"),
        (("roles", "grant", "none", "--allow", "read"), "there is no role 'none'"),
        (("roles", "grant", "none"), "give --allow or --deny"),
        (("users", "grant", "none", "--role", "x"), "there is no user 'none'"),
        (("users", "create", "root"), "root may do everything"),
        (("users", "create", "a b"), "must be letters"),
        (("tokens", "create", "none"), "there is no user 'none'"),
        (("certificates", "revoke", "zz"), "no number in hexadecimal"),
    ],
)
def test_what_makes_no_sense_is_refused_and_says_why(arguments: tuple[str, ...], said: str) -> None:
    assert said in " ".join(admin(*arguments, code=2).split())


def test_options_name_the_files_by_which_a_command_comes_in(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin("roles", "create", "reader", "--allow", "read,view,backup")
    admin("users", "create", "reader", "--role", "reader")
    token = tmp_path / "token"
    admin("tokens", "create", "reader", "--file", str(token))
    monkeypatch.delenv("KOINON_TLS_BUNDLE")
    nameless = ["--tls-bundle", str(servers.identities.file(Kind.CLIENT))]
    own = [*nameless, "--token-file", str(token)]
    admin("status", code=3)
    admin("status", *nameless, code=3)
    admin("status", *own)
    for arguments in (["get", "k", *own], [*own, "get", "k"]):
        ended = CliRunner().invoke(koinon_app(), arguments)
        assert ended.exit_code == 1, ended.output  # there is no such key
    ended = CliRunner().invoke(koinon_app(), ["backup", "create", str(tmp_path / "backups"), *own])
    assert ended.exit_code == 0, ended.output
    assert "may not" in admin("users", *own, code=3)
    assert "KOINON_TLS_BUNDLE" not in os.environ
    assert "KOINON_TOKEN_FILE" not in os.environ
