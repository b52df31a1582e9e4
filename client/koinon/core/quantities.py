"""Durations and sizes, as people write them."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of ``500ms``, ``30s``, ``5m``, ``2h`` or ``1d``.

    Raises:
        ValueError: it is none of these.
        OverflowError: it is endless.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no duration: write 500ms, 30s, 5m, 2h or 1d")
    return int(float(match[1]) * _UNIT_MS[match[2]])


def duration_of(ms: int) -> str:
    """Return the duration as ``parse_duration_ms`` reads it, in the greatest unit that is exact."""
    unit = next(unit for unit in reversed(_UNIT_MS) if ms % _UNIT_MS[unit] == 0)
    return f"{ms // _UNIT_MS[unit]}{unit}"


def parse_size(text: str) -> int:
    """Return the bytes of ``50MB``, ``1GiB``, ``800k`` or ``1048576``.

    Raises:
        ValueError: it is none of these.
        OverflowError: it is endless.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 50MB, 1GiB or 1048576")
    unit = 1024 if match[3] else 1000
    return int(float(match[1]) * unit ** _POWERS[match[2]])
