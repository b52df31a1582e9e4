"""Numbers of messages are bounded: a number at its bound is let in, one above it is refused."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

import generate
from koinon_proto.contract import bounds, convert
from koinon_proto.contract.cluster_errors import RegistrationPendingError
from koinon_proto.contract.errors import InternalError, InvalidArgumentError, UnavailableError
from koinon_proto.v1 import errors_pb2, membership_pb2, raft_pb2, table_pb2

POOL = table_pb2.DESCRIPTOR.pool


def bounded() -> Iterator[Any]:
    """Each bounded field: its message's full name, its name and the greatest number."""
    contract = generate.read_contract()
    for message, described in contract.messages():
        for field, bound in contract.bounds(message, described).items():
            yield pytest.param(message, field, bound, id=f"{message}.{field}")


@pytest.mark.parametrize(("message", "field", "bound"), list(bounded()))
def test_number_at_its_bound_is_let_in_and_above_it_refused(
    message: str, field: str, bound: int
) -> None:
    for proto in sorted(Path(table_pb2.__file__).parent.glob("*.proto")):
        importlib.import_module(f"koinon_proto.v1.{proto.stem}_pb2")  # which adds it to the pool
    descriptor = POOL.FindMessageTypeByName(f"koinon.v1.{message}")
    described = descriptor.fields_by_name[field]

    def holding(value: float) -> Any:
        made: Any = GetMessageClass(descriptor)()
        if described.is_repeated:
            getattr(made, field).extend([0, value, 0])
        else:
            setattr(made, field, value)
        return made

    bounds.check(holding(bound))
    above = math.nan if described.cpp_type == described.CPPTYPE_DOUBLE else bound + 1
    try:
        beyond = holding(above)
    except ValueError:
        return  # the type itself is the bound
    with pytest.raises(InvalidArgumentError) as refused:
        bounds.check(beyond)
    assert refused.value.field == field


def test_kinds_of_numbers_are_printed_in_the_documents() -> None:
    printed = (Path(__file__).parents[2] / "docs/bounds.md").read_text(encoding="utf-8")
    for kind, greatest in generate.read_contract().kinds().values():
        assert greatest is None or f"| {kind} | {greatest:,} |" in printed


def test_bounds_are_looked_at_in_messages_within_messages() -> None:
    change = membership_pb2.PartitionChange(primary_epoch=1 << 24)
    request = membership_pb2.AlterPartitionsRequest(
        changes=[membership_pb2.PartitionChange(), change]
    )
    with pytest.raises(InvalidArgumentError):
        bounds.check(request)
    vote = raft_pb2.RaftMessage(
        term=1, vote_request=raft_pb2.RaftMessage.VoteRequest(last_index=1 << 63)
    )
    with pytest.raises(InvalidArgumentError):
        bounds.check(vote)


def test_bounds_table_that_makes_no_sense_is_no_table() -> None:
    update = table_pb2.TableUpdate(
        format_version=1, table_version=3, nodes=[table_pb2.NodeInfo(node_epoch=(1 << 64) - 1)]
    )
    with pytest.raises(UnavailableError):
        convert.update_from_proto(update)


def test_bounds_error_that_makes_no_sense_is_not_acted_upon() -> None:
    """A node would wait for 49 days."""
    error = errors_pb2.Error(
        registration_pending=errors_pb2.RegistrationPendingError(retry_after_ms=(1 << 32) - 1)
    )
    assert isinstance(convert.error_from_proto(error), InternalError)
    error.registration_pending.retry_after_ms = 50
    assert isinstance(convert.error_from_proto(error), RegistrationPendingError)
