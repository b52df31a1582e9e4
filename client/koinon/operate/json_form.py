"""The form of answers for programs: plain JSON types."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

IF_KNOWN: Mapping[str, Any] = {"json": "if known"}
"""Metadata of a field that JSON contains only if it is not None."""
HIDDEN: Mapping[str, Any] = {"json": "never"}
"""Metadata of a field that JSON never contains."""


def json_of(value: Any) -> Any:
    """Return a value as plain types: dataclasses by their fields, enum members by their names,
    bytes as text or ``{"base64": …}``. JSON drops the trailing ``_`` of a field's name.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return json_bytes(value)
    if is_dataclass(value):
        return dict(_fields_of(value))
    if isinstance(value, Mapping):
        return {key: json_of(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_of(part) for part in value]
    return value


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    for described in fields(value):
        part, told = getattr(value, described.name), described.metadata.get("json")
        if told != "never" and not (told and part is None):
            yield described.name.removesuffix("_"), json_of(part)


def json_bytes(data: bytes) -> str | dict[str, str]:
    """Return bytes as text if they are UTF-8, else ``{"base64": …}``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
