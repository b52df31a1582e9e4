"""An operator's calls whose answers get lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from koinon.operate.admin import Admin
from koinon_proto.contract.errors import (
    ConfigurationError,
    UnavailableError,
    UnknownFateError,
    WrongClusterError,
)
from tests.cli.fake_operator import FakeOperator


class Forgetful(FakeOperator):
    """Leads no more once it has done what it was asked, and says nothing of that."""

    async def SetMoves(self, request: Any, context: Any) -> Any:  # noqa: N802
        await super().SetMoves(request, context)
        await self._lost(context)

    async def GetMoves(self, request: Any, context: Any) -> Any:  # noqa: N802
        await super().GetMoves(request, context)
        await self._lost(context)

    async def _lost(self, context: Any) -> None:
        self.not_leading = 1_000_000
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")


@pytest.fixture
def forgetful() -> Iterator[FakeOperator]:
    operator = Forgetful()
    yield operator
    operator.close()


def test_change_whose_answer_was_lost_is_of_unknown_fate(forgetful: FakeOperator) -> None:
    with (
        Admin(forgetful.address, timeout_ms=1_000) as admin,
        pytest.raises(UnknownFateError, match="lead"),
    ):
        admin.set_moves(paused=True)
    assert forgetful.settings.paused


def test_question_whose_answer_was_lost_is_unavailable(forgetful: FakeOperator) -> None:
    with Admin(forgetful.address, timeout_ms=1_000) as admin, pytest.raises(UnavailableError):
        admin.moves()


def test_change_that_nobody_took_is_unavailable(forgetful: FakeOperator) -> None:
    forgetful.not_leading = 1_000_000
    unchanged = pytest.raises(UnavailableError, match="nothing was changed")
    with Admin(forgetful.address, timeout_ms=1_000) as admin, unchanged:
        admin.set_moves(paused=True)
    assert not forgetful.settings.paused
    unchanged = pytest.raises(
        UnavailableError, match=r"no coordinator answers.*nothing was changed"
    )
    with Admin("127.0.0.1:1", timeout_ms=1_000) as admin, unchanged:
        admin.set_moves(paused=True)


def of_cluster(operator: FakeOperator, cluster_id: str) -> FakeOperator:
    cluster = replace(operator.table.cluster, cluster_id=cluster_id)
    operator.table = replace(operator.table, cluster=cluster)
    return operator


@pytest.fixture
def operators() -> Iterator[list[FakeOperator]]:
    """Two members of our cluster, and a leader of another on the third's address."""
    made = [FakeOperator() for _ in range(3)]
    of_cluster(made[0], "ours")
    of_cluster(made[1], "ours").not_leading = 1_000_000
    of_cluster(made[2], "other")
    yield made
    for operator in made:
        operator.close()


def test_change_goes_to_the_cluster_of_most_addresses_and_names_it(
    operators: list[FakeOperator],
) -> None:
    for order in (operators, operators[::-1]):
        with Admin(",".join(o.address for o in order), timeout_ms=5_000) as admin:
            admin.set_moves(paused=True)
            assert admin.status().table is not None
    assert [request.cluster_id for request in operators[0].requests] == ["ours", "ours"]
    assert (operators[1].requests, operators[2].requests) == ([], [])


def test_change_where_no_cluster_has_most_addresses_is_refused(
    operators: list[FakeOperator],
) -> None:
    addresses = f"{operators[0].address},{operators[2].address}"
    with Admin(addresses) as admin, pytest.raises(ConfigurationError, match="ours"):
        admin.set_moves(paused=True)
    assert not any(operator.requests for operator in operators)


def test_change_of_a_named_cluster_goes_to_no_other(operators: list[FakeOperator]) -> None:
    with (
        Admin(operators[2].address, cluster_id="ours") as admin,
        pytest.raises(WrongClusterError),
    ):
        admin.set_moves(paused=True)
    assert not operators[2].requests
    with Admin(f"{operators[0].address},{operators[2].address}", cluster_id="ours") as admin:
        admin.set_moves(paused=True)
    assert [request.cluster_id for request in operators[0].requests] == ["ours"]
