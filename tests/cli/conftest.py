"""A cluster of four nodes as an operator sees it, and `koinon admin` against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.cli.console import output
from koinon.cli.operate import following, verify
from koinon_proto.contract.table import NodeNumber
from tests.cli.fake_operator import FakeOperator
from tests.kit.command_line import koinon_app

Run = Callable[..., Any]


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    made = FakeOperator(nodes=4)
    for p in range(8):  # the fourth node has just joined
        made.change_row(p, **dict.fromkeys(("replicas", "in_sync"), three(p)))
        made.change_row(p, primary=three(p)[0])
    made.planned = [(0, (1, 2, 3), (4, 2, 3)), (1, (2, 3, 1), (2, 3, 4)), (2, (3, 1, 2), (1, 3, 2))]
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(verify, "PAUSE_S", 0.0)
    yield made
    made.close()


def three(p: int) -> tuple[NodeNumber, ...]:
    return tuple(NodeNumber((p + i) % 3 + 1) for i in range(3))


@pytest.fixture
def koinon(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``koinon admin ARGS``; ``typed`` is what a person types."""

    def run(*arguments: str, typed: str | None = None) -> Any:
        monkeypatch.setattr(output, "somebody_is_there", lambda: typed is not None)
        where = ["--coordinators", operator.address]
        return CliRunner().invoke(koinon_app(), ["admin", *arguments, *where], input=typed)

    return run


def kinds(operator: FakeOperator) -> list[str]:
    return [type(request).__name__ for request in operator.requests]
