"""Parses and formats durations and sizes."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_duration_ms(text: str) -> int:
    """Parse ``500ms``, ``30s``, ``5m``, ``2h`` or ``1d`` as milliseconds.

    Raises:
        ValueError: the text has another form.
        OverflowError: the duration is infinite.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no duration: write 500ms, 30s, 5m, 2h or 1d")
    return int(float(match[1]) * _UNIT_MS[match[2]])


def duration_of(ms: int) -> str:
    """Format a duration for ``parse_duration_ms``, in the greatest unit that is exact."""
    unit = next(unit for unit in reversed(_UNIT_MS) if ms % _UNIT_MS[unit] == 0)
    return f"{ms // _UNIT_MS[unit]}{unit}"


def parse_size(text: str) -> int:
    """Parse ``50MB``, ``1GiB``, ``800k`` or ``1048576`` as bytes.

    Raises:
        ValueError: the text has another form.
        OverflowError: the size is infinite.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 50MB, 1GiB or 1048576")
    unit = 1024 if match[3] else 1000
    return int(float(match[1]) * unit ** _POWERS[match[2]])
