"""Plain values made from replies, field by field of the same name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, cast

V = TypeVar("V")


def view(kind: type[V], message: Any, **other: Any) -> V:
    """Return a dataclass ``kind`` with the message's fields of the same names; repeated ones become
    tuples. ``other`` are the values of fields that are not the message's, or not of its types.
    """
    values = dict(other)
    for name in (field.name for field in fields(cast(Any, kind))):
        if name not in values:
            value = getattr(message, name)
            values[name] = tuple(value) if hasattr(value, "extend") else value
    return kind(**values)
