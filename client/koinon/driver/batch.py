"""Atomic batches as programs build them, for the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from koinon.driver.client_api import awaitable
from koinon.types import BatchResult, BytesLike, Durability
from koinon_proto.contract.errors import InvalidArgumentError

if TYPE_CHECKING:
    from koinon.core.atomic import Operation


class BatchBuilder:
    """Operations on keys with the same routing bytes as ``routing_key``, which may itself be one of
    the keys. ``commit`` carries out all of them together, or none.

    Checks are evaluated first, against the records before the batch, whatever their position. The
    other operations are carried out in their order: a second operation on a key sees the result of
    the first. At most 1,000 operations, and 4 MiB of keys and values.
    """

    def __init__(self, client: Any, routing_key: BytesLike) -> None:
        self._client = client
        self._operations = client._engine.rows.make_batch(client._target, routing_key)
        self._committed = False

    def __len__(self) -> int:
        return len(self._operations.operations)

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations that have been added so far."""
        return tuple(self._operations.operations)

    def check(self, key: BytesLike, version: int) -> Self:
        """Refuse the whole batch unless the record has this version; 0: unless there is no record.

        Raises:
            InvalidArgumentError: the key has other routing bytes, or the batch is full.
        """
        self._operations.check(key, version)
        return self

    def put(self, key: BytesLike, value: BytesLike, *, ttl_ms: int | None = None) -> Self:
        """Write a record, which expires after ``ttl_ms`` milliseconds. Errors: those of
        ``check``.
        """
        self._operations.put(key, value, ttl_ms)
        return self

    def delete(self, key: BytesLike) -> Self:
        """Delete a record, if there is one. Errors: those of ``check``."""
        self._operations.delete(key)
        return self

    def increment(self, key: BytesLike, by: int = 1, *, ttl_ms: int | None = None) -> Self:
        """Add to an integer, as the client's ``increment`` does; a value that is no integer, or an
        overflow, refuses the whole batch. Errors: those of ``check``.
        """
        self._operations.increment(key, by, ttl_ms)
        return self

    def _begin_commit(self, durability: Durability, timeout_ms: int | None) -> Any:
        """Begin the commit. A batch is committed once at most, since a commit may have an unknown
        fate.

        Raises:
            InvalidArgumentError: the batch has no operations, or was committed before.
        """
        if self._committed:
            raise InvalidArgumentError(
                field="batch",
                reason="was committed before: read the records, then make a new batch",
            )
        if not len(self):
            raise InvalidArgumentError(field="batch", reason="has no operations")
        engine = self._client._engine
        work = engine.rows.commit(
            self._client._target, self._operations, durability=durability, timeout_ms=timeout_ms
        )
        self._committed = True
        return self._client._run(work)


class Batch(BatchBuilder):
    """An atomic batch of the blocking client; see :class:`BatchBuilder`."""

    def commit(
        self, *, durability: Durability = "all_in_sync", timeout_ms: int | None = None
    ) -> BatchResult:
        """Commit the batch: write all of it in one step, or nothing. Return the version that all
        its records get.

        All reads and writes of the batch happen at one moment; no reader, replica or crash ever
        shows a part of it. It is sent once; only a refusal that applied nothing is retried.

        Raises:
            CheckFailedError: a check did not hold; the error names the key. Nothing was written.
            NotANumberError, NumberOverflowError: an increment failed. Nothing was written.
            UnknownFateError: the batch was sent, and no reply came: all of it was written, or
                nothing. It is never repeated.
            UnavailableError: the deadline passed; nothing was written.
        """
        with self._client._engine.observing.call("batch", len(self)):
            result: BatchResult = self._begin_commit(durability, timeout_ms)
        return result


class AsyncBatch(BatchBuilder):
    """An atomic batch of the asyncio client; see :class:`BatchBuilder`."""

    commit = awaitable(Batch.commit)
