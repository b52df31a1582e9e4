"""``koinon ingest`` with a real Spark into a real cluster: in processes of its own, with the Java
that it starts, and, where it is the rows that matter, in this process, whose Spark it uses then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from koinon.client import Client
from koinon.ingest import parts
from koinon.ingest.failures import explained
from koinon.ingest.opened_rows import packed
from koinon.ingest.row_groups import groups_of
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.operate.loads_client import LoadState
from koinon.spark.cluster import opened
from koinon.spark.options import write_options
from koinon_proto.contract.errors import UnknownKeyspaceError
from koinon_proto.contract.table import Table
from tests.cli.test_ingest import USERS, run
from tests.kit.command_line import koinon_app
from tests.kit.hostile import make_hostile, ran_in
from tests.kit.waiting import wait_until

pytest.importorskip("pyspark", reason="the spark extra is not installed")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ingest = Callable[..., tuple[int, dict[str, Any], str]]
WAIT_S = 90.0


@pytest.fixture
def ingest(spark: SparkSession, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Ingest:
    """Runs ``koinon ingest PATH ARGUMENTS --json`` on this process's Spark; returns exit code,
    answer and messages.
    """
    monkeypatch.setattr(type(spark), "stop", lambda session: None)  # it is for other tests too

    def run_here(path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
        command = ["ingest", str(path), *arguments, "--json"]
        environment = {"KOINON_COORDINATORS": cluster.coordinators, "COLUMNS": "200"}
        ended = CliRunner().invoke(koinon_app(), command, env=environment)
        return ended.exit_code, json.loads(ended.stdout), ended.stderr

    return run_here


def stored(client: Client, prefix: bytes) -> dict[bytes, bytes]:
    return {entry.key: entry.value for entry in client.scan(prefix=prefix)}


def parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_rows_become_json_that_any_client_reads(
    cluster: LocalCluster, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the folder from which it is called."""
    make_hostile(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    rows = 5_000
    names = [f"ingest/p/{n}" for n in range(rows)]
    path = parquet(tmp_path / "a.parquet", name=names, number=list(range(rows)))
    command = ("ingest", str(path), "--key", "name", "--json", "--master", "local[2]")
    ended = run(*command, KOINON_COORDINATORS=cluster.coordinators)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["state"], told["rows"], told["rows_bad"]) == ("done", rows, 0)
    assert set(told["seconds"]) == {"start", "stage", "prepare", "merge", "all"}
    assert "WARN" not in ended.stderr
    found = stored(client, b"ingest/p/")
    assert len(found) == rows
    assert json.loads(found[b"ingest/p/7"]) == {"name": "ingest/p/7", "number": 7}
    assert ran_in(tmp_path / "work") == ""


def test_bad_rows_are_kept_apart_and_the_others_loaded(
    ingest: Ingest, client: Client, tmp_path: Path
) -> None:
    path, bad = tmp_path / "b.csv", tmp_path / "bad"
    path.write_text("id,name\ningest/b/007,Bond\n,nobody\ningest/b/8,\ntoo,many,cells\n")
    code, told, messages = ingest(path, "--key", "id", "--value", "name")
    assert code == 2
    told_of = f"a malformed row: {path} line 5: 3 columns instead of 2: too,many,cells"
    assert told_of in " ".join(messages.split())
    assert stored(client, b"ingest/b/") == {}
    arguments = ("--key", "id", "--value", "name", "--bad-records", str(bad))
    code, told, messages = ingest(path, *arguments)
    assert code == 0, messages
    assert stored(client, b"ingest/b/") == {b"ingest/b/007": b"Bond", b"ingest/b/8": b""}
    files = [file for file in bad.rglob("*.json*") if not file.name.startswith(".")]
    kept = "".join(file.read_text() for file in files)
    assert "too,many,cells" in kept
    assert "nobody" in kept
    assert told["rows_bad"] == 2


