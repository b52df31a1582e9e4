"""``koinon ingest`` with a real Spark into a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from koinon.client import Client
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.operate.bulk_loads import LoadState
from tests.cli.test_ingest import run

pytest.importorskip("pyspark", reason="the spark extra is not installed")

WAIT_S = 90.0


def ingest(cluster: LocalCluster, path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run ``koinon ingest PATH ARGUMENTS --json``; return exit code, answer and messages."""
    command = ("ingest", str(path), *arguments, "--json", "--master", "local[2]")
    ended = run(*command, KOINON_COORDINATORS=cluster.coordinators)
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def stored(client: Client, prefix: bytes) -> dict[bytes, bytes]:
    return {entry.key: entry.value for entry in client.scan(prefix=prefix)}


def parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_rows_become_json_that_any_client_reads(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    rows = 5_000
    names = [f"ingest/p/{n}" for n in range(rows)]
    path = parquet(tmp_path / "a.parquet", name=names, number=list(range(rows)))
    code, told, messages = ingest(cluster, path, "--key", "name")
    assert code == 0, messages
    assert (told["state"], told["rows"], told["rows_bad"]) == ("done", rows, 0)
    assert set(told["seconds"]) == {"start", "stage", "prepare", "merge", "all"}
    assert "WARN" not in messages
    found = stored(client, b"ingest/p/")
    assert len(found) == rows
    assert json.loads(found[b"ingest/p/7"]) == {"name": "ingest/p/7", "number": 7}


@pytest.mark.long  # tests/ingest tries what is kept apart without the command
def test_bad_rows_are_kept_apart_and_the_others_loaded(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    path, bad = tmp_path / "b.csv", tmp_path / "bad"
    path.write_text("id,name\ningest/b/007,Bond\n,nobody\ningest/b/8,\ntoo,many,cells\n")
    code, told, messages = ingest(cluster, path, "--key", "id", "--value", "name")
    assert code == 2
    assert "malformed: too,many,cells" in messages
    assert stored(client, b"ingest/b/") == {}
    arguments = ("--key", "id", "--value", "name", "--bad-records", str(bad))
    code, told, messages = ingest(cluster, path, *arguments)
    assert code == 0, messages
    assert stored(client, b"ingest/b/") == {b"ingest/b/007": b"Bond", b"ingest/b/8": b""}
    files = [file for file in bad.rglob("*.json*") if not file.name.startswith(".")]
    kept = "".join(file.read_text() for file in files)
    assert "too,many,cells" in kept
    assert "nobody" in kept
    assert told["rows_bad"] == 2


@pytest.mark.long  # tests/spark/test_cluster.py tries it without the command
def test_repeated_key_fails_the_load_unless_an_order_decides(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "c.csv"
    path.write_text("id,v,at\ningest/c/1,old,9\ningest/c/1,new,10\ningest/c/2,x,1\n")
    arguments = ("--key", "id", "--value", "v")
    code, told, messages = ingest(cluster, path, *arguments)
    assert code == 2
    assert "--order-by" in messages
    assert told["state"] == "aborted"
    assert stored(client, b"ingest/c/") == {}
    code, told, messages = ingest(cluster, path, *arguments, "--order-by", "at")
    assert code == 0, messages
    assert stored(client, b"ingest/c/") == {b"ingest/c/1": b"new", b"ingest/c/2": b"x"}


@pytest.mark.long  # likewise
def test_overwrite_replaces_what_the_prefix_holds(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    client.put(b"ingest/d/gone", b"old")
    client.put(b"ingest/e/stays", b"old")
    path = tmp_path / "d.jsonl"
    path.write_text('{"id":"ingest/d/1","n":1}\n{"id":"ingest/d/2","n":2}\n')
    arguments = ("--key", "id", "--mode", "overwrite", "--prefix", "ingest/d/")
    code, _, messages = ingest(cluster, path, *arguments)
    assert code == 0, messages
    assert set(stored(client, b"ingest/d/")) == {b"ingest/d/1", b"ingest/d/2"}
    assert client.get(b"ingest/e/stays") == b"old"


def test_ctrl_c_leaves_nothing_behind(
    cluster: LocalCluster, client: Client, tmp_path: Path
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
            os.killpg(process.pid, signal.SIGINT)
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
