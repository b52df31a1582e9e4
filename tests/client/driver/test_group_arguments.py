"""The arguments of a consumer of a group are checked before anything is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from koinon.driver.group import Group
from koinon.driver.group_consumer import GroupConsumer
from koinon_proto.contract.errors import InvalidArgumentError


def test_an_argument_that_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'keyspace'"):
        Group(None, "g", {"keyspace": ["orders"]})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("field", "name", "arguments"),
    [
        ("keyspaces", "g", {"keyspaces": "orders"}),
        ("keyspaces", "g", {"keyspaces": b"orders"}),
        ("group", "", {}),
        ("group", "g" * 129, {}),
        ("group", "a\n", {}),
        ("group", b"g", {}),
        ("group", 5, {}),
        ("member", "g", {"member": ""}),
        ("member", "g", {"member": 7}),
        ("strategy", "g", {"strategy": "even"}),
        ("start", "g", {"start": "end"}),
        ("session_ms", "g", {"session_ms": 999}),
        ("session_ms", "g", {"session_ms": 300_001}),
        ("session_ms", "g", {"session_ms": 1500.5}),
        ("session_ms", "g", {"session_ms": "2s"}),
    ],
)
def test_an_argument_that_cannot_be_is_refused(
    field: str, name: Any, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError) as failure:
        Group(None, name, arguments)  # type: ignore[arg-type]
    assert failure.value.field == field


async def test_a_defect_of_the_background_ends_the_iteration() -> None:
    consumer = GroupConsumer.__new__(GroupConsumer)
    seen: list[BaseException] = []
    consumer._fail = seen.append  # type: ignore[method-assign, assignment]

    async def defective() -> None:
        raise TypeError("a defect")

    task = asyncio.create_task(defective())
    task.add_done_callback(consumer._on_ended)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(error) for error in seen] == ["a defect"]
