"""Keys of places: their cells, their forms, and where routers put them."""

from __future__ import annotations

import subprocess
import sys

import h3
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon import geo
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.partitioner import partitioner

SAN_FRANCISCO = (37.7752702151959, -122.418307270836)
LATITUDES = st.floats(-90, 90)
LONGITUDES = st.floats(-180, 180)


def test_key_is_the_cell_in_eight_bytes_and_the_id() -> None:
    key = geo.cell_key(*SAN_FRANCISCO, b"/driver/7", 9)
    assert key == bytes.fromhex("08928308280fffff") + b"/driver/7"
    assert geo.cell_key(*SAN_FRANCISCO, "/ä", 9)[8:] == "/ä".encode()
    assert geo.cell_key(*SAN_FRANCISCO, memoryview(b""), 9) == key[:8]


@settings(max_examples=200, deadline=None)
@given(
    places=st.lists(st.tuples(LATITUDES, LONGITUDES, st.binary(max_size=9)), max_size=20),
    resolution=st.integers(0, 15),
)
def test_columns_agree_with_single_keys_and_with_h3(
    places: list[tuple[float, float, bytes]], resolution: int
) -> None:
    lats = [lat for lat, _, _ in places]
    lngs = [lng for _, lng, _ in places]
    ids = [one for _, _, one in places]
    found = geo.cell_keys(lats, lngs, ids, resolution)
    assert found == [geo.cell_key(*place, resolution) for place in places]
    assert found == geo.cell_keys(np.array(lats), pd.Series(lngs, dtype=float), ids, resolution)
    for key, (lat, lng, last) in zip(found, places, strict=True):
        assert key.hex()[:16].lstrip("0") == h3.latlng_to_cell(lat, lng, resolution)
        assert key[8:] == last


@settings(max_examples=200, deadline=None)
@given(lat=LATITUDES, lng=LONGITUDES, finer=st.integers(3, 15))
def test_router_hashes_the_parent_that_h3_says(lat: float, lng: float, finer: int) -> None:
    """The parent of a cell at a finer resolution, at any place, is the one that h3 finds."""
    cell = h3.latlng_to_cell(lat, lng, finer)
    parent = h3.cell_to_parent(cell, 3)
    routed = partitioner("murmur2(h3:3)", 60)
    assert routed.routing_bytes(geo.cell_key(lat, lng, b"/x", finer)).hex() == parent.zfill(16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((91.0, 0.0, b"", 3), "lat of row 0"),
        ((0.0, -180.5, b"", 3), "lng of row 0"),
        ((float("nan"), 0.0, b"", 3), "lat of row 0"),
        ((0.0, float("inf"), b"", 3), "lng of row 0"),
        ((0.0, 0.0, b"", 16), "resolution"),
        ((0.0, 0.0, b"", -1), "resolution"),
        ((0.0, 0.0, b"x" * 493, 3), "too long"),
    ],
)
def test_what_is_no_place_is_refused(given: tuple[float, float, bytes, int], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        geo.cell_key(*given)


def test_columns_name_the_row_and_must_be_of_one_length() -> None:
    with pytest.raises(InvalidArgumentError, match=r"lat of row 1"):
        geo.cell_keys([0, 90.1], [0, 0], [b"", b""], 3)
    with pytest.raises(InvalidArgumentError, match=r"id of row 1"):
        geo.cell_keys([0, 0], [0, 0], [b"", b"x" * 500], 3)
    with pytest.raises(InvalidArgumentError, match="as many"):
        geo.cell_keys([0, 0], [0, 0], [b""], 3)
    with pytest.raises(TypeError, match="an id must be"):
        geo.cell_key(0, 0, 7, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resolution"):
        geo.cell_key(0, 0, b"", 3.0)  # type: ignore[arg-type]


def test_without_h3_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['h3'] = None\nimport koinon.geo"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "ImportError: koinon.geo needs the package h3: pip install 'koinon[geo]'" in ended.stderr
