"""Any records of a class, for tests of their conversions: drawn by the hints of their fields."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

SCALARS: dict[type[Any], st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    float: st.floats(0, 2**60),
    int: st.integers(0, 2**32 - 1),
    str: st.text(max_size=8),
}


def records(
    record: type[Any], special: Mapping[Any, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[Any]:
    """Return a strategy of records. ``special`` has strategies of classes, and of fields by their
    names, which are drawn otherwise.
    """
    own = {**SCALARS, **(special or {})}
    if record in own:
        return own[record]
    hints = get_type_hints(record, vars(sys.modules[record.__module__]), {})
    names = [f.name for f in fields(record)] if is_dataclass(record) else record._fields
    return st.builds(record, **{n: own[n] if n in own else _values(hints[n], own) for n in names})


def _values(hint: Any, own: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    hint = getattr(hint, "__supertype__", hint)
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return st.none() | _values(next(a for a in arguments if a is not NoneType), own)
    if get_origin(hint) is tuple and arguments[1:] == (...,):
        return st.lists(_values(arguments[0], own), max_size=3).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*(_values(argument, own) for argument in arguments))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    return records(hint, own)
