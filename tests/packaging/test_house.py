"""The checks of the tree find what they are for."""

from __future__ import annotations

from pathlib import Path

from tests.house import Module, circles, openings, repeated_file_names, riddles, sizes


def modules(home: Path, **sources: str) -> list[Module]:
    for name, source in sources.items():
        path = home / "product" / Path(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return [Module(path, home) for path in sorted(home.rglob("*.py"))]


def test_modules_that_import_each_other_for_types_only_are_a_circle(tmp_path: Path) -> None:
    found = modules(
        tmp_path,
        a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from product.b import B",
        b="from product.c import C",
        c="from product import a",
        d="import product.a",
    )
    assert list(circles(found)) == ["modules import each other: product.a, product.b, product.c"]


def test_third_file_of_a_name_large_constructors_and_pronouns_are_found(tmp_path: Path) -> None:
    constructor = "class A:\n    def __init__(self, a, b, c, d, e, f, *, g): ..."
    found = modules(tmp_path, x__same="", y__same=constructor, z__same='"""What is."""')
    assert len(list(repeated_file_names(found))) == 1
    assert [fault.rpartition(": ")[2] for fault in sizes(found)] == [
        "the constructor has 7 parameters"
    ]
    assert len(list(openings(found))) == 1


def test_docstring_of_the_client_that_names_no_object_is_found(tmp_path: Path) -> None:
    home = tmp_path / "koinon"
    home.mkdir()
    for name, text in (("a", "Return what is left."), ("b", "How far."), ("c", "Return how many.")):
        (home / f"{name}.py").write_text(f'"""{text}"""')
    found = [Module(path, tmp_path) for path in sorted(home.glob("*.py"))]
    assert [fault.partition(":")[0][-4:] for fault in riddles(found)] == ["a.py", "b.py"]
