"""The bench of tests of a node's parts; ``@pytest.mark.bench(…)`` has its options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.node.kit.held_writer import engine_bench
from tests.node.kit.loads_bench import loads_bench


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Any]:
    """The bench of the class that the test names; the hook of asynchronous tests enters it."""
    makers: dict[str, Callable[..., AbstractAsyncContextManager[Any]]] = {
        "Bench": engine_bench,
        "LoadsBench": loads_bench,
    }
    make = makers[request.function.__annotations__["bench"]]
    mark = request.node.get_closest_marker("bench")
    return make(tmp_path, **(mark.kwargs if mark is not None else {}))
