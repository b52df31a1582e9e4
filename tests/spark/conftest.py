"""Fixtures: a fake cluster with loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark.fake_loads import LoadsCluster


@pytest.fixture
def fake() -> Iterator[LoadsCluster]:
    cluster = LoadsCluster()
    yield cluster
    cluster.close()
