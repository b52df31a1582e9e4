"""Generate the Python code beside the .proto files, or check that it is up to date (--check)."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("koinon_proto/v1/*.proto"))


def generate(out: Path) -> None:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` for every source below ``out``."""
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *SOURCES,
        ]
    )
    if code != 0:
        raise SystemExit(code)
    for source in SOURCES:  # a file without services needs no stubs
        if "\nservice " not in (ROOT / source).read_text():
            (out / source).with_name(Path(source).stem + "_pb2_grpc.py").unlink()


def check() -> int:
    """Return how many generated files are missing, stale or left over; name each."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {p.relative_to(scratch) for p in Path(scratch).rglob("*_pb2*")}
        present = {p.relative_to(ROOT) for p in ROOT.rglob("*_pb2*") if p.suffix in {".py", ".pyi"}}
        bad = sorted(fresh ^ present) + sorted(
            p
            for p in fresh & present
            if not filecmp.cmp(Path(scratch) / p, ROOT / p, shallow=False)
        )
    for path in bad:
        print(f"proto/{path} is not what its .proto says: run `make proto`", file=sys.stderr)
    return len(bad)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(1 if check() else 0)
    generate(ROOT)
