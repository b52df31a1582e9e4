"""The workload of atomic batches: a group of keys that are only ever written together.

The keys of a group have one hash tag, so they lie in one partition, and every batch writes one
value into all of them, or deletes all. So a group is one register, and is judged as one: in the
journal it is a key, and a batch on it a write, delete or ``cas``. Whoever reads all its keys at
once, or any single one, reads the register. If keys of a group differ, the read has found what
was never written, and the checker calls it "half of a batch".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from koinon.types import BatchResult, Entry
from koinon_proto.contract.errors import CheckFailedError, KoinonError
from tests.nemesis.journal import CONDITION, Call, Journal

GROUPS, MEMBERS = 4, 12
PAD_BYTES_MAX = 2_000  # of each value, so that a batch is many pages of a store and of the log
HALF = "half of a batch"
_END = b" "  # of what is told apart in a value; the rest only fills

Calls = dict[str, Callable[..., Awaitable[Any]]]


def group_name(prefix: str, number: int) -> str:
    return f"{{{prefix}/group/{number}}}"


def is_group(key: str) -> bool:
    """Return whether this key of a journal stands for a group."""
    return key.startswith("{")


def keys_of(group: str) -> list[bytes]:
    return [f"{group}/{number:02}".encode() for number in range(MEMBERS)]


def register(entries: Sequence[Entry | None]) -> tuple[str | None, int]:
    """Return what the register holds whose keys these are: (value, version), (None, 0)."""
    found = {(entry.value, entry.version) if entry else (None, 0) for entry in entries}
    if len(found) > 1:
        seen = [(_text(entry.value), entry.version) if entry else None for entry in entries]
        return f"{HALF}: {seen}", max(version for _, version in found)
    ((value, version),) = found
    return None if value is None else _text(value), version


def _text(value: bytes) -> str:
    return value.partition(_END)[0].decode()


class Groups:
    """Commits batches on one group, and looks at it."""

    def __init__(
        self,
        number: int,
        *,
        prefix: str,
        name: str,
        first_worker: int,
        reads: float,
        timeout_ms: int,
        pause_s: tuple[float, float],
        calls: Calls,
        journal: Journal,
    ) -> None:
        self._name = f"{name}/g{number}"
        self._group = group_name(prefix, number)
        self._keys = keys_of(self._group)
        self._worker = first_worker + number
        self._reads = reads
        self._timeout_ms = timeout_ms
        self._pause_s = pause_s
        self._calls = calls
        self._journal = journal
        self._choice = random.Random(f"{prefix}/{self._name}")
        self._version: int | None = None  # what it last knew to be there
        self._count = 0

    async def run(self) -> None:
        while True:
            if self._choice.random() < self._reads:
                await self._look()
            else:
                await self._commit()
            await asyncio.sleep(self._choice.uniform(*self._pause_s))

    async def _look(self) -> None:
        """Read all keys at once, or one of them."""
        whole = self._choice.random() < 0.7
        keys = self._choice.sample(self._keys, MEMBERS if whole else 1)
        call = self._journal.invoke(self._worker, "read", self._group, None)
        try:
            entries = (
                await self._calls["get_entries"](keys, timeout_ms=self._timeout_ms)
                if whole
                else [await self._calls["get_entry"](keys[0], timeout_ms=self._timeout_ms)]
            )
        except KoinonError as error:
            call.fail(_said(error))
            return
        value, self._version = register(entries)
        call.ok(value=value, version=self._version)

    async def _commit(self) -> None:
        self._count += 1
        deletes, condition = self._choice.random() < 0.15, None
        if self._choice.random() < 0.3:
            condition = self._version
        text = None if deletes else f"{self._name}/{self._count}"
        checks = [] if condition is None else [(self._choice.choice(self._keys), condition)]
        call = self._invoke(text, condition)
        try:
            result: BatchResult = await self._calls["commit"](
                self._group.encode(), self._rows(text), checks, timeout_ms=self._timeout_ms
            )
        except CheckFailedError as error:
            self._version = error.current_version
            call.fail(CONDITION, version=error.current_version)
        except KoinonError as error:
            self._version = None
            if error.maybe_applied:
                call.info(_said(error))
            else:
                call.fail(_said(error))
        else:
            self._version = 0 if deletes else result.version
            if deletes:
                call.ok(found=self._found(result.results[len(checks) :]))
            else:
                call.ok(version=result.version)

    def _invoke(self, text: str | None, condition: int | None) -> Call:
        if condition is not None:
            return self._journal.invoke(
                self._worker, "cas", self._group, text, if_version=condition
            )
        f = "delete" if text is None else "write"
        return self._journal.invoke(self._worker, f, self._group, text)

    def _rows(self, text: str | None) -> dict[bytes, bytes | None]:
        """Return what the batch leaves of each key, in an order of its own."""
        value = None
        if text is not None:
            value = text.encode() + _END + b"." * self._choice.randrange(PAD_BYTES_MAX)
        return dict.fromkeys(self._choice.sample(self._keys, MEMBERS), value)

    def _found(self, results: Sequence[Any]) -> bool:
        """Return whether a delete found records: of all keys, or of none."""
        found = set(results)
        if len(found) > 1:
            call = self._journal.invoke(self._worker, "read", self._group, None)
            call.ok(value=f"{HALF}: deletes found {list(results)}", version=1)
        return any(found)


def _said(error: KoinonError) -> str:
    return f"{type(error).__name__}: {error}"
