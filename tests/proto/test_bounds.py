"""Every number of the wire has a bound, and what is beyond it is refused by name."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

import koinon_proto.v1
from koinon_proto.contract import bounds, convert
from koinon_proto.contract.cluster_errors import RegistrationPendingError
from koinon_proto.contract.errors import InternalError, InvalidArgumentError, UnavailableError
from koinon_proto.v1 import errors_pb2, membership_pb2, raft_pb2, table_pb2

NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_FLOAT,
}
NOT_SPOKEN = {"state_pb2"}  # the log's own


def messages() -> Iterator[Descriptor]:
    """Every message that is spoken, those within others included."""
    for module in pkgutil.iter_modules(koinon_proto.v1.__path__):
        if module.name.endswith("_pb2") and module.name not in NOT_SPOKEN:
            file = importlib.import_module(f"koinon_proto.v1.{module.name}").DESCRIPTOR
            waiting = list(file.message_types_by_name.values())
            while waiting:
                message = waiting.pop()
                waiting += message.nested_types
                yield message


def name_of(message: Descriptor) -> str:
    return message.full_name.removeprefix(bounds.PACKAGE)


def test_bounds_every_number_has_one_and_nothing_else_does() -> None:
    numbers = {
        name_of(message): {f.name for f in message.fields if f.cpp_type in NUMBERS}
        for message in messages()
    }
    stated = {name: set(fields) for name, fields in bounds.BOUNDS.items()}
    assert stated == {name: fields for name, fields in numbers.items() if fields}


def bounded() -> Iterator[Any]:
    for message in messages():
        for name, bound in bounds.BOUNDS.get(name_of(message), {}).items():
            if bound is not None:
                yield pytest.param(message, name, bound, id=f"{name_of(message)}.{name}")


@pytest.mark.parametrize(("descriptor", "name", "bound"), list(bounded()))
def test_bounds_number_at_its_bound_is_let_in_and_above_it_refused(
    descriptor: Descriptor, name: str, bound: int | float
) -> None:
    def holding(value: int | float) -> Any:
        message: Any = GetMessageClass(descriptor)()
        if descriptor.fields_by_name[name].is_repeated:
            getattr(message, name).extend([0, value, 0])
        else:
            setattr(message, name, value)
        return message

    bounds.check(holding(bound))
    above = math.nan if isinstance(bound, float) else bound + 1
    try:
        beyond = holding(above)
    except ValueError:
        return  # the type itself is the bound
    with pytest.raises(InvalidArgumentError) as refused:
        bounds.check(beyond)
    assert refused.value.field == name


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
