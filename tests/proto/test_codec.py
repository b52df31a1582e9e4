"""Records to messages and back: nothing is lost, and nothing is forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_proto.contract import convert
from koinon_proto.contract.access import AccessState, Role, Token, User
from koinon_proto.contract.bulk_loads import LoadMode, StreamBatch
from koinon_proto.contract.codec import Codec, Value, codec
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceList
from koinon_proto.contract.table import (
    ClusterConfig,
    MoveSettings,
    NodeInfo,
    TableUpdate,
)
from koinon_proto.v1 import loads_pb2, state_pb2, table_pb2

from .records import records

CODECS: dict[str, tuple[type[Any], Codec[Any, Any]]] = {
    "CONFIG": (ClusterConfig, convert.CONFIG),
    "NODE": (NodeInfo, convert.NODE),
    "MOVE_SETTINGS": (MoveSettings, convert.MOVE_SETTINGS),
    "KEYSPACE": (Keyspace, convert.KEYSPACE),
    "KEYSPACES": (KeyspaceList, convert.KEYSPACES),
    "ROLE": (Role, convert.ROLE),
    "USER": (User, convert.USER),
    "TOKEN": (Token, convert.TOKEN),
    "ACCESS": (AccessState, convert.ACCESS),
}


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_record_comes_back_whole(name: str, data: st.DataObject) -> None:
    record_class, conversion = CODECS[name]
    record = data.draw(records(record_class))
    message = conversion.encode(record)
    assert conversion.decode(type(message).FromString(message.SerializeToString())) == record


@given(records(TableUpdate))
def test_update_comes_back_whole(update: TableUpdate) -> None:
    message = convert.update_to_proto(update)
    parsed = table_pb2.TableUpdate.FromString(message.SerializeToString())
    assert convert.UPDATE.decode(parsed) == update


def test_every_codec_of_the_contract_is_tried() -> None:
    made = {name for name, value in vars(convert).items() if isinstance(value, Codec)}
    assert made == {*CODECS, "UPDATE"}


# --- what a codec makes of fields -------------------------------------------------------------

Number = NewType("Number", int)


class Batch(NamedTuple):
    query_id: str
    batch_id: Number


@dataclass(frozen=True)
class Opening:
    job: str
    mode: LoadMode
    batch: Batch | None
    prefix: bytes = b""
    timeout_ms: int = 7


OPENING = codec(
    Opening,
    state_pb2.OpenLoadCommand,
    names={"job": "job_id", "batch": "stream_batch"},
    filled=["description"],
    unused=["owner", "keyspace_id"],
)


@given(records(Opening), st.text(max_size=5))
def test_names_optionals_enums_and_what_is_filled_in(opening: Opening, description: str) -> None:
    message = OPENING.encode(opening, description=description)
    assert message.job_id == opening.job
    assert message.description == description
    assert message.HasField("stream_batch") == (opening.batch is not None)
    assert OPENING.decode(message) == opening


def test_number_that_an_enum_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="7 is not a valid LoadMode"):
        OPENING.decode(state_pb2.OpenLoadCommand(mode=7))  # type: ignore[arg-type]


def test_value_by_hand_converts_each_element_of_a_tuple() -> None:
    @dataclass
    class Merged:
        load_id: int
        partition_ids: tuple[str, ...]

    merged = codec(
        Merged,
        state_pb2.PartitionsMergedCommand,
        values={"partition_ids": Value(int, str)},
    )
    message = merged.encode(Merged(1, ("2", "3")))
    assert list(message.partition_ids) == [2, 3]
    assert merged.decode(message) == Merged(1, ("2", "3"))


def test_given_field_is_left_out_of_the_message_and_asked_for() -> None:
    batch = codec(StreamBatch, loads_pb2.StreamBatch, given=["query_id"], filled=["query_id"])
    assert batch.encode(StreamBatch("q", 1), query_id="p").query_id == "p"
    assert batch.decode(loads_pb2.StreamBatch(batch_id=2), query_id="q") == StreamBatch("q", 2)


LEFT = ["description", "owner", "keyspace_id"]


@pytest.mark.parametrize(
    ("exceptions", "named"),
    [
        ({"unused": ["owner", "keyspace_id"]}, r"\['description'\]"),
        ({"filled": ["description", "prefix_", "owner", "keyspace_id"]}, r"\['prefix_'\]"),
        ({"unused": LEFT, "given": ["prefix"]}, r"\['prefix'\]"),
        ({"unused": LEFT, "given": ["prefix"], "filled": ["prefix"]}, None),
        (
            {"unused": LEFT, "values": {"suffix": Value(int, int)}},
            r"\['suffix'\]",
        ),
    ],
)
def test_pair_with_a_field_that_is_not_covered_is_refused(
    exceptions: dict[str, Any], named: str | None
) -> None:
    names = {"job": "job_id", "batch": "stream_batch"}
    if named is None:
        codec(Opening, state_pb2.OpenLoadCommand, names=names, **exceptions)
        return
    with pytest.raises(TypeError, match=f"Opening and OpenLoadCommand differ in {named}"):
        codec(Opening, state_pb2.OpenLoadCommand, names=names, **exceptions)


def test_hint_without_a_wire_form_is_refused() -> None:
    class Odd(NamedTuple):
        load_id: int
        partition_ids: frozenset[int]

    with pytest.raises(TypeError, match="not repeated alike"):
        codec(Odd, state_pb2.PartitionsMergedCommand)

    class Odder(NamedTuple):
        query_id: complex
        batch_id: int

    with pytest.raises(TypeError, match="no way from"):
        codec(Odder, loads_pb2.StreamBatch)
    with pytest.raises(TypeError, match="neither a dataclass nor a named tuple"):
        codec(int, loads_pb2.StreamBatch)
