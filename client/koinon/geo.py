"""Keys of places: an H3 cell, then an id. Needs the ``geo`` extra: ``pip install 'koinon[geo]'``.

>>> from koinon import geo
>>> client.put(geo.cell_key(37.775, -122.418, b"/driver/7", 3), b"free")

A key begins with the 8 bytes, big-endian, of the cell that contains the place. With the router
``first:8``, or ``h3:<res>`` of this resolution or a coarser one, all records of one cell are in one
partition, whatever their ids: drivers and riders, for instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from koinon.types import BytesLike
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES

try:
    from h3.api.basic_int import latlng_to_cell
except ImportError as error:
    raise ImportError("koinon.geo needs the package h3: pip install 'koinon[geo]'") from error

CELL_BYTES: Final = 8
FINEST: Final = 15
"""The finest resolution; its cells have about a square metre, and cells of resolution 3 some 12,400
km².
"""

Id = BytesLike | str


def cell_key(lat: float, lng: float, id: Id, resolution: int) -> bytes:  # noqa: A002
    """Return the key of a place: its cell at this resolution (0 to 15), then ``id``; text as UTF-8.

    Args:
        lat: degrees north, -90 to 90.
        lng: degrees east, -180 to 180.

    Raises:
        InvalidArgumentError: the place or the resolution is out of range, or the key would be too
            long.
    """
    return cell_keys((lat,), (lng,), (id,), resolution)[0]


def cell_keys(
    lats: Sequence[float] | np.ndarray[Any, Any],
    lngs: Sequence[float] | np.ndarray[Any, Any],
    ids: Iterable[Id],
    resolution: int,
) -> list[bytes]:
    """Return the key of every place, as ``cell_key`` does; lists, arrays or pandas' columns.

    Raises:
        InvalidArgumentError: as ``cell_key``, by row; or the columns are of unlike length.
    """
    if isinstance(resolution, bool) or not isinstance(resolution, int):
        raise TypeError(f"resolution must be an int, not {type(resolution).__name__}")
    if not 0 <= resolution <= FINEST:
        raise InvalidArgumentError(
            field="resolution", reason="must be 0 to 15", limit=FINEST, actual=resolution
        )
    north, east = _degrees("lat", lats, 90), _degrees("lng", lngs, 180)
    behind = [_as_bytes(one) for one in ids]
    if not len(north) == len(east) == len(behind):
        raise InvalidArgumentError(
            field="ids",
            reason=f"must be as many as places: {len(north)} lat, {len(east)} lng",
            limit=len(north),
            actual=len(behind),
        )
    _check_lengths(behind)
    places = zip(north.tolist(), east.tolist(), strict=True)
    found = (latlng_to_cell(lat, lng, resolution) for lat, lng in places)
    cells = np.fromiter(found, np.uint64, len(behind)).astype(">u8").tobytes()
    heads = range(0, len(cells), CELL_BYTES)
    return [cells[at : at + CELL_BYTES] + one for at, one in zip(heads, behind, strict=True)]


def _degrees(name: str, column: Any, most: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    degrees = np.asarray(column, np.float64)
    good = np.abs(degrees) <= most  # a NaN is out of range, too
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InvalidArgumentError(
            field=f"{name} of row {row}",
            reason=f"must be -{most} to {most} degrees, not {degrees[row]}",
        )
    return degrees


def _as_bytes(one: Id) -> bytes:
    if isinstance(one, str):
        return one.encode()
    if isinstance(one, bytes | bytearray | memoryview):
        return bytes(one)
    raise TypeError(f"an id must be bytes or str, not {type(one).__name__}")


def _check_lengths(ids: Sequence[bytes]) -> None:
    longest = max(map(len, ids), default=0)
    if longest > MAX_KEY_BYTES - CELL_BYTES:
        row = next(row for row, one in enumerate(ids) if len(one) == longest)
        raise InvalidArgumentError(
            field=f"id of row {row}",
            reason="the key would be too long",
            limit=MAX_KEY_BYTES - CELL_BYTES,
            actual=longest,
        )
