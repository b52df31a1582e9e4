"""TPC-H orders in a Parquet file, made by the PyPI package tpchgen-cli: the same every time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from demo.cities import NoDataError

ROWS_AT_SCALE_1 = 1_500_000
KEY = "o_orderkey"
PRICE = "o_totalprice"
PROGRAM = "tpchgen-cli"


def make_orders(directory: Path, rows: int = ROWS_AT_SCALE_1) -> Path:
    """Write about ``rows`` orders to ``directory/orders.parquet``; return the file's path.

    Raises:
        NoDataError: the generator is not installed, or fails.
    """
    beside = Path(sys.executable).with_name(PROGRAM)
    program = str(beside) if beside.exists() else shutil.which(PROGRAM)
    if program is None:
        raise NoDataError(f"the orders' generator is not installed: pip install {PROGRAM}")
    scale = f"{(rows + 0.5) / ROWS_AT_SCALE_1:.9f}"  # it rounds down
    command = [program, "parquet", "--scale-factor", scale, "--tables", "orders", "--quiet"]
    ended = subprocess.run(
        [*command, "--output-dir", str(directory)], capture_output=True, text=True, check=False
    )
    path = directory / "orders.parquet"
    if ended.returncode or not path.exists():
        raise NoDataError(f"{PROGRAM} fails: {ended.stderr.strip()[:500]}")
    return path
