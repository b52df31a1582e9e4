"""Encodes columns as keys, so that keys sort like the columns, byte by byte.

One column:

- binary: as it is; string: its UTF-8.
- integers, but for unsigned ones of 64 bits: 8 bytes, big-endian, the sign bit flipped: 0 is
  ``80 00 00 00 00 00 00 00`` and -1 is ``7f ff ff ff ff ff ff ff``. With ``keyEncoding`` ``text``,
  and unsigned of 64 bits: decimal digits, ``-`` before a negative number; those do not sort like
  the numbers.
- anything else but lists, structs and maps: the text that it has in JSON, without quotes.

Several columns: the parts one after the other. An integer's 8 bytes as above. Binary, strings and
integers as text: each byte 00 written as 00 ff, then the end, 00 00. Which columns a key has is not
written in it: its reader has to know.

``key_bytes`` makes the same key of Python values, for any client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from koinon_proto.contract.errors import InvalidArgumentError

if TYPE_CHECKING:
    from koinon.spark.encoding.arrays import I64Array

_SIGN: Final = 1 << 63
_END: Final = b"\x00\x00"
_ZERO, _ESCAPED_ZERO = b"\x00", b"\x00\xff"


def key_bytes(*parts: bytes | str | int, encoding: str = "binary") -> bytes:
    """Return the key of these column values. ``encoding``: as option ``keyEncoding``.

    >>> key_bytes("user", 7)
    b'user\x00\x00\x80\x00\x00\x00\x00\x00\x00\x07'

    Raises:
        InvalidArgumentError: there is no part, a part has another type, or an integer exceeds 64
            bits.
    """
    if not parts:
        raise InvalidArgumentError(field="parts", reason="a key has at least one")
    joined = [_part(part, encoding, several=len(parts) > 1) for part in parts]
    return b"".join(joined)


def _part(part: bytes | str | int, encoding: str, *, several: bool) -> bytes:
    if type(part) is int and encoding == "binary":
        if not -_SIGN <= part < _SIGN:
            raise InvalidArgumentError(field="parts", reason=f"{part} has more than 64 bits")
        return (part + _SIGN).to_bytes(8, "big")
    if type(part) is int:
        part = str(part)
    if isinstance(part, str):
        part = part.encode()
    if not isinstance(part, bytes):
        raise InvalidArgumentError(
            field="parts", reason=f"bytes, str or int make a key, not {type(part).__name__}"
        )
    return part.replace(_ZERO, _ESCAPED_ZERO) + _END if several else part


def encode_keys(columns: Sequence[Any], encoding: str) -> Any:
    """Encode Arrow columns of one length as keys, a ``binary`` array; null if a part is null.

    Raises:
        InvalidArgumentError: a column holds lists, structs or maps, or a type without a JSON form.
    """
    if len(columns) == 1:
        return _encoded(columns[0], encoding)
    from koinon.spark.encoding import arrays

    return arrays.join(*(_encoded_part(column, encoding) for column in columns))


def _encoded(column: Any, encoding: str) -> Any:
    """Encode the only column of a key."""
    import pyarrow as pa

    from koinon.spark.encoding.json_values import encode_texts
    from koinon.spark.encoding.plain_types import plain_type

    kind = plain_type(column.type)
    if _is_ordered(kind, encoding):
        return _ordered(column)
    if pa.types.is_nested(kind):
        raise InvalidArgumentError(
            field="keyColumn", reason=f"a column of type {kind} makes no key; cast it to a string"
        )
    return encode_texts(column if column.type == kind else column.cast(kind), "the key")


def _is_ordered(kind: Any, encoding: str) -> bool:
    """Return whether a column of this type becomes 8 bytes that sort like its numbers."""
    import pyarrow as pa

    return encoding == "binary" and pa.types.is_integer(kind) and kind != pa.uint64()


def _encoded_part(column: Any, encoding: str) -> Any:
    """Encode one of several columns of a key."""
    import pyarrow.compute as pc

    from koinon.spark.encoding import arrays
    from koinon_proto.contract.arrow import binary_scalar

    encoded = _encoded(column, encoding)
    if _is_ordered(column.type, encoding):
        return encoded
    if not arrays.contents_of(encoded).all():
        encoded = pc.replace_substring(encoded, _ZERO, _ESCAPED_ZERO)
    return arrays.join(encoded, binary_scalar(_END))


def _ordered(column: Any) -> Any:
    """Encode integers as 8 bytes that sort like them."""
    import numpy as np

    from koinon.spark.encoding import arrays

    numbers: I64Array = arrays.numbers_of(column, np.int64)
    flipped = (numbers.view(np.uint64) ^ np.uint64(_SIGN)).astype(">u8")
    rows = flipped.view(np.uint8).reshape(len(numbers), 8)
    return arrays.masked(arrays.from_matrix(rows), column)
