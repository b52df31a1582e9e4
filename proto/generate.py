"""Generate the Python modules that say what the .proto files say, or check that they are up to date
(--check).

Beside each .proto file: its messages and stubs (``*_pb2*``). The options of ``options.proto`` are
left out of these, so that no process parses them; from them and from the messages ``emit.py``
writes the modules of ``MODULES`` (``*_gen.py``), which need no protobuf.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc_tools  # type: ignore[import-untyped]
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

import emit

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(
    source
    for path in ROOT.glob("koinon_proto/v1/*.proto")
    if (source := path.relative_to(ROOT).as_posix()) != emit.OPTIONS
)
MODULES = {
    "koinon_proto/contract/bounds_gen.py": emit.bounds,
    "koinon_proto/contract/errors_gen.py": emit.errors,
    "koinon_proto/security/callers_gen.py": emit.callers,
}


def generate(out: Path) -> None:
    """Write all generated modules below ``out``."""
    contract = read_contract()
    plain = FileDescriptorSet(file=map(_without_options, contract.files))
    with tempfile.NamedTemporaryFile() as described:
        Path(described.name).write_bytes(plain.SerializeToString())
        _protoc(
            f"--descriptor_set_in={described.name}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
        )
    for source in SOURCES:  # a file without services needs no stubs
        if "\nservice " not in (ROOT / source).read_text():
            (out / source).with_name(Path(source).stem + "_pb2_grpc.py").unlink()
    for path, write in MODULES.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(emit.formatted(write(contract)), encoding="utf-8")


def read_contract() -> emit.Contract:
    """Return the description of all .proto files, with their options."""
    with tempfile.NamedTemporaryFile() as described:
        _protoc(
            f"--proto_path={ROOT}",
            f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
            "--include_imports",
            "--include_source_info",  # comments, which stubs repeat
            f"--descriptor_set_out={described.name}",
        )
        return emit.Contract(Path(described.name).read_bytes())


def _protoc(*arguments: str) -> None:
    code = protoc.main(["protoc", *arguments, *SOURCES])
    if code != 0:
        raise SystemExit(code)


def _without_options(file: Any) -> FileDescriptorProto:
    """Return a file's description without the options that ``options.proto`` defines."""
    plain = FileDescriptorProto.FromString(file.SerializeToString())
    del plain.dependency[:]
    plain.dependency.extend(name for name in file.dependency if name != emit.OPTIONS)
    messages = list(plain.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        message.ClearField("options")
        for field in message.field:
            field.ClearField("options")
            field.ClearField("json_name")  # it follows from the name
    for service in plain.service:
        service.ClearField("options")
        for method in service.method:
            method.ClearField("options")
    return plain


def check() -> int:
    """Return how many generated files are missing, stale or left over; name each."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, present = _generated(Path(scratch)), _generated(ROOT)
    bad = sorted(path for path in fresh.keys() | present if fresh.get(path) != present.get(path))
    for path in bad:
        print(f"proto/{path} is not what its .proto says: run `make proto`", file=sys.stderr)
    return len(bad)


def _generated(folder: Path) -> dict[str, bytes]:
    """Return the generated files below a folder by their names there."""
    found: Iterable[Path] = (*folder.rglob("*_pb2*.py*"), *folder.rglob("*_gen.py"))
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in found
        if path.suffix in {".py", ".pyi"}
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(1 if check() else 0)
    generate(ROOT)
