"""Numbers with units, as operators type them."""

from __future__ import annotations

import typer

from koinon.core.quantities import parse_size

MAX_PARTITION = (1 << 16) - 1
DIGITS_MAX = 20
"""A longer number fits nowhere; Python refuses to read very long ones."""
UINT32_MAX, INT64_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
"""Bounds of the fields that carry a number; the coordinators have closer ones of their own."""
_NO_LIMIT = ("off", "none", "unlimited")


def bytes_per_second(text: str) -> int:
    """Return what ``50MB``, ``1GiB`` or ``800k`` mean; 0 for ``0`` and ``off``."""
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
    """Return what ``5000`` means; 0 for ``0`` and ``off``."""
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return 0
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) >= INT64_MAX:
        raise typer.BadParameter(f"{text!r} is no number of rows a second: write 5000, or none")
    return int(text)


def partition_ids(text: str) -> list[int]:
    """Return the partitions (one at least) that ``3``, ``3,7`` or ``0-15,40`` name, ascending."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise typer.BadParameter(f"{text!r} names no partitions: write 3 or 0-15,40")
        if max(len(first), len(last)) > DIGITS_MAX or int(last or first) > MAX_PARTITION:
            raise typer.BadParameter(f"{text!r}: there are not so many partitions")
        begin, end = int(first), int(last or first)
        if end < begin:  # no partitions would be taken for all of them
            raise typer.BadParameter(f"{text!r}: {begin}-{end} ends before it begins")
        found.update(range(begin, end + 1))
    return sorted(found)
