"""Numbers with units, as operators type them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import typer
from typer.models import OptionInfo

from koinon.core.quantities import duration_of, parse_size
from koinon_proto.contract.errors import InvalidArgumentError

MAX_PARTITION = (1 << 16) - 1
DIGITS_MAX = 20
"""The length limit of a number; longer ones fit in no field, and Python refuses to read very long
ones.
"""
UINT32_MAX, INT64_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
"""The ranges of the fields that carry a number; coordinators have narrower limits of their own."""
_NO_LIMIT = ("off", "none", "unlimited")


_UNITS = re.compile(r"_(ms|bytes)$")
_OPTION_OF = {"partition_count": "partitions"}
"""Fields of requests whose options have another name, beside those that differ only by the unit."""


def options_of(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """Return the options among a command's parameters: the flag by the parameter's name."""
    found = {}
    for parameter in parameters:
        (info, *_) = getattr(parameter.annotation, "__metadata__", (None,))
        if isinstance(info, OptionInfo):
            flags = [flag for flag in info.param_decls or () if flag.startswith("--")]
            found[parameter.name] = (flags or [f"--{parameter.name.replace('_', '-')}"])[0]
    return found


def as_given(error: InvalidArgumentError, options: Mapping[str, str]) -> InvalidArgumentError:
    """Return the error in terms of the command line: with the option instead of the request's
    field, and with durations as typed, ``30d``, instead of milliseconds.

    Args:
        options: the command's options, the flag by the parameter's name. A field without an option
            keeps its name.
    """
    name = _UNITS.sub("", error.field)
    option = options.get(_OPTION_OF.get(name, name))
    if option is None:
        return error
    reason, limit, actual = error.reason, error.limit, error.actual
    if error.field.endswith("_ms") and limit:
        shown = {str(ms): duration_of(ms) for ms in (limit, actual)}
        reason = re.sub(r"\b\d+\b", lambda found: shown.get(found[0], found[0]), reason)
        reason += f" (limit {duration_of(limit)}, got {duration_of(actual)})"
        limit = actual = 0
    given = replace(error, field=option, reason=reason, limit=limit, actual=actual)
    given.request_id = error.request_id
    return given.with_traceback(error.__traceback__)


def bytes_per_second(text: str) -> int:
    """Parse ``50MB``, ``1GiB`` or ``800k`` as bytes a second; ``0`` and ``off`` are 0."""
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return 0
    try:
        value = parse_size(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no rate: write 50MB, 1GiB, 800kB, or off") from None
    except OverflowError:
        value = INT64_MAX
    if value >= INT64_MAX:
        raise typer.BadParameter(f"{text!r} is more than any network carries")
    if not value and any(digit in text for digit in "123456789"):
        raise typer.BadParameter(f"{text!r} is less than a byte a second")
    return value


def rows_per_second(text: str) -> int:
    """Parse ``5000`` as rows a second; ``0`` and ``off`` are 0."""
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return 0
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) >= INT64_MAX:
        raise typer.BadParameter(f"{text!r} is no number of rows a second: write 5000, or none")
    return int(text)


def partition_ids(text: str) -> list[int]:
    """Parse ``3``, ``3,7`` or ``0-15,40`` as partition ids (one at least), ascending."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise typer.BadParameter(f"{text!r} names no partitions: write 3 or 0-15,40")
        if max(len(first), len(last)) > DIGITS_MAX or int(last or first) > MAX_PARTITION:
            raise typer.BadParameter(f"{text!r}: there are not that many partitions")
        begin, end = int(first), int(last or first)
        if end < begin:  # an empty list would mean all partitions
            raise typer.BadParameter(f"{text!r}: {begin}-{end} ends before it begins")
        found.update(range(begin, end + 1))
    return sorted(found)
