"""A folder with modules that bear the names of the standard library's, of our packages and of those
that we need: somebody else's folder for temporary files, from which our programs are called.
"""

from __future__ import annotations

import sys
from pathlib import Path

RAN = "ran"
_PACKAGES = ("grpc", "lmdb", "numpy", "pyarrow", "pyspark", "hiredis", "uvloop", "typer", "msgpack")
_OURS = ("koinon", "koinon_node", "koinon_coordinator", "koinon_proto", "pyspark_koinon")


def make_hostile(directory: Path) -> None:
    """Fill the directory. Each module notes its name when it is imported, see ``ran_in``."""
    directory.mkdir(exist_ok=True)
    names = {name for name in sys.stdlib_module_names if not name.startswith("_")}
    for name in (*names, *_PACKAGES, *_OURS):
        note = f"open({str(directory / RAN)!r}, 'a').write({name + ' '!r})\n"
        (directory / f"{name}.py").write_text(note)


def ran_in(directory: Path) -> str:
    """Return the names of the modules of the directory that were imported."""
    note = directory / RAN
    return note.read_text() if note.exists() else ""
