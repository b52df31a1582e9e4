"""Converts records (dataclasses, named tuples) to protobuf messages and back, by field names.

``codec`` is called once for each pair, when a module is imported. It reads the record's type hints
and the message's descriptor, and writes two straight-line functions, as ``dataclasses`` writes an
``__init__``: they are as fast as conversions written by hand. It refuses a pair in which a field of
either side has no counterpart, so a field that is added to one side only fails at import.

What a hint means:

==============================  ==================================================================
``int``, ``str``, ``bytes`` …   the same on both sides; so are ``NewType`` names of them
an ``Enum``                     its number; one that the enum does not have raises ValueError
a dataclass or named tuple      a message, by a codec of its own
``tuple[X, ...]``               repeated
``X | None``                    absent where it is None; only for messages
==============================  ==================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

R = TypeVar("R")
M = TypeVar("M")
P = TypeVar("P", bound=Message)

_SCALARS = (bool, bytes, float, int, str)


@dataclass(frozen=True, slots=True)
class Codec(Generic[R, M]):
    """Both directions between a record and its wire form."""

    encode: Callable[Concatenate[R, ...], M]
    decode: Callable[Concatenate[M, ...], R]


class Value(NamedTuple):
    """Both directions of a single field's value, written by hand."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def codec(
    record: type[R],
    message: type[P],
    *,
    names: Mapping[str, str] | None = None,
    values: Mapping[str, Codec[Any, Any] | Value] | None = None,
    given: Collection[str] = (),
    filled: Collection[str] = (),
    unused: Collection[str] = (),
) -> Codec[R, P]:
    """Return the codec of a record's class and a message's class.

    Args:
        names: the message's names of the record's fields that have others there.
        values: how the values of some fields are converted; of a tuple, each of its elements.
        given: fields of the record that the message lacks; ``decode`` takes them by keyword.
        filled: fields of the message that the record lacks; ``encode`` takes them by keyword.
        unused: fields of the message that are neither written nor read.

    Raises:
        TypeError: a field of either side is not covered, or a hint is none of the above.
    """
    names, values = names or {}, values or {}
    hints = _hints(record)
    carried = [name for name in hints if name not in given]
    wire: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
    strange = {*names, *values, *given} - set(hints)
    strange |= {*(names.get(n, n) for n in carried), *filled, *unused} ^ set(wire)
    if strange:
        raise TypeError(f"{record.__name__} and {message.__name__} differ in {sorted(strange)}")
    scope: dict[str, Any] = {"record_class": record, "message_class": message}
    encoded = [f"{name}={name}" for name in filled]
    decoded = [f"{name}={name}" for name in given]
    for name in carried:
        field = _Field(name, wire[names.get(name, name)], hints[name], scope)
        encode, decode = field.expressions(values.get(name))
        encoded.append(f"{field.wire.name}={encode}")
        decoded.append(f"{name}={decode}")
    return Codec(
        _function("encode", "record", filled, f"message_class({', '.join(encoded)})", scope),
        _function("decode", "message", given, _construction(record, decoded, scope), scope),
    )


