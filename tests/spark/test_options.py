"""Options are parsed and checked, and every complaint names the option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from koinon.core.quantities import parse_duration_ms, parse_size
from koinon.spark.options import (
    READ_OPTIONS,
    WRITE_OPTIONS,
    cluster_options,
    read_options,
    write_options,
)
from koinon.spark.writing.planning import plan_rows
from koinon_proto.contract.errors import ConfigurationError

AT = {"coordinators": "host:7400"}
KV: list[tuple[str, Any]] = [("key", "binary"), ("value", "binary")]
ORDERS: list[tuple[str, Any]] = [
    ("o_orderkey", "long"),
    ("o_clerk", "string"),
    ("o_totalprice", "decimal(15,2)"),
    ("o_orderdate", "date"),
]


def refusal(given: dict[str, str], *, overwrite: bool = False) -> str:
    with pytest.raises(ConfigurationError) as caught:
        write_options(given, overwrite=overwrite)
    return str(caught.value)


def plan_refusal(fields: list[tuple[str, Any]], **given: str) -> str:
    options = write_options({**AT, **given}, overwrite=False)
    with pytest.raises(ConfigurationError) as caught:
        plan_rows(options, fields)
    return str(caught.value)


def test_write_options_all_given_are_parsed() -> None:
    options = write_options(
        {
            "COORDINATORS": "a:1,b:2",
            "keycolumn": "id, name",
            "valueEncoding": "MsgPack",
            "keyEncoding": "text",
            "ttl": "1.5h",
            "ttlColumn": "lives",
            "deleteColumn": "gone",
            "orderBy": "at",
            "prefix": " user:",
            "badRecordsPath": "/bad",
            "maxBytesPerSecond": "50MB",
            "memoryBytes": "16MiB",
            "timeout": "30s",
            "loadTimeout": "1h",
            "mergeTimeout": "2m",
            "description": "x" * 300,
        },
        overwrite=True,
    )
    assert options.key_columns == ("id", "name")
    assert (options.value_encoding, options.key_encoding) == ("msgpack", "text")
    assert options.ttl_ms == 5_400_000
    assert (options.ttl_column, options.delete_column) == ("lives", "gone")
    assert options.prefix == b" user:"
    assert options.bytes_per_second_max == 50_000_000
    assert options.memory_bytes == 16 << 20
    assert (options.timeout_s, options.merge_timeout_s) == (30, 120)
    assert options.load_timeout_ms == 3_600_000
    assert len(options.description) == 200


def test_every_option_stands_in_the_documented_table() -> None:
    documents = Path(__file__).parents[2] / "docs" / "spark.md"
    rows = [line for line in documents.read_text().splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows)))
    assert {*READ_OPTIONS, *WRITE_OPTIONS} <= named


def test_write_options_defaults_are_documented_ones() -> None:
    options = write_options(AT, overwrite=False)
    assert options.memory_bytes == 64 << 20
    assert options.timeout_s == 120
    assert (options.ttl_ms, options.bytes_per_second_max, options.prefix) == (0, 0, b"")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "option coordinators: is required"),
        ({"coordinators": "nohost"}, "option coordinators: "),
        ({"coordinators": "koinon://a:1/b?timeout_ms=5"}, "option coordinators: give settings as"),
        ({"coordinators": "http://a:1"}, "must be koinon://host:port"),
        ({**AT, "keyspaces": "id"}, "option keyspaces: unknown; did you mean keyspace?"),
        ({**AT, "keyColum": "id"}, "option keycolum: unknown; did you mean keyColumn?"),
        ({**AT, "zzz": "1"}, "known are coordinators, "),
        ({**AT, "path": "/x"}, "option path: Koinon has no paths"),
        ({**AT, "keysOnly": "true"}, "option keysOnly: is an option of reads only"),
        ({**AT, "keyColumn": "a,,b"}, "option keyColumn: 'a,,b' has an empty name"),
        ({**AT, "keyColumn": "a,a"}, "option keyColumn: 'a,a' names a column twice"),
        ({**AT, "keyEncoding": "hex"}, "option keyEncoding: 'hex' is none of binary, text"),
        ({**AT, "valueEncoding": "xml"}, "option valueEncoding: 'xml' is none of json, msgpack"),
        ({**AT, "valueEncoding": "json", "valueColumn": "v"}, "option valueEncoding: is for whole"),
        ({**AT, "ttl": "soon"}, "option ttl: 'soon' is no duration"),
        ({**AT, "ttl": "0s"}, "option ttl: '0s' is out of range"),
        ({**AT, "ttl": "99999d"}, "option ttl: '99999d' is out of range"),
        ({**AT, "loadTimeout": "1s"}, "option loadTimeout: '1s' is out of range"),
        ({**AT, "memoryBytes": "1kB"}, "option memoryBytes: '1kb' is out of range"),
        ({**AT, "maxBytesPerSecond": "fast"}, "option maxBytesPerSecond: 'fast' is no size"),
        ({**AT, "txnAppId": "a"}, "option txnVersion: and txnAppId belong together"),
        ({**AT, "txnAppId": "a", "txnVersion": "-1"}, "option txnVersion: '-1' is no whole number"),
        ({**AT, "txnAppId": "a" * 999, "txnVersion": "1"}, "option txnAppId: has more than"),
        ({**AT, "prefix": "a"}, "option prefix: only mode overwrite"),
    ],
)
def test_write_options_wrong_are_refused_by_name(given: dict[str, str], named: str) -> None:
    assert named in refusal(given)


def test_options_name_the_keyspace_by_itself_or_in_a_url() -> None:
    for given, expected in (
        (AT, ("host:7400", "")),
        ({**AT, "keySpace": "carts"}, ("host:7400", "carts")),
        ({"coordinators": "koinon://a:1,b:2/carts"}, ("a:1,b:2", "carts")),
        ({"coordinators": "koinon://a:1/carts", "keyspace": "vip"}, ("a:1", "vip")),
        ({"coordinators": "koinon://a:1"}, ("a:1", "")),
    ):
        for options in (write_options(given, overwrite=False), read_options(given)):
            assert (options.coordinators, options.keyspace) == expected
        found = cluster_options(given)
        assert (found.coordinators, found.keyspace) == expected


def test_read_options_of_tables_are_refused_with_what_serves_instead() -> None:
    """Options that Spark gives where a table with columns is made, or read."""
    made = {"owner": "me", "option.coordinators": "a:1", "provider": "koinon", **AT}
    for given in (made, {}):
        with pytest.raises(ConfigurationError, match="use CREATE TEMPORARY VIEW … USING koinon"):
            read_options(given)
    with pytest.raises(ConfigurationError) as caught:
        read_options({"timeout": "1s"})
    assert "VIEW" not in str(caught.value)


def test_write_options_bad_prefixes_are_refused() -> None:
    both = {**AT, "prefix": "a", "prefixHex": "61"}
    assert "option prefixHex: is the same as prefix" in refusal(both, overwrite=True)
    assert "no bytes in hex" in refusal({**AT, "prefixHex": "6"}, overwrite=True)
    assert "longer than a key" in refusal({**AT, "prefix": "a" * 501}, overwrite=True)


def test_write_options_prefix_in_hex_is_bytes() -> None:
    options = write_options({**AT, "prefixHex": "80 00"}, overwrite=True)
    assert options.prefix == b"\x80\x00"


def test_stream_options_of_sparks_own_are_let_by() -> None:
    write_options({**AT, "checkpointLocation": "/c", "queryName": "q"}, overwrite=False)


def test_read_options_are_parsed_and_checked() -> None:
    options = read_options({**AT, "keysOnly": "TRUE", "partitionsPerTask": "7", "prefix": "p"})
    assert options.keys_only
    assert not options.metadata
    assert (options.partitions_per_task, options.prefix) == (7, b"p")
    assert options.keys is None
    assert read_options({**AT, "keys": "a b,c"}).keys == (b"a b", b"c")
    assert read_options({**AT, "keysHex": "80 00, 61"}).keys == (b"\x80\x00", b"a")
    assert read_options({**AT, "keys": ""}).keys == ()
    for given, named in (
        ({"keys": "a", "keysHex": "61"}, "option keysHex: is the same as keys, in hex"),
        ({"counts": "true", "keys": "a"}, "option counts: is of whole partitions"),
        ({"keysHex": "a"}, "option keysHex: 'a' is no list of bytes in hex"),
        ({"keysOnly": "yes"}, "option keysOnly: 'yes' is none of true, false"),
        ({"partitionsPerTask": "0"}, "option partitionsPerTask: '0' is no whole number"),
        ({"pageBytes": "1GB"}, "option pageBytes: '1gb' is out of range"),
        ({"pageBytes": "9" * 400}, "option pageBytes: '9999.* is far too large"),
        ({"keyColumn": "id"}, "option keyColumn: is an option of writes only"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            read_options({**AT, **given})


def test_durations_and_sizes_read_as_the_command_line_does() -> None:
    assert [parse_duration_ms(t) for t in ("500ms", "30 s", "5m", "2H", "1d")] == [
        500,
        30_000,
        300_000,
        7_200_000,
        86_400_000,
    ]
    assert [parse_size(t) for t in ("50MB", "1GiB", "800k", "1048576", "1.5kB/s")] == [
        50_000_000,
        1 << 30,
        800_000,
        1_048_576,
        1_500,
    ]


# --- columns ------------------------------------------------------------------------------------


def test_plan_key_and_value_columns_need_no_options() -> None:
    plan = plan_rows(write_options(AT, overwrite=False), [("Value", "string"), ("KEY", "long")])
    assert (plan.key_columns, plan.value_column, plan.order_column) == ((1,), 0, -1)


def test_plan_value_encoding_takes_whole_rows_even_of_key_and_value() -> None:
    options = write_options({**AT, "valueEncoding": "json"}, overwrite=False)
    assert plan_rows(options, KV).value_column == -1


def test_plan_columns_are_found_in_any_case_and_several_make_a_key() -> None:
    given = {
        **AT,
        "keyColumn": "O_ORDERDATE2,o_orderkey".replace("O_ORDERDATE2", "O_CLERK"),
        "valueEncoding": "msgpack",
        "orderBy": "o_orderdate",
    }
    plan = plan_rows(write_options(given, overwrite=False), ORDERS)
    assert (plan.key_columns, plan.value_column, plan.order_column) == ((1, 0), -1, 3)
    assert plan.key_name == "o_clerk, o_orderkey"


@pytest.mark.parametrize(
    ("fields", "given", "named"),
    [
        (ORDERS, {}, "option keyColumn: is required; the columns are o_orderkey, "),
        (ORDERS, {"keyColumn": "o_orderkey"}, "option valueColumn: is required, or valueEncoding"),
        (
            ORDERS,
            {"keyColumn": "orderkey", "valueEncoding": "json"},
            "there is no column 'orderkey' among o_orderkey, o_clerk, o_totalprice, o_orderdate; "
            "did you mean 'o_orderkey'?",
        ),
        (
            [("list", {"type": "array", "elementType": "long"})],
            {"keyColumn": "list", "valueEncoding": "json"},
            "option keyColumn: column 'list' has type array: cast it",
        ),
        (
            [("k", "string"), ("v", "variant")],
            {"keyColumn": "k", "valueColumn": "v"},
            "option valueColumn: column 'v' holds variant: cast it to a string",
        ),
        (
            ORDERS,
            {"keyColumn": "o_clerk", "valueEncoding": "json", "orderBy": "o_clerk"},
            "option orderBy: column 'o_clerk' has type string: use a number",
        ),
        (
            ORDERS,
            {"keyColumn": "o_orderkey", "valueEncoding": "json", "ttlColumn": "o_orderdate"},
            "option ttlColumn: column 'o_orderdate' has type date: use an integer (milliseconds)",
        ),
        (
            ORDERS,
            {"keyColumn": "o_clerk", "valueEncoding": "json", "deleteColumn": "o_orderkey"},
            "option deleteColumn: column 'o_orderkey' has type long: cast it to boolean",
        ),
        (
            ORDERS,
            {"keyColumn": "o_clerk", "valueEncoding": "json", "deleteColumn": "gone"},
            "option deleteColumn: there is no column 'gone'",
        ),
        (
            [("k", "string"), ("k", "string")],
            {"keyColumn": "k", "valueEncoding": "json"},
            "option keyColumn: there are 2 columns 'k'",
        ),
        (
            [("k", "string"), ("v", "string"), ("v", "long")],
            {"keyColumn": "k", "valueEncoding": "json"},
            "option valueEncoding: there are several columns 'v'",
        ),
        (
            [("k", "string"), ("v", "variant")],
            {"keyColumn": "k", "valueEncoding": "json"},
            "option valueEncoding: column 'v' holds variant",
        ),
        (
            [
                ("k", "string"),
                (
                    "v",
                    {
                        "type": "array",
                        "elementType": {
                            "type": "struct",
                            "fields": [{"name": "x", "type": "interval day to second"}],
                        },
                    },
                ),
            ],
            {"keyColumn": "k", "valueEncoding": "msgpack"},
            "option valueEncoding: column 'v' holds interval day to second",
        ),
        (
            [
                ("k", "string"),
                (
                    "v",
                    {
                        "type": "map",
                        "keyType": {"type": "array", "elementType": "string"},
                        "valueType": "string",
                    },
                ),
            ],
            {"keyColumn": "k", "valueEncoding": "json"},
            "option valueEncoding: column 'v' holds a map whose keys are of type array",
        ),
    ],
)
def test_plan_wrong_columns_are_refused_by_name(
    fields: list[tuple[str, Any]], given: dict[str, str], named: str
) -> None:
    assert named in plan_refusal(fields, **given)


def test_plan_columns_that_say_what_becomes_of_a_row_are_in_no_value() -> None:
    fields = [("k", "string"), ("v", "long"), ("lives", "timestamp"), ("gone", "boolean")]
    given = {**AT, "keyColumn": "k", "ttlColumn": "lives", "deleteColumn": "GONE"}
    plan = plan_rows(write_options({**given, "valueEncoding": "json"}, overwrite=False), fields)
    assert (plan.ttl_column, plan.delete_column) == (2, 3)
    assert (plan.stored, plan.used) == ([0, 1], [0, 2, 3])


def test_plan_nested_columns_are_whole_rows_values() -> None:
    nested: list[tuple[str, Any]] = [
        ("k", "varchar(5)"),
        ("m", {"type": "map", "keyType": "string", "valueType": "decimal(3,1)"}),
        ("s", {"type": "struct", "fields": [{"name": "x", "type": "timestamp_ntz"}]}),
    ]
    given = {**AT, "keyColumn": "k", "valueEncoding": "json"}
    assert plan_rows(write_options(given, overwrite=False), nested).key_columns == (0,)
