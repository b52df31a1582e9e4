"""A RESP transaction: the commands queued since MULTI, with the bounds of an atomic batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments
from koinon_proto.contract.table import MAX_ATOMIC_BYTES, MAX_ATOMIC_OPERATIONS

WATCHED_MAX: Final = MAX_ATOMIC_OPERATIONS
_OBJECT_BYTES: Final = 64  # of the Python object of each argument


class Transaction:
    """The commands that EXEC will execute."""

    def __init__(self) -> None:
        self.queued: list[Arguments] = []
        self.is_spoilt = False  # a command was refused: EXEC will fail
        self.held_bytes = 0  # memory of the queued commands
        self._operations = 0  # of the atomic batch: one per key, at least one per command
        self._bytes = 0  # of all arguments

    def add(self, arguments: Arguments, keys: Sequence[bytes]) -> None:
        """Queue a command with these keys.

        Raises:
            RefusedError: the transaction exceeds its bounds.
        """
        operations = self._operations + max(1, len(keys))
        size = self._bytes + sum(map(len, arguments))
        if operations > MAX_ATOMIC_OPERATIONS or size > MAX_ATOMIC_BYTES:
            raise RefusedError(
                f"ERR a transaction has {MAX_ATOMIC_OPERATIONS:,} operations and "
                f"{MAX_ATOMIC_BYTES // 1024**2} MiB of arguments at most"
            )
        self._operations, self._bytes = operations, size
        self.held_bytes += sum(map(len, arguments)) + _OBJECT_BYTES * len(arguments)
        self.queued.append(arguments)


def held_by_watches(watched: Mapping[bytes, int]) -> int:
    """Return the bytes of memory that watched keys take."""
    return sum(map(len, watched)) + 2 * _OBJECT_BYTES * len(watched)