class _Field:
    """One field, for which ``expressions`` gives the source of both directions."""

    def __init__(self, name: str, wire: FieldDescriptor, hint: Any, scope: dict[str, Any]) -> None:
        self.wire = wire
        self._name = name
        self._scope = scope  # the names that the source uses; ``expressions`` adds its own
        self._is_optional = get_origin(hint) in (Union, UnionType)
        self._is_repeated = get_origin(hint) is tuple and get_args(hint)[1:] == (...,)
        if self._is_optional:
            hint = next(a for a in get_args(hint) if a is not NoneType)
        elif self._is_repeated:
            hint = get_args(hint)[0]
        self._hint = getattr(hint, "__supertype__", hint)

    def expressions(self, by_hand: Codec[Any, Any] | Value | None) -> tuple[str, str]:
        """Return the source of the message's value, made of ``record``, and of the record's, made
        of ``message``.
        """
        if self.wire.is_repeated != self._is_repeated:
            raise TypeError(f"{self._name}: {self.wire.full_name} is not repeated alike")
        encode, decode = self._converters(by_hand)
        ours, theirs = f"record.{self._name}", f"message.{self.wire.name}"
        if self._is_repeated:
            return (
                f"map({encode}, {ours})" if encode else ours,
                f"tuple(map({decode}, {theirs}))" if decode else f"tuple({theirs})",
            )
        to_wire = f"{encode}({ours})" if encode else ours
        from_wire = f"{decode}({theirs})" if decode else theirs
        if self._is_optional:
            to_wire = f"None if {ours} is None else {to_wire}"
            from_wire = f'{from_wire} if message.HasField("{self.wire.name}") else None'
        return to_wire, from_wire

    def _converters(self, by_hand: Codec[Any, Any] | Value | None) -> tuple[str, str]:
        """Return the names of the functions that convert one value in each direction; "" if the
        value stays as it is.
        """
        if by_hand is None and self._hint in _SCALARS:
            return "", ""
        if by_hand is None and isinstance(self._hint, type) and issubclass(self._hint, IntEnum):
            return "", self._named("enum", _Members(self._hint).__getitem__)
        if by_hand is None:
            if self.wire.message_type is None:
                raise TypeError(f"{self._name}: no way from {self._hint} to {self.wire.full_name}")
            by_hand = codec(self._hint, GetMessageClass(self.wire.message_type))
        return self._named("encode", by_hand.encode), self._named("decode", by_hand.decode)

    def _named(self, kind: str, value: Any) -> str:
        name = f"{kind}_{self._name}"
        self._scope[name] = value
        return name


class _Members(dict[int, IntEnum]):
    """An enum's members by number: rows of a table name some, and to call the enum takes longer
    than the rest of a field.
    """

    def __init__(self, enum: type[IntEnum]) -> None:
        super().__init__((int(member), member) for member in enum)
        self._enum = enum

    def __missing__(self, number: int) -> IntEnum:
        return self._enum(number)  # which raises ValueError


def _construction(record: type[Any], values: list[str], scope: dict[str, Any]) -> str:
    """Return the source that makes a record of ``name=value``, all its fields. A frozen dataclass
    sets its fields by a look-up of each, which takes longer than the rest of a table's row; where
    it has slots and nothing to do afterwards they are filled here.
    """
    frozen = is_dataclass(record) and cast(Any, record).__dataclass_params__.frozen
    if not frozen or not hasattr(record, "__slots__") or hasattr(record, "__post_init__"):
        return f"record_class({', '.join(values)})"
    steps = []
    for value in values:
        name, _, expression = value.partition("=")
        scope[f"fill_{name}"] = getattr(record, name).__set__
        steps.append(f"fill_{name}(made, {expression})")
    scope["new"] = object.__new__
    return f"((made := new(record_class)), {', '.join(steps)})[0]"


def _function(
    name: str, argument: str, keywords: Collection[str], result: str, scope: dict[str, Any]
) -> Any:
    """Compile ``name(argument, *, keywords)``, which returns ``result``."""
    parameters = ", ".join([argument, *(["*", *keywords] if keywords else [])])
    made: dict[str, Any] = {}
    exec(f"def {name}({parameters}):\n    return {result}", scope, made)
    return made[name]


def _hints(record: type[Any]) -> dict[str, Any]:
    """Return the record's fields and their types. A field may be named as a builtin type is, so the
    class itself is no scope for its hints.
    """
    if not is_dataclass(record) and not hasattr(record, "_fields"):
        raise TypeError(f"{record} is neither a dataclass nor a named tuple")
    hints = get_type_hints(record, vars(sys.modules[record.__module__]), {})
    names = [f.name for f in fields(record)] if is_dataclass(record) else record._fields
    return {name: hints[name] for name in names}
