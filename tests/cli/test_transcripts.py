"""Golden transcripts: what commands print and how they end, as text files that a person reviews.

A line ``$ koinon …`` is a command; below it stands what it prints: standard output as it is, lines
of standard error behind ``! ``, an exit code other than 0 in brackets. ``< words`` ends a command
line to which a person types words. A line ``% …`` is Python that changes the cluster beforehand
(``operator``, a FakeOperator) or checks it, and ``# …`` a remark. JSON is wrapped. Each file has a
cluster of its own.

``UPDATE_TRANSCRIPTS=1 pytest tests/cli/test_transcripts.py`` writes them anew: review the diff.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.cli.console import output, progress_bar
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.keyspaces import KeyspaceId, KeyspaceList
from koinon_proto.contract.table import NodeNumber, NodeStatus, OfflineReason
from koinon_proto.v1 import admin_pb2, loads_pb2
from tests.cli.conftest import kinds, three
from tests.cli.fake_operator import LOST, FakeOperator
from tests.kit.command_line import koinon_app

FILES = Path(__file__).parent / "transcripts"
WIDTH = 110
BLANK = "·"
"""An empty line that a command prints."""
VARIABLE = (
    (r"\[request [\w-]+\]", "[request …]"),
    (r" at [\d.]+ \w+/s(, [\d.]+ m?s left)?", " at …/s"),
    (r"in [\d.]+ m?s\b", "in … ms"),
    (r"\([\d,]+ rows/s\)", "(… rows/s)"),
    (r'"seconds": [\d.]+', '"seconds": …'),
    (r"\b[0-9A-F]{2}(:[0-9A-F]{2}){31}\b", "FINGERPRINT"),
    (r"\b20\d\d-\d\d-\d\d( \d\d:\d\d:\d\d UTC)?", "DATE"),
    (r"/tmp/\S+?/(\w)", r"\1"),
)
"""Patterns of what differs from run to run, and what stands in the transcript in its place."""


OPEN, MERGING = loads_pb2.LOAD_STATE_OPEN, loads_pb2.LOAD_STATE_MERGING
DONE, ABORTED = loads_pb2.LOAD_STATE_DONE, loads_pb2.LOAD_STATE_ABORTED


def load_of(load_id: int, state: Any, **fields: Any) -> loads_pb2.LoadInfo:
    usual = {"mode": loads_pb2.LOAD_MODE_APPEND, "timeout_ms": 1_800_000, **fields}
    return loads_pb2.LoadInfo(load_id=load_id, job_id=f"job-{load_id}", state=state, **usual)


OPENED = load_of(41, OPEN, rows=1_200, bytes=3_400_000, idle_ms=2_500, description="new [orders]")
MERGED_HALF = load_of(
    42,
    MERGING,
    mode=loads_pb2.LOAD_MODE_OVERWRITE,
    prefix=b"o/\xff",
    keyspace="carts",
    stream_batch=loads_pb2.StreamBatch(query_id="q7", batch_id=0),
    partitions=1_024,
    partitions_merged=512,
    rows=7,
    bytes=70,
)


def gone() -> None:
    raise UnavailableError(reason="the leader is gone")


def ending(operator: FakeOperator) -> Callable[[], None]:
    """Return a step in which the loads that are under way end."""

    def end() -> None:
        operator.loads.loads = [load_of(load.load_id, DONE) for load in operator.loads.loads]

    return end


def with_keyspaces(operator: FakeOperator, **ids: int) -> None:
    """Have keyspaces of these names and ids beside ``default``."""
    default = operator.table.keyspaces.default
    made = [
        replace(default, keyspace_id=KeyspaceId(id_), name=name, base=default.partition_count)
        for name, id_ in ids.items()
    ]
    listed = KeyspaceList(changed_at=1, keyspaces=tuple(made))
    operator.table = replace(operator.table, keyspace_list=listed)


def executed(operator: FakeOperator) -> list[str]:
    plans = [r for r in operator.requests if isinstance(r, admin_pb2.ExecutePlanRequest)]
    return [request.plan_id for request in plans]


def forced(operator: FakeOperator) -> list[tuple[int, str]]:
    (asked,) = (r for r in operator.requests if isinstance(r, admin_pb2.ForcePrimariesRequest))
    return [(p.partition_id, p.node_id) for p in asked.primaries]


def shown(result: Any, is_json: bool) -> Iterator[str]:
    """Yield the lines that a command has printed, and its exit code."""
    for line in result.stdout.splitlines():
        text = json.dumps(json.loads(line), ensure_ascii=False) if is_json else ""
        wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)
        yield from wrapped or [line.rstrip() or BLANK]
    for line in result.stderr.splitlines():
        if words := line.strip("│╭╮╰╯─ "):
            yield f"! {words}"
    if result.exit_code:
        yield f"[{result.exit_code}]"


WORDS = {
    word.__name__: word
    for word in (NodeNumber, NodeStatus, OfflineReason, kinds, three, load_of, gone, ending)
} | {"LOST": LOST, "admin_pb2": admin_pb2, "OPENED": OPENED, "MERGED_HALF": MERGED_HALF}
WORDS |= {"DONE": DONE, "ABORTED": ABORTED, "with_keyspaces": with_keyspaces}
WORDS |= {"executed": executed, "forced": forced}
"""The vocabulary of ``%`` lines."""


def played(
    text: str, names: dict[str, Any], variable: list[tuple[str, str]], at: list[str]
) -> Iterator[str]:
    """Yield the transcript's lines as the commands print now."""
    for line in text.splitlines():
        if not line or line[0] in "#%":
            yield line
        if line.startswith("% "):
            exec(line[2:], names)
        if not line.startswith("$ koinon "):
            continue
        yield line
        command, asks, typed = line.removeprefix("$ koinon ").partition(" < ")
        names["there"](asks)
        arguments = shlex.split(command)
        answer = "".join(f"{word}\n" for word in typed.split()) if asks else None
        result = CliRunner().invoke(
            koinon_app(), [*arguments, *at], input=answer, prog_name="koinon"
        )
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        for printed in shown(result, "--json" in arguments):
            for pattern, instead in variable:
                printed = re.sub(pattern, instead, printed)
            yield printed


def check(
    path: Path, names: dict[str, Any], variable: list[tuple[str, str]], at: list[str]
) -> None:
    before = path.read_text()
    now = "\n".join(played(before, names, [*variable, *VARIABLE], at)) + "\n"
    if os.environ.get("UPDATE_TRANSCRIPTS"):
        path.write_text(now)
    else:
        assert now == before


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says whether a person sits at the terminal."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 0.0)
    return lambda asks: monkeypatch.setattr(output, "somebody_is_there", lambda: bool(asks))


@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("operator/*.txt")))
def test_operators_commands_print_what_the_transcript_has(
    name: str, operator: FakeOperator, there: Callable[[str], None]
) -> None:
    names = WORDS | {"operator": operator, "there": there}
    variable = [(re.escape(operator.address), "c1.example:7400")]
    nodes = operator.table.nodes
    variable += [(re.escape(n.address), f"{n.node_id}.example:7500") for n in nodes.values()]
    check(FILES / "operator" / f"{name}.txt", names, variable, ["--coordinators", operator.address])
