"""Messages that are encoded in parts are those that protobuf encodes."""

from __future__ import annotations

import pytest

from koinon_proto.contract.encoded_parts import as_field, with_bytes
from koinon_proto.v1 import loads_pb2, replication_pb2


@pytest.mark.parametrize("sizes", [(), (0,), (1, 127, 128, 129), (16_383, 16_384, 3_000_000)])
def test_fields_in_parts_are_read_as_protobuf_writes_them(sizes: tuple[int, ...]) -> None:
    records = [b"r" * size for size in sizes]
    batch = replication_pb2.Batch(number=7, keys=[b"k"] * len(sizes), crc32=5, merges=[b"m"])
    parts = with_bytes(batch.SerializeToString(), batch.RECORDS_FIELD_NUMBER, records)
    batch.records.extend(records)
    assert replication_pb2.Batch.FromString(b"".join(parts)) == batch

    whole = as_field(replication_pb2.FollowResponse.BATCH_FIELD_NUMBER, parts)
    expected = replication_pb2.FollowResponse(batch=batch)
    assert replication_pb2.FollowResponse.FromString(b"".join(whole)) == expected


def test_values_come_behind_those_that_are_there() -> None:
    request = loads_pb2.StageRequest(load_id=3, chunks=[b"first"])
    parts = with_bytes(request.SerializeToString(), request.CHUNKS_FIELD_NUMBER, [b"second"])
    found = loads_pb2.StageRequest.FromString(b"".join(parts))
    assert (found.load_id, list(found.chunks)) == (3, [b"first", b"second"])


def test_large_field_numbers_and_empty_messages() -> None:
    assert b"".join(as_field(2_000, with_bytes(b"", 2_000, []))) == bytes((0x82, 0x7D, 0))
