"""An operator's calls whose answers get lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from koinon.admin import Admin
from koinon_proto.errors import UnavailableError, UnknownFateError
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
    with Admin(forgetful.address, timeout_ms=1_000) as admin, pytest.raises(UnavailableError):
        admin.set_moves(paused=True)
    assert not forgetful.settings.paused
