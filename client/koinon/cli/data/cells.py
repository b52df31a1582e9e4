"""Keys and values of the cells of a row, and a whole row as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from koinon.cli.console.output import json_bytes


def encoded(content: Any) -> bytes | None:
    """Return a cell as bytes: text as UTF-8, bytes as they are, anything else as JSON."""
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    return compact(content)


def compact(content: Any) -> bytes:
    """Return it as JSON without spaces."""
    try:
        return _dumped(content)
    except ValueError:
        return _dumped(_with_words(content))


def _dumped(content: Any) -> bytes:
    return json.dumps(
        content,
        ensure_ascii=False,
        separators=(",", ":"),
        default=_json_default,
        allow_nan=False,
    ).encode()


def _with_words(content: Any) -> Any:
    """The same with words for the numbers that JSON has none for, as in Spark and ``ingest``."""
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, dict):
        return {name: _with_words(part) for name, part in content.items()}
    if isinstance(content, list | tuple):
        return [_with_words(part) for part in content]
    return content


def _json_default(content: Any) -> Any:
    return json_bytes(content) if isinstance(content, bytes) else str(content)


def batch_rows(batch: Any, key: str, value: str | None) -> Iterator[tuple[Any, Any]]:
    """Yield (key cell, value cell) of an Arrow record batch."""
    keys = batch.column(batch.schema.get_field_index(key)).to_pylist()
    if value is not None:
        values = batch.column(batch.schema.get_field_index(value)).to_pylist()
        yield from zip(map(encoded, keys), map(encoded, values), strict=True)
        return
    for cell, row in zip(keys, batch.to_pylist(), strict=True):
        yield encoded(cell), compact(row)
