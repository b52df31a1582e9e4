"""The command line as a shell sees it: output, exit codes, messages."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.local import LocalCluster
from koinon.operate.judge.health import problems
from tests.conftest import ClusterFactory
from tests.kit.command_line import koinon_app
from tests.kit.forked import Forked

Run = Callable[..., "subprocess.CompletedProcess[Any]"]
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
MODULE, _, FUNCTION = PROJECT["scripts"]["koinon"].partition(":")
"""The entry point of the command."""


@pytest.fixture
def koinon(cluster: LocalCluster, tmp_path: Path, forked: Forked) -> Run:
    """Runs ``koinon ARGS`` against the shared cluster."""

    def run(
        *arguments: str, text: bool = True, typed: str = "", environment: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[Any]:
        ended: subprocess.CompletedProcess[Any] = forked.run(
            arguments,
            environment={
                **os.environ,
                "KOINON_COORDINATORS": cluster.coordinators,
                "XDG_DATA_HOME": str(tmp_path),
                **environment,
            },
            input_bytes=typed.encode(),
        )
        if text:
            ended.stdout, ended.stderr = ended.stdout.decode(), ended.stderr.decode()
        return ended

    return run


def test_put_get_delete_round_trip_has_exit_codes(koinon: Run) -> None:
    assert koinon("put", "cli/a", "héllo").returncode == 0
    found = koinon("get", "cli/a")
    assert (found.returncode, found.stdout) == (0, "héllo\n")
    assert koinon("delete", "cli/a").returncode == 0
    gone = koinon("get", "cli/a")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr == "koinon: not found: cli/a\n"
    assert koinon("delete", "cli/a").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "done"),
    [
        (("put", "cli/full", "v"), "the put was acknowledged (version "),
        (("delete", "cli/none"), "there was no record to delete"),
        (("batch", "-"), "the batch was acknowledged (version "),
    ],
)
def test_write_whose_result_cannot_be_printed_says_that_it_was_done(
    cluster: LocalCluster, arguments: tuple[str, ...], done: str
) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "koinon.cli", *arguments, "--json"],
            env=os.environ | {"KOINON_COORDINATORS": cluster.coordinators},
            input='{"put": "cli/full", "value": "v"}',
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.stderr.startswith(f"koinon: {done}")
    assert ended.stderr.endswith("result could not be printed: No space left on device\n")
    assert ended.returncode == 4


def test_limit_of_a_keyspace_is_told_in_the_unit_that_was_given(koinon: Run) -> None:
    created = koinon("admin", "keyspaces", "create", "cli-days", "--max-ttl", "30d")
    assert created.returncode == 0, created.stderr
    ended = koinon("put", "--keyspace", "cli-days", "k", "v", "--ttl", "90d")
    assert ended.returncode == 2
    assert ended.stderr.startswith("koinon: --ttl: longer than records of keyspace 'cli-days' may")
    assert "(limit 30d, got 90d)" in ended.stderr
    altered = koinon("admin", "keyspaces", "alter", "cli-days", "--default-ttl", "60d")
    assert "--default-ttl: must be from 0 to 30d (limit 30d, got 60d)" in altered.stderr
    too_large = koinon("admin", "keyspaces", "alter", "cli-days", "--max-value", "1TB")
    assert too_large.returncode == 2
    assert "--max-value: 1TB is more than a value may ever have" in too_large.stderr
    assert koinon("admin", "keyspaces", "drop", "cli-days", "--yes").returncode == 0


def test_value_without_an_end_is_read_to_the_limit(koinon: Run, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(3_000_000))
    for file, more, size in (
        ("/dev/zero", "; no more was read", (1 << 20) + 1),
        (str(tmp_path / "big"), "", 3_000_000),
    ):
        ended = koinon("put", "cli/zero", "--value-file", file)
        assert ended.returncode == 2
        limits = f"(limit {1 << 20}, got {size})"
        assert f"longer than a value may be, in bytes{more} {limits}" in ended.stderr
    assert "FILE: longer than the text of a batch" in koinon("batch", "/dev/zero").stderr


def test_put_binary_from_file_comes_back_exactly(koinon: Run, tmp_path: Path) -> None:
    content = bytes(range(256))
    (tmp_path / "blob").write_bytes(content)
    assert koinon("put", "cli/blob", "--value-file", str(tmp_path / "blob")).returncode == 0
    assert koinon("get", "cli/blob", "--raw", text=False).stdout == content
    shown = koinon("get", "cli/blob")
    assert "\x1b" not in shown.stdout
    assert "--raw" in shown.stderr
    answer = json.loads(koinon("--json", "get", "cli/blob").stdout)
    assert set(answer["value"]) == {"base64"}


def test_put_from_standard_input_and_hexadecimal_key(koinon: Run) -> None:
    assert koinon("put", "--hex", "ff00", "--value-file", "-", typed="x").returncode == 0
    answer = json.loads(koinon("get", "--hex", "ff00", "--json").stdout)
    assert (answer["key"], answer["value"]) == ({"base64": "/wA="}, "x")


def test_put_condition_and_ttl(koinon: Run) -> None:
    first = json.loads(koinon("put", "cli/c", "1", "--if-version", "0", "--json").stdout)
    refused = koinon("put", "cli/c", "2", "--if-version", "0")
    assert refused.returncode == 1
    assert str(first["version"]) in refused.stderr
    assert koinon("put", "cli/c", "2", "--if-version", str(first["version"])).returncode == 0
    assert koinon("put", "cli/t", "1", "--ttl", "1h").returncode == 0
    assert json.loads(koinon("get", "cli/t", "--json").stdout)["expires_at_ms"] > 0


def test_scan_lines_json_limit_and_keys_only(koinon: Run) -> None:
    for number in range(5):
        koinon("put", f"cli/scan/{number}", f"line\n{number}")
    lines = koinon("scan", "--prefix", "cli/scan/").stdout.splitlines()
    assert sorted(lines)[0] == "cli/scan/0\tline\\n0"
    assert len(lines) == 5
    limited = koinon("scan", "--prefix", "cli/scan/", "--limit", "2", "--json").stdout.splitlines()
    assert [set(json.loads(line)) for line in limited] == [
        {"key", "value", "version", "expires_at_ms"}
    ] * 2
    start = ("scan", "--prefix", "cli/scan/", "--start", "cli/scan/3", "--keys-only")
    assert sorted(koinon(*start).stdout.split()) == ["cli/scan/3", "cli/scan/4"]
    assert len(koinon(*start, "--reverse", "--limit", "3").stdout.split()) == 3
    keys = koinon("scan", "--prefix", "cli/scan/", "--keys-only").stdout.split()
    assert sorted(keys) == [f"cli/scan/{number}" for number in range(5)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("put", "k"),
        ("put", "k", "v", "--ttl", "5"),
        ("put", "--hex", "xyz", "00"),
        ("put", "", "v"),
        ("put", "k" * 501, "v"),
        ("scan", "--limit", "0"),
        ("scan", "--limit", "99999999999999999999"),
        ("put", "k", "v", "--if-version", "99999999999999999999"),
        ("put", "k", "v", "--ttl", "9" * 400 + "d"),
        ("nonsense",),
        ("load", "missing.csv", "--key", "id"),
        ("--timeout", "soon", "get", "k"),
        ("up", "--coordinators", "2"),
        # A script's variable without a value: a default would be replaced, or backed up, instead.
        ("backup", "create", ""),
        ("backup", "prune", "", "--keep-last", "1", "--yes"),
        ("backup", "create", "missing", "--keyspace", ""),
        ("backup", "show", "missing", ""),
        ("restore", ""),
        ("restore", "missing", "--as", ""),
        ("restore", "missing", "--keyspace", ""),
    ],
)
def test_wrong_usage_ends_with_2_and_no_traceback(
    cluster: LocalCluster, arguments: tuple[str]
) -> None:
    """In this process; the tests below do some of it in processes of their own."""
    environment = {"KOINON_COORDINATORS": cluster.coordinators}
    ended = CliRunner().invoke(koinon_app(), arguments, env=environment)
    assert ended.exit_code == 2, ended.output
    assert ended.stderr
    assert "Traceback" not in ended.stderr


def test_state_file_that_holds_no_positions_is_named() -> None:
    ended = CliRunner().invoke(koinon_app(), ["watch", "--state", __file__])
    assert ended.exit_code == 2
    assert "--state" in ended.stderr
    assert "--since" not in ended.stderr


def test_unreachable_cluster_ends_with_3_and_advice(koinon: Run) -> None:
    nowhere = {"KOINON_COORDINATORS": "127.0.0.1:9"}
    for arguments in (("get", "k"), ("admin", "status")):
        ended = koinon(*arguments, "--timeout", "500ms", environment=nowhere)
        assert ended.returncode == 3, ended.stderr
        assert "koinon up" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert ("'koinon admin status'" in ended.stderr) == (arguments[0] == "get")
    shown = koinon("get", "k", "--timeout", "500ms", "--debug", environment=nowhere)
    assert "Traceback" in shown.stderr


def test_admin_status_says_that_all_is_well(koinon: Run, cluster: LocalCluster) -> None:
    cluster.wait_for(lambda s: s.ready and not problems(s), timeout_s=90, what="all is well")
    shown = koinon("admin", "status").stdout
    assert shown.startswith("All is well.")
    assert all(name in shown for name in cluster.names)
    answer = json.loads(koinon("admin", "status", "--json").stdout)
    assert answer["ok"]
    assert answer["partitions"] == {
        "online": 1024,
        "assigned": 0,
        "offline": 0,
        "under_replicated": 0,
        "moving": 0,
    }
    assert [node["id"] for node in answer["nodes"]] == cluster.node_names


def test_admin_lists_for_programs_and_people(koinon: Run, cluster: LocalCluster) -> None:
    nodes = json.loads(koinon("admin", "nodes", "--json").stdout)
    assert sum(node["primaries"] for node in nodes) == 1024
    rows = koinon("admin", "partitions", "--node", "n1", "--json").stdout.splitlines()
    assert rows
    assert all("n1" in json.loads(row)["replicas"] for row in rows)
    assert "none" in koinon("admin", "partitions", "--offline").stdout
    assert koinon("admin", "partitions", "--node", "n99").returncode == 1
    members = json.loads(koinon("admin", "coordinators", "--json").stdout)
    assert sum(member["leader"] for member in members) == 1
    assert "leader" in koinon("admin", "coordinators").stdout


def test_admin_coordinators_transfer_moves_the_leadership(
    koinon: Run, cluster: LocalCluster
) -> None:
    old = cluster.leader()
    other = next(name for name in cluster.coordinator_names if name != old)
    ended = koinon("admin", "coordinators", "transfer", other)
    assert ended.returncode == 0, ended.stderr
    cluster.wait_for(
        lambda s: s.is_leader and s.member_id == other, timeout_s=60, what=f"{other} leads"
    )
    seen = json.loads(koinon("admin", "status", "--json").stdout)["elections"]
    assert seen["leader_changes"] >= 1
    assert seen["terms"] >= 1
    refused = koinon("admin", "coordinators", "remove", "c9")
    assert refused.returncode == 2, refused.stderr
    assert "c9 is not a member" in refused.stderr


def test_load_counts_bad_rows_and_fails_unless_told_to_skip(koinon: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,v\n" + "".join(f"load/{n},value {n}\n" for n in range(2000)) + ",x\n")
    ended = koinon("load", str(path), "--key", "id", "--value", "v")
    assert ended.returncode == 2
    assert "2,000 rows written" in ended.stdout
    assert "rows.csv line 2002: the key is empty" in ended.stdout
    assert koinon("get", "load/1999").stdout == "value 1999\n"
    twice = koinon("load", str(path), str(path), "--key", "id", "--skip-bad", "--json")
    assert twice.returncode == 0
    answer = json.loads(twice.stdout)
    assert (answer["rows_applied"], answer["keys_repeated"]) == (4000, 2000)
    for content, why in (("id,v\n,a\n,b\n", "all 2 are bad"), ("id,v\n", "the files have none")):
        path.write_text(content)
        none = koinon("load", str(path), "--key", "id", "--skip-bad")
        assert none.returncode == 2
        assert f"no row was written: {why}" in none.stderr


def test_help_and_version_need_no_cluster(koinon: Run) -> None:
    assert "koinon up" in koinon("--help").stdout
    assert "Examples" in koinon("put", "--help").stdout
    assert koinon("--version").stdout.startswith("koinon ")
    for server in ("coordinator", "node"):
        assert "--listen" in koinon(server, "--help").stdout


def test_import_koinon_brings_in_no_command_line_packages() -> None:
    code = (
        "import sys, koinon;"
        "print([m for m in ('typer', 'rich', 'pyarrow', 'lmdb') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    assert answer.stdout.strip() == "[]"


def test_koinon_without_its_extra_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'typer' else find(name, *a);"
        "from koinon_command import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=180
    )
    assert answer.returncode == 1
    assert "pip install 'koinon[cli]'" in answer.stderr


@pytest.mark.parametrize("imported", ["koinon", "koinon.cli.app", "koinon.cli.data.key_value"])
def test_interrupt_while_modules_are_imported_ends_without_a_traceback(imported: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {imported!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv = ['koinon', 'get', 'key']\n"
        f"from {MODULE} import {FUNCTION}; {FUNCTION}()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=180
    )
    assert answer.returncode == -signal.SIGINT
    assert (answer.stdout, answer.stderr) == ("", "")


def test_entry_point_imports_nothing_before_it_decides_what_an_interrupt_does() -> None:
    code = (
        "import signal, sys; before = set(sys.modules)\n"
        f"import {MODULE}; print(*sorted(set(sys.modules) - before))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    assert answer.stdout.split() == [MODULE]


def test_bench_measures_each_step_and_leaves_no_keys(koinon: Run) -> None:
    for seconds in ("0.1", "1", "5"):  # as much as a busy machine needs for a row of each
        ended = koinon("bench", "--seconds", seconds, "--json")
        assert ended.returncode == 0, ended.stderr
        measures = json.loads(ended.stdout)["measures"]
        if all(measure["rows_per_s"] > 0 for measure in measures.values()):
            break
    else:
        raise AssertionError(measures)
    assert koinon("scan", "--prefix", "bench:", "--keys-only").stdout == ""


def test_admin_adds_and_removes_a_coordinator(koinon: Run, make_cluster: ClusterFactory) -> None:
    with make_cluster(nodes=1, coordinators=1) as private:
        at = ("--coordinators", private.coordinators, "--timeout", "20s")
        name = private.add_coordinator()
        added = koinon("admin", "coordinators", "add", name, private.address(name), *at)
        assert added.returncode == 0, added.stderr
        members = json.loads(koinon("admin", "coordinators", "--json", *at).stdout)
        assert {member["id"]: member["voter"] for member in members} == {"c1": True, name: True}
        again = koinon("admin", "coordinators", "add", name, private.address(name), *at)
        assert again.returncode == 0, again.stderr
        nothing = koinon("admin", "coordinators", "add", "c9", "127.0.0.1:9", *at[:2])
        assert nothing.returncode == 2, nothing.stderr
        assert "nothing listens at 127.0.0.1:9" in nothing.stderr
        members = json.loads(koinon("admin", "coordinators", "--json", *at).stdout)
        assert [member["id"] for member in members] == ["c1", name]
        elsewhere = koinon("admin", "coordinators", "add", name, "127.0.0.1:1", *at)
        assert elsewhere.returncode == 2, elsewhere.stderr
        assert "remove it first" in elsewhere.stderr
        removed = koinon("admin", "coordinators", "remove", name, *at)
        assert removed.returncode == 0, removed.stderr
        members = json.loads(koinon("admin", "coordinators", "--json", *at).stdout)
        assert [member["id"] for member in members] == ["c1"]


def test_load_of_standard_input_needs_a_format(koinon: Run) -> None:
    untold = koinon("load", "-", "--key", "id", typed="id,v\nstdin/1,a\n")
    assert untold.returncode == 2
    assert "--format" in untold.stderr
    ended = koinon("load", "-", "--key", "id", "--format", "csv", typed="id,v\nstdin/1,a\n")
    assert ended.returncode == 0, ended.stderr
    assert koinon("get", "stdin/1").stdout == '{"id":"stdin/1","v":"a"}\n'


def test_load_of_truncated_gzip_names_file_and_rows_written(koinon: Run, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    lines = "".join(f'{{"id":"cut/{i}"}}\n' for i in range(15_000))
    path.write_bytes(gzip.compress(lines.encode())[:-20])
    ended = koinon("load", str(path), "--key", "id", "--skip-bad")
    assert ended.returncode == 2
    assert "cut.jsonl.gz: truncated or damaged" in ended.stderr
    assert "10,000 rows written" in ended.stdout
    answer = json.loads(koinon("load", str(path), "--key", "id", "--json").stdout)
    assert answer["rows_applied"] == 10_000
    assert "cut.jsonl.gz" in answer["error"]


def test_load_dry_run_reads_and_checks_all_rows_and_writes_none(
    koinon: Run, tmp_path: Path
) -> None:
    path = tmp_path / "dry.csv"
    path.write_text("id,v\ndry/1,a\n,b\ndry/2,c\ndry/2,d\n")
    ended = koinon("load", str(path), "--key", "id", "--value", "v", "--dry-run")
    assert ended.returncode == 2
    assert "3 rows would be written; nothing was written." in ended.stdout
    assert "1 row repeated a key" in ended.stdout
    assert "1 bad row, not written" in ended.stdout
    assert "durable" not in ended.stdout
    lenient = ("load", str(path), "--key", "id", "--dry-run", "--skip-bad", "--json")
    answer = json.loads(koinon(*lenient).stdout)
    assert (answer["dry_run"], answer["rows_read"], answer["rows_applied"]) == (True, 4, 0)
    assert koinon("get", "dry/1").returncode == 1


def test_load_oversized_value_is_a_bad_row(koinon: Run, tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    path.write_text(f"id,v\nbig/1,{'x' * (2 << 20)}\nbig/2,ok\n")
    ended = koinon("load", str(path), "--key", "id", "--value", "v", "--skip-bad")
    assert ended.returncode == 0
    assert "big.csv line 2: the value has" in ended.stdout
    assert "1 row written" in ended.stdout
    assert koinon("get", "big/2").stdout == "ok\n"


def test_status_at_80_columns_folds_nothing(koinon: Run) -> None:
    for command in (("admin", "nodes"), ("admin", "status")):
        lines = koinon(*command, environment={"COLUMNS": "80"}).stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert sum("127.0.0.1:" in line for line in lines) >= 3
        assert all("HEARD" not in line for line in lines)


def test_failure_as_json_is_one_line(koinon: Run) -> None:
    nowhere = "127.0.0.1:9"
    ended = koinon("get", "k", "--json", "--coordinators", nowhere, "--timeout", "300ms")
    assert ended.returncode == 3
    assert set(json.loads(ended.stdout)) == {"error"}
    assert nowhere in ended.stderr


def test_hexadecimal_argument_with_odd_digits_is_named(koinon: Run) -> None:
    ended = koinon("get", "--hex", "1")
    assert ended.returncode == 2
    assert "KEY '1': an odd number" in " ".join(ended.stderr.replace("│", " ").split())


@pytest.mark.parametrize("server", ["node", "coordinator"])
def test_server_help_is_called_by_its_command(koinon: Run, server: str) -> None:
    assert f"usage: koinon {server} " in koinon(server, "-h").stdout


def test_options_before_a_servers_name_are_refused(koinon: Run) -> None:
    ended = koinon("--debug", "node", "--id", "x")
    assert ended.returncode == 2
    assert "'node' takes its own options only" in ended.stderr
