"""Converts messages of replies into plain values with the same field names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, cast

V = TypeVar("V")


def view(kind: type[V], message: Any, **other: Any) -> V:
    """Build a dataclass ``kind`` from the message's fields of the same names; repeated fields
    become tuples. ``other``: values of fields that the message lacks, or has in another type.
    """
    values = dict(other)
    for name in (field.name for field in fields(cast(Any, kind))):
        if name not in values:
            value = getattr(message, name)
            values[name] = tuple(value) if hasattr(value, "extend") else value
    return kind(**values)
