"""The limits of keys, values and arguments, checked in the call before anything is sent.

The checks over columns are C-level passes; the bad row is searched for only after a check failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES, MAX_TTL_MS

DURABILITIES = ("all_in_sync", "primary")

_ONLY_BYTES = frozenset((bytes,))
_PAGE_ROWS_MAX = (1 << 32) - 1


def check_key(key: object) -> bytes:
    """Return the key as ``bytes``; raise unless it is bytes of an allowed length."""
    if type(key) is not bytes:
        key = _as_bytes("key", key)
    if not 0 < len(key) <= MAX_KEY_BYTES:
        _refuse_key("key", len(key))
    return key


def check_value(value: object, max_value_bytes: int) -> bytes:
    """Return the value as ``bytes``; raise unless it is bytes of at most ``max_value_bytes``."""
    if type(value) is not bytes:
        value = _as_bytes("value", value)
    if len(value) > max_value_bytes:
        _refuse_value("value", len(value), max_value_bytes)
    return value


def check_key_part(name: str, part: object) -> bytes:
    """Return a prefix or a bound of keys as ``bytes``; raise unless it is bytes, and no longer than
    a key.
    """
    if type(part) is not bytes:
        part = _as_bytes(name, part)
    if len(part) > MAX_KEY_BYTES:
        _refuse_key(name, len(part))
    return part


def check_keys(keys: Sequence[object], first_row: int = 0) -> Sequence[bytes]:
    """Return the keys as ``bytes``; raise unless every key is valid. The error names the row."""
    if not keys:
        return ()
    checked = _all_bytes("key", keys, first_row)
    lengths = list(map(len, checked))
    if min(lengths) < 1 or max(lengths) > MAX_KEY_BYTES:
        row = next(i for i, n in enumerate(lengths) if not 0 < n <= MAX_KEY_BYTES)
        _refuse_key(f"key of row {first_row + row}", lengths[row])
    return checked


def check_values(
    values: Sequence[object], max_value_bytes: int, first_row: int = 0
) -> Sequence[bytes]:
    """Return the values as ``bytes``; raise unless every value is within the limit. The error names
    the row.
    """
    if not values:
        return ()
    checked = _all_bytes("value", values, first_row)
    if max(map(len, checked)) > max_value_bytes:
        lengths = list(map(len, checked))
        row = next(i for i, n in enumerate(lengths) if n > max_value_bytes)
        _refuse_value(f"value of row {first_row + row}", lengths[row], max_value_bytes)
    return checked


def _all_bytes(what: str, column: Sequence[object], first_row: int) -> Sequence[bytes]:
    if _ONLY_BYTES.issuperset(map(type, column)):
        return cast("Sequence[bytes]", column)
    return [_as_bytes(f"{what} of row {first_row + row}", one) for row, one in enumerate(column)]


def check_positive(name: str, number: object) -> None:
    """Raise unless ``number`` is an int above 0."""
    if type(number) is not int:
        raise TypeError(f"{name} must be an int, not {type(number).__name__}")
    if number <= 0:
        raise InvalidArgumentError(field=name, reason=f"must be above 0, not {number}")


def check_page_rows(page_rows: object) -> None:
    """Raise unless ``page_rows`` is an int that fits into a request."""
    check_positive("page_rows", page_rows)
    _check_most("page_rows", page_rows, _PAGE_ROWS_MAX)


def check_ttl(ttl_ms: object, name: str = "ttl_ms") -> None:
    """Raise unless ``ttl_ms`` is None or a number of milliseconds from 1 to a hundred years."""
    if ttl_ms is None:
        return
    check_positive(name, ttl_ms)
    _check_most(name, ttl_ms, MAX_TTL_MS)


def check_ttls(ttls: Sequence[object], first_row: int = 0) -> Sequence[int] | None:
    """Return the rows' times to live with 0 for None, or None if no row has one; raise unless each
    is None or valid for ``check_ttl``.
    """
    if all(ttl_ms is None for ttl_ms in ttls):
        return None
    for row, ttl_ms in enumerate(ttls):
        if ttl_ms is not None and not (type(ttl_ms) is int and 0 < ttl_ms <= MAX_TTL_MS):
            check_ttl(ttl_ms, f"ttl_ms of row {first_row + row}")
    return [cast("int", ttl_ms) or 0 for ttl_ms in ttls]


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
    """Raise unless ``durability`` is the name of a durability."""
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


def _as_bytes(name: str, got: object) -> bytes:
    if isinstance(got, bytes | bytearray | memoryview):
        return bytes(got)
    hint = "; encode text first, as in text.encode()" if isinstance(got, str) else ""
    raise TypeError(f"{name} must be bytes, not {type(got).__name__}{hint}")


def _refuse_key(name: str, length: int) -> NoReturn:
    reason = "cannot be empty" if length == 0 else "longer than a key may be, in bytes"
    raise InvalidArgumentError(field=name, reason=reason, limit=MAX_KEY_BYTES, actual=length)


def _refuse_value(name: str, length: int, limit: int) -> NoReturn:
    raise InvalidArgumentError(
        field=name, reason="longer than a value may be, in bytes", limit=limit, actual=length
    )
