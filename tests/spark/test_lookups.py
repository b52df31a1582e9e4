"""``lookup`` adds to each row the value of its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from koinon.spark import lookup, lookups
from koinon.spark.encoding.keys import key_bytes
from koinon.spark.key_steps import KeySteps
from koinon_proto.contract.errors import ConfigurationError
from tests.spark.fake_loads import LoadsCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_values_of_keys_are_asked_for_once_each_in_bounded_calls() -> None:
    calls: list[Sequence[bytes]] = []

    def get_many(keys: Sequence[bytes]) -> list[bytes | None]:
        calls.append(keys)
        return [None if key == b"none" else b"v" + key for key in keys]

    given = [b"a", None, b"b", b"a", b"none", b"", b"x" * 501]
    found = list(lookups.values_of(pa.array(given, pa.binary()), get_many, KeySteps(4)))
    values = [value for array in found for value in array.to_pylist()]
    assert values == [b"va", None, b"vb", b"va", None, None, None]
    assert calls == [[b"a", b"b"], [b"none"]]
    assert list(lookups.values_of(pa.array([], pa.binary()), get_many, KeySteps(4))) == []


def test_keys_are_asked_for_by_the_bytes_of_their_values() -> None:
    held: list[int] = []

    def get_many(keys: Sequence[bytes]) -> list[bytes | None]:
        held.append(1000 * len(keys))
        return [bytes(1000)] * len(keys)

    keys = pa.array([b"k%d" % n for n in range(1_000)], pa.binary())
    steps = KeySteps(10_000, bytes_max=50_000)
    assert sum(len(values) for values in lookups.values_of(keys, get_many, steps)) == 1_000
    assert max(held) <= 50_000
    assert len(held) < 30


def test_values_beyond_what_an_array_of_bytes_holds_come_in_pieces() -> None:
    large = bytes(64 * 1024 * 1024)  # 40 times: 2.5 GB
    keys = pa.array([b"k", None, *([b"k"] * 39)], pa.binary())
    rows, size = 0, 0
    steps = KeySteps(100)
    for values in lookups.values_of(keys, lambda wanted: [large] * len(wanted), steps):
        assert values.nbytes < 2 * lookups.PIECE_BYTES
        rows, size = rows + len(values), size + values.nbytes
    assert rows == 41
    assert size > 1 << 31


def test_lookup_adds_values_without_a_scan(spark: SparkSession, fake: LoadsCluster) -> None:
    for number in range(5):
        fake.write(key_bytes("user", number), b"v%d" % number, 0)
    df = spark.range(0, 8, numPartitions=2).selectExpr("'user' kind", "id", "array(id) other")
    given: dict[str, Any] = {"on": ["KIND", "id"], "coordinators": fake.seeds}
    found = lookup(df, **given, value="profile")
    assert found.columns == ["kind", "id", "other", "profile"]
    rows = {row.id: (row.other, row.profile) for row in found.collect()}
    assert rows == {i: ([i], b"v%d" % i if i < 5 else None) for i in range(8)}
    assert fake.count("ReadColumns") == 0
    for wrong, told in (
        ({"on": "nothing"}, "on: there is no column 'nothing' among kind, id, other"),
        ({"on": ()}, "on: name the column"),
        ({"value": "Other"}, "there is a column 'Other' already"),
        ({"tls_bundle": "/none.pem"}, "/none.pem"),
        ({"token_file": "/none.token"}, "/none.token"),
        ({"key_encoding": "hex"}, "key_encoding: is none of binary, text"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            lookup(df, **{**given, **wrong})