def test_repeated_key_fails_the_load_unless_an_order_decides(
    ingest: Ingest, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "c.csv"
    path.write_text("id,v,at\ningest/c/1,old,9\ningest/c/1,new,10\ningest/c/2,x,1\n")
    arguments = ("--key", "id", "--value", "v")
    code, told, messages = ingest(path, *arguments)
    assert code == 2
    assert "--order-by" in messages
    assert told["state"] == "aborted"
    assert stored(client, b"ingest/c/") == {}
    code, told, messages = ingest(path, *arguments, "--order-by", "at")
    assert code == 0, messages
    assert stored(client, b"ingest/c/") == {b"ingest/c/1": b"new", b"ingest/c/2": b"x"}


def test_rows_expire_and_delete_by_columns(ingest: Ingest, client: Client, tmp_path: Path) -> None:
    client.put(b"ingest/t/gone", b"old")
    path = tmp_path / "t.csv"
    path.write_text(
        "id,v,lives,gone\ningest/t/gone,,,true\ningest/t/brief,1,3600000,false\ningest/t/ever,2,,\n"
    )
    arguments = ("--key", "id", "--value", "v", "--ttl-column", "lives", "--delete-column")
    code, _, messages = ingest(path, *arguments, "lives")
    assert code == 2
    assert "--delete-column: column 'lives' has type long: cast it to boolean" in messages
    code, _, messages = ingest(path, *arguments, "gone")
    assert code == 0, messages
    assert stored(client, b"ingest/t/") == {b"ingest/t/brief": b"1", b"ingest/t/ever": b"2"}
    entries = [client.get_entry(b"ingest/t/" + name) for name in (b"brief", b"ever")]
    assert [entry is not None and bool(entry.expires_at_ms) for entry in entries] == [True, False]


def test_overwrite_replaces_what_the_prefix_holds(
    ingest: Ingest, client: Client, tmp_path: Path
) -> None:
    client.put(b"ingest/d/gone", b"old")
    client.put(b"ingest/e/stays", b"old")
    path = tmp_path / "d.jsonl"
    path.write_text('{"id":"ingest/d/1","n":1}\n{"id":"ingest/d/2","n":2}\n')
    arguments = ("--key", "id", "--mode", "overwrite", "--prefix", "ingest/d/")
    code, _, messages = ingest(path, *arguments)
    assert code == 0, messages
    assert set(stored(client, b"ingest/d/")) == {b"ingest/d/1", b"ingest/d/2"}
    assert client.get(b"ingest/e/stays") == b"old"


def test_dry_run_counts_what_would_be_loaded_and_writes_nothing(
    ingest: Ingest, client: Client, tmp_path: Path
) -> None:
    """Of rows of which one has no key, one is malformed, and two have the same key."""
    users = tmp_path / "users.csv"
    users.write_text(USERS)
    code, told, messages = ingest(users, "--key", "id", "--value", "name", "--dry-run")
    assert code == 0, messages
    assert told["schema"] == [
        {"column": "id", "type": "string"},
        {"column": "name", "type": "string"},
    ]
    assert (told["rows"], told["rows_bad"], told["rows_repeating_a_key"]) == (5, 2, 1)
    assert told["bytes"] == len("007Bond" + "8Bill" + "007James")
    assert told["repeated_keys"] == [{"key": "007", "rows": 2, "bytes": 15}]
    assert sum(told["rows_per_partition"]) == 3
    assert told["partitions"]["most"] == 2
    assert sum(node["rows"] for node in told["nodes"]) == 3
    copies = sum(node["bytes"] for node in told["nodes"])
    assert copies == told["bytes"] * 3
    assert client.get(b"007") is None


@pytest.mark.long  # ingest/test_job tries it without Spark
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_ctrl_c_or_a_closed_terminal_leaves_nothing_behind(
    cluster: LocalCluster, client: Client, tmp_path: Path, number: signal.Signals
) -> None:
    """The rows are held back by the rate, so that the load is open for long."""
    rows = 20_000
    path = parquet(
        tmp_path / "f.parquet",
        id=[f"ingest/f/{n}" for n in range(rows)],
        value=[os.urandom(100).hex() for _ in range(rows)],
    )
    command = [sys.executable, "-m", "koinon.cli", "ingest", str(path), "--key", "id"]
    options = ["--value", "value", "--max-rate", "100kB", "--json", "--master", "local[2]"]
    with Admin(cluster.coordinators) as admin:
        process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, "KOINON_COORDINATORS": cluster.coordinators},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            wait_for_load(admin, str(path), LoadState.OPEN)
            os.killpg(process.pid, number)
            said, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        assert process.returncode == 130
        told = json.loads(said)
        assert (told["state"], told["interrupted"]) == ("aborted", True)
        wait_for_load(admin, str(path), LoadState.ABORTED)
    assert stored(client, b"ingest/f/") == {}


