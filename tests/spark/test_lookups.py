"""``lookup`` adds to each row the value of its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from koinon.spark import lookup, lookups
from koinon.spark.encoding.keys import key_bytes
from koinon_proto.contract.errors import ConfigurationError
from tests.spark.fake_loads import LoadsCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_values_of_keys_are_asked_for_once_each_in_bounded_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "KEYS_PER_CALL", 2)
    calls: list[Sequence[bytes]] = []

    def get_many(keys: Sequence[bytes]) -> list[bytes | None]:
        calls.append(keys)
        return [None if key == b"none" else b"v" + key for key in keys]

    given = [b"a", None, b"b", b"a", b"none", b"", b"x" * 501]
    (found,) = lookups.values_of(pa.array(given, pa.binary()), get_many)
    assert found.to_pylist() == [b"va", None, b"vb", b"va", None, None, None]
    assert calls == [[b"a", b"b"], [b"none"]]
    assert list(lookups.values_of(pa.array([], pa.binary()), get_many)) == []


def test_values_beyond_what_an_array_of_bytes_holds_come_in_pieces() -> None:
    large = bytes(64 * 1024 * 1024)  # 40 times: 2.5 GB
    keys = pa.array([b"k", None, *([b"k"] * 39)], pa.binary())
    rows, size = 0, 0
    for values in lookups.values_of(keys, lambda wanted: [large] * len(wanted)):
        assert values.nbytes < 2 * lookups.PIECE_BYTES
        rows, size = rows + len(values), size + values.nbytes
    assert rows == 41
    assert size > 1 << 31


def test_lookup_adds_values_without_a_scan(spark: SparkSession, fake: LoadsCluster) -> None:
    for number in range(5):
        fake.write(key_bytes("user", number), b"v%d" % number, 0)
    df = spark.range(0, 8, numPartitions=2).selectExpr("'user' kind", "id", "array(id) other")
    given: dict[str, Any] = {"on": ["kind", "id"], "coordinators": fake.seeds}
    found = lookup(df, **given, value="profile")
    assert found.columns == ["kind", "id", "other", "profile"]
    rows = {row.id: (row.other, row.profile) for row in found.collect()}
    assert rows == {i: ([i], b"v%d" % i if i < 5 else None) for i in range(8)}
    assert fake.count("ReadColumns") == 0
    for wrong, told in (
        ({"on": "nothing"}, "on: no column"),
        ({"value": "other"}, "there is a column 'other' already"),
        ({"key_encoding": "hex"}, "key_encoding: is none of binary, text"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            lookup(df, **{**given, **wrong})
