"""Values of Lua 5.1 in Python, and Lua's operators on them.

nil is None; numbers are floats; strings are bytes; a table is a ``Table``. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_NUMBER = re.compile(
    rb"\s*([+-]?)(0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*"
)
_NUMBER_BYTES_MAX = 400


class Table(dict["Value", "Value"]):
    """A Lua table. Two tables are equal only if they are the same object."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    @classmethod
    def of(cls, values: list[Value]) -> Table:
        """Build an array; nil leaves a gap."""
        return cls((float(at), v) for at, v in enumerate(values, 1) if v is not None)

    def array(self) -> list[Value]:
        """Return the values from 1 on, up to the first gap."""
        found: list[Value] = []
        while (value := self.get(float(len(found) + 1))) is not None:
            found.append(value)
        return found


class Library(Table):
    """A table that all scripts share; no script may change it."""


Builtin = Callable[[list["Value"]], "Value"]
Value = None | bool | float | bytes | Table | Builtin


class LuaError(Exception):
    """A script failed. ``value`` is the error object that ``error`` raised, mostly a message."""

    def __init__(self, value: Value) -> None:
        super().__init__(text_of(value))
        self.value = value


def is_true(value: Value) -> bool:
    """Return whether the value counts as true in a condition."""
    return value is not None and value is not False


def type_of(value: Value) -> str:
    """Return the name of the value's type."""
    names = {type(None): "nil", bool: "boolean", float: "number", bytes: "string", Table: "table"}
    return names.get(type(value), "function")


def number_of(value: Value) -> float | None:
    """Convert a number or a numeric string to a number; return None for other values."""
    if type(value) is float:
        return value
    if isinstance(value, bytes) and len(value) <= _NUMBER_BYTES_MAX:
        found = _NUMBER.fullmatch(value)
        if found is not None:
            sign = -1.0 if found[1] == b"-" else 1.0
            if found[2][:2].lower() != b"0x":
                return sign * float(found[2])
            number = int(found[2], 16)
            return sign * (float(number) if number.bit_length() < 1024 else float("inf"))
    return None


def text_of(value: Value, digits: int = 14) -> str:
    """Convert the value like ``tostring``, with one character per byte."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    return f"{value:.{digits}g}" if isinstance(value, float) else type_of(value)


def bytes_of(value: Value, digits: int = 14) -> bytes:
    """Convert the value like ``tostring``, to bytes."""
    return text_of(value, digits).encode("latin-1")


def are_equal(a: Value, b: Value) -> bool:
    """Compare two values with ``==``: values of different types are never equal."""
    return type(a) is type(b) and a == b


def is_less(a: Value, b: Value) -> bool:
    """Compare two values with ``<``.

    Raises:
        LuaError: the values are neither two numbers nor two strings.
    """
    if isinstance(a, float) and isinstance(b, float) and not isinstance(a, bool):
        return a < b
    if isinstance(a, bytes) and isinstance(b, bytes):
        return a < b
    raise LuaError(f"attempt to compare {type_of(a)} with {type_of(b)}".encode())


def calculated(operator: str, a: Value, b: Value) -> Value:
    """Compute an arithmetic operator.

    Raises:
        LuaError: an operand is no number.
    """
    x, y = number_of(a), number_of(b)
    if x is None or y is None:
        wrong = a if x is None else b
        raise LuaError(f"attempt to perform arithmetic on a {type_of(wrong)} value".encode())
    try:
        match operator:
            case "+":
                return x + y
            case "-":
                return x - y
            case "*":
                return x * y
            case "/":
                return x / y
            case "%":
                return x % y
            case _:
                return math.pow(x, y)
    except ValueError:  # 0 to a negative power, or a negative number to a fractional power
        return math.nan if x else math.inf
    except OverflowError:  # a power; only an odd power of a negative number is negative
        return math.copysign(math.inf, x) if math.fmod(y, 2) else math.inf
    except ZeroDivisionError:
        return math.nan if not x or operator == "%" else math.copysign(math.inf, x)


def joined(a: Value, b: Value) -> bytes:
    """Concatenate two values, as ``..`` does.

    Raises:
        LuaError: an operand is neither a string nor a number.
    """
    for value in (a, b):
        if not isinstance(value, bytes | float) or isinstance(value, bool):
            raise LuaError(f"attempt to concatenate a {type_of(value)} value".encode())
    return bytes_of(a) + bytes_of(b)
