"""Builds replies from records, rows and results, for several commands. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from koinon_node.core.formats import records
from koinon_node.core.writes.updates import Result
from koinon_node.resp import wire
from koinon_node.resp.outcomes import Encoded, Written


def value_in(found: Sequence[Encoded]) -> bytes:
    """Return the value of the only record; b"" if there is none."""
    return records.value_of(found[0]) if found[0] is not None else b""


def value_or_nil(found: Sequence[Encoded]) -> bytes:
    """Reply with the value of the only record."""
    record = found[0]
    return wire.NIL if record is None else wire.bulk(records.value_of(record))


def values_or_nils(found: Sequence[Encoded]) -> bytes:
    """Reply with the value of each record."""
    values = (records.value_of(record) if record is not None else None for record in found)
    return wire.array(list(map(wire.bulk_or_nil, values)))


def count_found(found: Sequence[Encoded]) -> bytes:
    """Reply with the number of keys that have a record."""
    return wire.integer(sum(record is not None for record in found))


def length_of(found: Sequence[Encoded]) -> bytes:
    """Reply with the length of the only record's value."""
    return wire.integer(len(value_in(found)))


def type_of(found: Sequence[Encoded]) -> bytes:
    """Reply with the type of the only record: all values are strings."""
    return wire.simple("none" if found[0] is None else "string")


def ok(_: Sequence[Written]) -> bytes:
    """Reply with OK."""
    return wire.OK


def count_deleted(written: Sequence[Written]) -> bytes:
    """Reply with the number of rows that existed and were deleted."""
    return wire.integer(sum(row.version > 0 for row in written))


def is_done(result: Result) -> bool:
    """Return whether an update took place. The result of Assign is a pair: this, and the value
    before.
    """
    return bool(result[0] if isinstance(result, tuple) else result)


def one_or_zero(result: Result) -> bytes:
    """Reply with 1 if the operation took place, else with 0."""
    return wire.ONE if is_done(result) else wire.ZERO


def one_if_written(written: Sequence[Written]) -> bytes:
    """Reply with 1 if the only row's update took place, else with 0."""
    return one_or_zero(written[0].result)


def ok_if_written(written: Sequence[Written]) -> bytes:
    """Reply with OK if the only row's update took place, else with nil."""
    return wire.OK if is_done(written[0].result) else wire.NIL


def value_before(written: Sequence[Written]) -> bytes:
    """Reply with the value that the record of an Assign had before."""
    result = written[0].result
    assert isinstance(result, tuple)
    return wire.bulk_or_nil(result[1])


def result_of(written: Sequence[Written]) -> bytes:
    """Reply with the result of the only row's update: a value, a number, or nil."""
    result = written[0].result
    if result is None or isinstance(result, bytes):
        return wire.bulk_or_nil(result)
    assert isinstance(result, int)
    return wire.integer(result)