def wait_for_load(admin: Admin, what: str, state: LoadState) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        found = [load.state for load in admin.loads() if what in load.description]
        if state in found:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_ingest_goes_into_the_keyspace_and_its_dry_run_is_by_its_router(
    ingest: Ingest, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "k.csv"
    path.write_text("id,v\n" + "".join(f"ingest/k/{n},{n}\n" for n in range(40)))
    whole = parquet(tmp_path / "k.parquet", id=["ingest/k/x"], v=["new"])
    arguments = ("--key", "id", "--value", "v", "--keyspace", "filed")
    code, told, messages = ingest(path, *arguments)
    assert code == 2
    assert "keyspace 'filed' has been dropped, or was never created" in messages
    with Admin(cluster.coordinators, timeout_ms=30_000) as admin:
        made = admin.keyspaces.create(
            "filed", partition_count=6, partitioner="md5(until:2f)", max_value_bytes=8
        ).keyspace
        try:
            filed = client.keyspace("filed")
            code, told, messages = ingest(path, *arguments, "--dry-run")
            assert code == 0, messages
            spread = told["partitions"]
            assert (spread["count"], spread["first"]) == (6, made.base)
            assert (spread["most"], spread["least"]) == (40, 0)  # all begin alike: until a slash
            assert spread["heaviest"] in made.partition_ids
            assert sum(node["rows"] for node in told["nodes"]) == 40
            assert sum(node["bytes"] for node in told["nodes"]) == told["bytes"] * 3
            assert list(filed.scan()) == []
            code, told, messages = ingest(path, *arguments)
            assert code == 0, messages
            found = {entry.key: entry.value for entry in filed.scan()}
            assert found == {b"ingest/k/%d" % n: b"%d" % n for n in range(40)}
            code, _, messages = ingest(whole, *arguments, "--mode", "overwrite")
            assert code == 0, messages
            assert [(e.key, e.value) for e in filed.scan()] == [(b"ingest/k/x", b"new")]
            assert stored(client, b"ingest/k/") == {}
            assert [load.keyspace for load in admin.loads()][-2:] == ["filed", "filed"]
            path.write_text("id,v\ningest/k/1,more than 8 bytes\n")
            code, told, messages = ingest(path, *arguments, "--dry-run")
            assert told["rows_bad"] == 1
        finally:
            admin.keyspaces.drop("filed")
            wait_until(lambda: not table_of(admin).keyspaces.dropping)


def test_keyspace_replaced_during_an_ingest_fails_it_by_its_name(
    spark: SparkSession, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    """The tasks' rows come after the keyspace has been replaced."""
    whole = parquet(tmp_path / "r.parquet", key=["ingest/r/1"], value=["new"])
    with Admin(cluster.coordinators, timeout_ms=30_000) as admin:
        admin.keyspaces.create("filed", partition_count=4)
        try:
            given = {"coordinators": cluster.coordinators, "keyspace": "filed"}
            options = opened(write_options(given, overwrite=True))
            admin.keyspaces.drop("filed")
            admin.keyspaces.create("filed", partition_count=4)
            client.keyspace("filed").put(b"ingest/r/0", b"kept")
            fields = [("key", "string"), ("value", "string")]
            found = groups_of([whole])
            assert found is not None
            part = packed(found.reader, found.sizes, 2)
            with pytest.raises(Exception, match="UnknownKeyspaceError") as caught:
                parts.save(spark.sparkContext, part, fields, options, overwrite=True)
            told = explained(caught.value)
            assert isinstance(told, UnknownKeyspaceError)
            assert told.keyspace == "filed"
            assert [e.value for e in client.keyspace("filed").scan()] == [b"kept"]
        finally:
            admin.keyspaces.drop("filed")
            wait_until(lambda: not table_of(admin).keyspaces.dropping)


def table_of(admin: Admin) -> Table:
    table = admin.status().table
    assert table is not None
    return table
