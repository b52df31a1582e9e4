"""Tables of TPC-H as Parquet, made by the PyPI package tpchgen-cli: the same every time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from demo.cities import NoDataError

PROGRAM: Final = "tpchgen-cli"


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its name, the columns of its key, and how many rows it has at scale factor 1."""

    name: str
    key: tuple[str, ...]
    rows_at_scale_1: int


ORDERS: Final = Table("orders", ("o_orderkey",), 1_500_000)
LINEITEM: Final = Table("lineitem", ("l_orderkey", "l_linenumber"), 6_001_215)
PRICE: Final = "o_totalprice"


def make_table(directory: Path, table: Table, rows: int) -> Path:
    """Write about ``rows`` rows to ``directory/NAME.parquet``; return the file's path. Orders are
    exactly so many.

    Raises:
        NoDataError: the generator is not installed, or fails.
    """
    beside = Path(sys.executable).with_name(PROGRAM)
    program = str(beside) if beside.exists() else shutil.which(PROGRAM)
    if program is None:
        raise NoDataError(f"the generator of tables is not installed: pip install {PROGRAM}")
    scale = f"{(rows + 0.5) / table.rows_at_scale_1:.9f}"  # it rounds down
    command = [program, "parquet", "--scale-factor", scale, "--tables", table.name, "--quiet"]
    ended = subprocess.run(
        [*command, "--output-dir", str(directory)], capture_output=True, text=True, check=False
    )
    path = directory / f"{table.name}.parquet"
    if ended.returncode or not path.exists():
        raise NoDataError(f"{PROGRAM} fails: {ended.stderr.strip()[:500]}")
    return path
