"""Planted defects: each replaces a method of the product before the first seed runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    name: str
    plant: Callable[[], None]
    logged: bool = False  # whether the stores have a write-ahead log


PLANTED: list[Mutant] = []
"""Those of the modules that have been imported; ``mutants.MUTANTS`` has all."""


def mutant(plant: Callable[[], None], *, logged: bool = False) -> Callable[[], None]:
    PLANTED.append(Mutant(plant.__name__.replace("_", "-"), plant, logged))
    return plant


def log_mutant(plant: Callable[[], None]) -> Callable[[], None]:
    return mutant(plant, logged=True)


def replace_method(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of ``owner.name``, which must be there."""
    setattr(owner, name, make(getattr(owner, name)))
