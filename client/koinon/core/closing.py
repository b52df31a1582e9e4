"""Objects that are closed at the end of a ``with``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class Closing:
    """A context that ends by ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything that is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
