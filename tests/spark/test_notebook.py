"""The cells of docs/notebook.md, one after the other, as a notebook runs them."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs/notebook.md"


async def _run_cells(cells: list[str]) -> dict[str, Any]:
    """Run the cells in one namespace, ``await`` at their top level included; return it."""
    names: dict[str, Any] = {}
    for cell in cells:
        code = compile(cell, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        # A notebook's cells run in one thread, beside the loop that their clients may belong to.
        result = eval(code, names)  # what the page says, which is ours
        if inspect.iscoroutine(result):
            await result
    return names


@pytest.mark.long
def test_cells_of_the_notebook_page_run_and_show_what_they_say(spark: SparkSession) -> None:
    cells = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(cells) == 5
    shown, count = re.subn(
        r"^(client.*)  # (b'.*')$", r"assert \1 == \2", "\0".join(cells), flags=re.M
    )
    assert count == 1
    names = asyncio.run(_run_cells(shown.split("\0")))
    try:
        client = names["client"]
        assert client.get(b"greeting") == b"hello"
        assert client.get(b"key:999") == b"value"
        assert len(names["versions"]) == 1_000
    finally:
        names["client"].close()
        names["cluster"].close()
