"""The limits of keys, values and arguments, checked at the call, before anything is sent.

The checks over columns are C-level passes; the offending row is looked for only once there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES, MAX_TTL_MS

DURABILITIES = ("all_in_sync", "primary")

_ONLY_BYTES = frozenset((bytes,))


def check_key(key: object) -> None:
    """Raise unless ``key`` is ``bytes`` of a length that the store takes."""
    if type(key) is not bytes:
        _refuse_type("key", key)
    if not 0 < len(key) <= MAX_KEY_BYTES:
        _refuse_key("key", len(key))


def check_value(value: object, max_value_bytes: int) -> None:
    """Raise unless ``value`` is ``bytes`` within the cluster's limit."""
    if type(value) is not bytes:
        _refuse_type("value", value)
    if len(value) > max_value_bytes:
        _refuse_value("value", len(value), max_value_bytes)


def check_keys(keys: Sequence[object], first_row: int = 0) -> None:
    """Raise unless every key is one that the store takes; the error names the row."""
    if not keys:
        return
    if not _ONLY_BYTES.issuperset(map(type, keys)):
        row = next(i for i, key in enumerate(keys) if type(key) is not bytes)
        _refuse_type(f"key of row {first_row + row}", keys[row])
    lengths = list(map(len, keys))  # type: ignore[arg-type]
    if min(lengths) < 1 or max(lengths) > MAX_KEY_BYTES:
        row = next(i for i, n in enumerate(lengths) if not 0 < n <= MAX_KEY_BYTES)
        _refuse_key(f"key of row {first_row + row}", lengths[row])


def check_values(values: Sequence[object], max_value_bytes: int, first_row: int = 0) -> None:
    """Raise unless every value is ``bytes`` within the limit; the error names the row."""
    if not values:
        return
    if not _ONLY_BYTES.issuperset(map(type, values)):
        row = next(i for i, value in enumerate(values) if type(value) is not bytes)
        _refuse_type(f"value of row {first_row + row}", values[row])
    if max(map(len, values)) > max_value_bytes:  # type: ignore[arg-type]
        lengths = list(map(len, values))  # type: ignore[arg-type]
        row = next(i for i, n in enumerate(lengths) if n > max_value_bytes)
        _refuse_value(f"value of row {first_row + row}", lengths[row], max_value_bytes)


def check_positive(name: str, number: object) -> None:
    """Raise unless ``number`` is an int above 0."""
    if type(number) is not int:
        raise TypeError(f"{name} must be an int, not {type(number).__name__}")
    if number <= 0:
        raise InvalidArgumentError(field=name, reason=f"must be above 0, not {number}")


def check_ttl(ttl_ms: object) -> None:
    """Raise unless ``ttl_ms`` is None or a number of milliseconds from 1 to a hundred years."""
    if ttl_ms is None:
        return
    check_positive("ttl_ms", ttl_ms)
    _check_most("ttl_ms", ttl_ms, MAX_TTL_MS)


def check_increment(by: object) -> None:
    """Raise unless ``by`` is an int of 64 bits with a sign."""
    if type(by) is not int:
        raise TypeError(f"by must be an int, not {type(by).__name__}")
    if not -(1 << 63) <= by < 1 << 63:
        raise InvalidArgumentError(field="by", reason=f"{by} is beyond 64 bits")


def check_version(if_version: object) -> None:
    """Raise unless ``if_version`` is None or a version (0: no such record)."""
    if if_version is None:
        return
    if type(if_version) is not int:
        raise TypeError(f"if_version must be an int, not {type(if_version).__name__}")
    if if_version < 0:
        raise InvalidArgumentError(field="if_version", reason=f"cannot be {if_version}")
    _check_most("if_version", if_version, (1 << 64) - 1)


def check_durability(durability: object) -> None:
    """Raise unless ``durability`` is the name of one."""
    if not isinstance(durability, str):
        raise TypeError(f"durability must be a str, not {type(durability).__name__}")
    if durability not in DURABILITIES:
        names = " or ".join(repr(name) for name in DURABILITIES)
        raise InvalidArgumentError(
            field="durability", reason=f"must be {names}, not {durability!r}"
        )


def _check_most(name: str, number: object, limit: int) -> None:
    assert isinstance(number, int)
    if number > limit:
        raise InvalidArgumentError(field=name, reason="too large", limit=limit, actual=number)


def _refuse_type(name: str, got: object) -> NoReturn:
    hint = "; encode text first, as in text.encode()" if isinstance(got, str) else ""
    raise TypeError(f"{name} must be bytes, not {type(got).__name__}{hint}")


def _refuse_key(name: str, length: int) -> NoReturn:
    reason = "cannot be empty" if length == 0 else "longer than a key may be, in bytes"
    raise InvalidArgumentError(field=name, reason=reason, limit=MAX_KEY_BYTES, actual=length)


def _refuse_value(name: str, length: int, limit: int) -> NoReturn:
    raise InvalidArgumentError(
        field=name, reason="longer than a value may be, in bytes", limit=limit, actual=length
    )
