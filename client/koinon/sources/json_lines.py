"""Rows of JSON lines. A whole row as JSON is its line, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from koinon.sources.taken import Made, Maker, Taken
from koinon.sources.text_files import Bounded, Piece, open_text
from koinon.spark.encoding.keys import key_bytes


def json_lines(piece: Piece, taken: Taken, maker: Maker[Made]) -> Iterator[Made]:
    """Yield the rows of a piece, in lots."""
    file, position = open_text(piece.path)
    with file:
        for line in Bounded(file, piece).lines():
            maker.line += 1
            add_line(line, taken, maker)
            if maker.full:
                yield maker.take(position())
        yield maker.take(position())


def add_line(line: bytes, taken: Taken, maker: Maker[Made]) -> None:
    """Add a line to the maker, unless it is blank."""
    line = line.strip()
    if not line:
        return
    try:
        row = _row(line, taken)
    except RecursionError:
        maker.refuse("it is nested too deeply", line)
    except UnicodeEncodeError:
        maker.refuse("it has half of a surrogate pair, which UTF-8 cannot hold", line)
    except (ValueError, OverflowError) as error:
        maker.refuse(f"not JSON: {error}", line)
    except TypeError as error:
        maker.refuse(str(error), line)
    else:
        maker.add(*row)


def _row(line: bytes, taken: Taken) -> tuple[bytes | None, bytes | None, tuple[bytes | None, ...]]:
    """Parse a line into its key, its value and its other cells.

    Raises:
        TypeError: the line is no JSON object.
    """
    # For bytes json guesses the encoding, and accepts halves of surrogate pairs.
    row = json.loads(line.decode(), parse_constant=_no_constant)
    if not isinstance(row, dict):
        raise TypeError(f"not a JSON object but a {type(row).__name__}")
    key: bytes | None
    parts = [_key_part(row.get(name)) for name in taken.key]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        key = None
    elif len(known) == 1 and isinstance(known[0], bytes):
        key = known[0]
    else:
        key = key_bytes(*known, encoding=taken.key_encoding)
    if taken.value is not None:
        value = _cell(row.get(taken.value))
    else:
        value = line if taken.encoding == "json" else _packed(row)
    beside = tuple([_cell(row.get(name)) for name in taken.beside]) if taken.beside else ()
    return key, value, beside


def _no_constant(name: str) -> Any:
    raise ValueError(f"JSON has no number {name}")


def _key_part(content: Any) -> bytes | int | None:
    """Return a cell as a part of a key; an integer of 64 bits stays an integer."""
    if type(content) is int and -(1 << 63) <= content < 1 << 63:
        return content
    return _cell(content)


def _cell(content: Any) -> bytes | None:
    """Return a cell as bytes: text as UTF-8, anything else as compact JSON."""
    if content is None:
        return None
    if isinstance(content, str):
        return content.encode()
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _packed(row: dict[str, Any]) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb(row)
    return packed
