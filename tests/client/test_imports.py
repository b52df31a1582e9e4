"""A process imports what it uses: what is expensive, and is not needed, stays out."""

from __future__ import annotations

import subprocess
import sys

from tests.client.kit.fake_cluster import FakeCluster

HEAVY = {
    "asyncio",
    "google.protobuf",
    "grpc",
    "lmdb",
    "numpy",
    "pyarrow",
    "pydantic",
    "rich",
    "typer",
}


def imported(program: str) -> set[str]:
    """Return which of the heavy modules the program has imported at its end."""
    program += f"\nimport sys; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return set(ended.stdout.splitlines()[-1].split())


def test_import_koinon_imports_nothing_heavy() -> None:
    assert imported("import koinon") == set()


def test_names_of_koinon_are_all_there_when_asked_for() -> None:
    program = "import koinon\nfor name in koinon.__all__: getattr(koinon, name)"
    assert imported(program) >= {"asyncio", "grpc"}


def test_client_that_uses_single_keys_imports_no_column_library(cluster: FakeCluster) -> None:
    program = f"""
import koinon
with koinon.connect({cluster.seeds!r}) as client:
    client.put(b"key", b"value")
    assert client.get(b"key") == b"value"
"""
    assert imported(program) == {"asyncio", "google.protobuf", "grpc"}


def test_get_from_the_shell_imports_only_what_it_uses(cluster: FakeCluster) -> None:
    program = f"""
import sys
from koinon_command import main
for arguments in (["put", "key", "value"], ["get", "key"]):
    sys.argv = ["koinon", *arguments, "--coordinators", {cluster.seeds!r}]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code
"""
    assert imported(program) == {"asyncio", "google.protobuf", "grpc", "typer"}
