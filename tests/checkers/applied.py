"""Watches what primaries decide to write: every value of a workload has one version, ever.

Clients of a workload never write a value twice, so a value with a second version is a request that
was sent, or carried out, twice. What clients are told cannot always show that: the second write may
have been overwritten before anybody read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from koinon_node.core.formats import records
from koinon_node.core.writes.write_decisions import Effects
from tests.checkers.history import version_text

Submit = Callable[..., Any]
_USER = bytes([records.USER])


class Applied(NamedTuple):
    """A put that a primary has given a version."""

    key: bytes
    value: bytes
    version: int


def puts_of(rows: Mapping[bytes, bytes | None]) -> Iterator[Applied]:
    """Return the puts of users' keys among the records that a decision writes, by data key."""
    for key, data in rows.items():
        if data is None or not key.startswith(_USER, 2):
            continue
        record = records.decode_record(data)
        if not record.tombstone:
            yield Applied(key[records.KEY_AT :], record.value, record.sequence)


def noting(submit: Submit, note: Callable[[Iterable[Applied]], None]) -> Submit:
    """Return a replicator's ``submit`` that first tells ``note`` of the puts of each decision."""

    def noted(effects: Effects, *rest: Any, **options: Any) -> Any:
        note(puts_of(effects.records))
        return submit(effects, *rest, **options)

    return noted


class OneVersionEach:
    """Remembers the version of each value. A value is told apart within its key."""

    def __init__(self) -> None:
        self._versions: dict[tuple[bytes, bytes], int] = {}

    def note(self, puts: Iterable[Applied]) -> list[str]:
        """Note what was applied; return what was applied before, under another version."""
        found = []
        for put in puts:
            version = self._versions.setdefault((put.key, put.value), put.version)
            if version != put.version:
                found.append(
                    f"key {put.key!r}: {put.value!r} was written twice, under versions "
                    f"{version_text(version)} and {version_text(put.version)}"
                )
        return found
