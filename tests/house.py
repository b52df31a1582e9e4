"""What ``make check`` holds of the tree beyond style and types: ``python -m tests.house``.

No two modules import each other, directly or by way of others (imports for type checkers count);
a file name occurs at most twice; files, functions and constructors stay small; a docstring begins
with a verb or a noun, not with a pronoun, and names its object.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "koinon": ROOT / "client",
    "koinon_node": ROOT / "node",
    "koinon_coordinator": ROOT / "coordinator",
    "koinon_proto": ROOT / "proto",
}
FILE_LINES_MAX = 600
FILE_NAME_USES_MAX = 2
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_P99_MAX = 45
CONSTRUCTOR_PARAMETERS_MAX = 6
# "One page of a scan" is a noun's beginning, "One that is lost" is not.
PRONOUN = re.compile(r"(What|That|Those|Which|Whether|It|They|These|One (that|which|who|of))\b")
# "Return what is left" and "How far a copy is" do not name the thing; "Return how many" does.
RIDDLE = re.compile(
    r"(Return|Yield|Take|Give|Send|Keep|Drop)"
    r" (what|where|how far|which|those|whom|who|it|them|all that)\b"
    r"|(How|Where|Who|Why|Of|For how|By how)\b"
)
# The packages whose docstrings have none of them; others still do.
PLAIN_PACKAGES = ("koinon",)

Function = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """A module of the product: its dotted name, its path and its syntax tree."""

    def __init__(self, path: Path, base: Path) -> None:
        self.path = path
        self.shown = str(path.relative_to(base.parent))
        parts = path.relative_to(base).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(path.read_text())

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node

    def imported_names(self) -> Iterator[str]:
        """Yield the dotted names that this module imports, those for type checkers too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def place(self, node: ast.AST) -> str:
        return f"{self.shown}:{getattr(node, 'lineno', 1)}"


def product() -> list[Module]:
    """Return all modules of the four packages but generated ones."""
    return [
        Module(path, base)
        for package, base in PACKAGES.items()
        for path in sorted((base / package).rglob("*.py"))
        if "_pb2" not in path.name and not path.stem.endswith("_gen")
    ]


def circles(modules: list[Module]) -> Iterator[str]:
    """Yield each set of modules that import each other (Tarjan's strongly connected components)."""
    known = {module.name: module for module in modules}
    graph = {
        module.name: sorted(
            {target for name in module.imported_names() if (target := _target(name, known))}
            - {module.name}
        )
        for module in modules
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                yield from visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            place = stack.index(name)
            component, stack[place:] = stack[place:], []
            if len(component) > 1:
                yield component

    for name in graph:
        if name not in index:
            for component in visit(name):
                yield "modules import each other: " + ", ".join(sorted(component))


def _target(name: str, known: dict[str, Module]) -> str | None:
    """Return the module that an imported name belongs to; a package itself counts as none."""
    if name not in known:
        name = name.rpartition(".")[0]
    return name if name in known and not known[name].is_package else None


def repeated_file_names(modules: list[Module]) -> Iterator[str]:
    places = defaultdict(list)
    for module in modules:
        if not module.path.name.startswith("__"):
            places[module.path.name].append(module.shown)
    for name, paths in places.items():
        if len(paths) > FILE_NAME_USES_MAX:
            yield f"{len(paths)} files are called {name}: " + ", ".join(paths)


def sizes(modules: list[Module]) -> Iterator[str]:
    lengths = []
    for module in modules:
        lines = len(module.path.read_text().splitlines())
        if lines > FILE_LINES_MAX:
            yield f"{module.place(module.tree)}: {lines} lines (at most {FILE_LINES_MAX})"
        for function in module.functions():
            length = (function.end_lineno or 0) - function.lineno + 1
            lengths.append(length)
            if length > FUNCTION_LINES_MAX:
                yield f"{module.place(function)}: {function.name} has {length} lines"
            if function.name == "__init__":
                arguments = function.args
                count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
                if count > CONSTRUCTOR_PARAMETERS_MAX:
                    yield f"{module.place(function)}: the constructor has {count} parameters"
    if lengths:
        p99 = sorted(lengths)[len(lengths) * 99 // 100]
        if p99 > FUNCTION_LINES_P99_MAX:
            yield f"one function in a hundred has {p99} lines or more"


def openings(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, DOCUMENTED) and (
                opening := PRONOUN.match(ast.get_docstring(node) or "")
            ):
                yield f"{module.place(node)}: the docstring begins with {opening[0]!r}"


def riddles(modules: list[Module]) -> Iterator[str]:
    """Yield the docstrings of ``PLAIN_PACKAGES`` that begin without naming their object."""
    for module in modules:
        if module.name.partition(".")[0] not in PLAIN_PACKAGES:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, DOCUMENTED) and (
                opening := RIDDLE.match(ast.get_docstring(node) or "")
            ):
                yield f"{module.place(node)}: the docstring begins with {opening[0]!r}"


def main() -> None:
    modules = product()
    found = [
        fault
        for check in (circles, repeated_file_names, sizes, openings, riddles)
        for fault in check(modules)
    ]
    for fault in found:
        print(fault)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
