"""Formats and parses dates and timestamps of years that Arrow or Python does not support.

Texts are ISO 8601 in the proleptic Gregorian calendar: year 0 is 1 BC, years before it begin with
``-``, years after 9999 with ``+``: ``-0044-03-15``, ``+12000-01-01``. The calendar repeats every
400 years, so Python's own dates suffice for the computation.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
_BASE: Final = dt.date(2000, 1, 1)
_BASE_DAYS: Final = (_BASE - dt.date(1970, 1, 1)).days
_DAY_S: Final = 86_400
_DATE: Final = re.compile(r"([+-]?\d{4,7})-(\d\d)-(\d\d)")
_TIMESTAMP: Final = re.compile(
    _DATE.pattern + r"[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?(Z?)", re.ASCII
)
COUNTS_PER_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""By units of Arrow's timestamps."""


def date_text(days: int) -> str:
    """Format a date, given in days since 1970."""
    cycles, rest = divmod(days - _BASE_DAYS, _CYCLE_DAYS)
    day = _BASE + dt.timedelta(rest)
    year = day.year + _CYCLE_YEARS * cycles
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    return f"{sign}{abs(year):04}-{day:%m-%d}"


def timestamp_text(count: int, unit: str) -> str:
    """Format a timestamp, given in units (``s`` to ``ns``) since 1970: six digits of fractions,
    nine for nanoseconds.
    """
    seconds, rest = divmod(count, COUNTS_PER_SECOND[unit])
    days, second = divmod(seconds, _DAY_S)
    nanos = rest * (1_000_000_000 // COUNTS_PER_SECOND[unit])
    fraction = f"{nanos:09}" if nanos % 1000 else f"{nanos // 1000:06}"
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    return f"{date_text(days)}T{clock}.{fraction}"


def days_of(text: str) -> int:
    """Parse a date; return its days since 1970.

    Raises:
        ValueError: the text is no date.
    """
    found = _DATE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no date")
    return _days(*found.groups())


def micros_of(text: str, *, zoned: bool) -> int:
    """Parse a timestamp; return its microseconds since 1970, with further digits cut off.
    ``zoned``: the text ends in ``Z``; else it has no zone.

    Raises:
        ValueError: the text is no such timestamp.
    """
    found = _TIMESTAMP.fullmatch(text)
    if found is None or bool(found[8]) != zoned:
        raise ValueError(f"{text[:40]!r} is no timestamp")
    year, month, day, hour, minute, second, fraction, _ = found.groups()
    clock = dt.time(int(hour), int(minute), int(second or 0))
    seconds = _days(year, month, day) * _DAY_S
    seconds += clock.hour * 3600 + clock.minute * 60 + clock.second
    return seconds * 1_000_000 + int((fraction or "").ljust(6, "0")[:6])


def _days(year: str, month: str, day: str) -> int:
    cycles, rest = divmod(int(year) - _BASE.year, _CYCLE_YEARS)
    same = dt.date(_BASE.year + rest, int(month), int(day))
    return (same - _BASE).days + _BASE_DAYS + cycles * _CYCLE_DAYS
