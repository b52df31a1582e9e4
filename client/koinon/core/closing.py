"""A base class for contexts that end by ``close``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class Closing:
    """A context that calls ``close`` at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
