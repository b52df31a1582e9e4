"""The outcomes that a command's handler may return. Pure.

=========== ========================================================================================
``bytes``   the reply, of a command that needs no record
``Read``    keys to read, and a function from their records to the reply
``Write``   rows to write, and a function from each row's outcome to the reply
``Jointly`` an atomic operation on several keys, and a function from its result to the reply
``Call``    the work of a gRPC method, which returns the reply
``Switch``  another protocol takes the connection over, after the reply +OK
coroutine   any other work; it returns the reply
=========== ========================================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from koinon_node.core.writes.atomic_batch import Joint, Part, Step
from koinon_node.core.writes.updates import Put, Remove, Result, Update
from koinon_node.partition.batches import Durability

Arguments = list[bytes]
"""The words of a command; its name is the first."""
Encoded = bytes | None
"""A stored record, as core/records.py encodes it; None: the key has no record."""


@dataclass(slots=True)
class Read:
    """Keys to read. ``reply`` builds the reply from their records, one for each key."""

    keys: Sequence[bytes]
    reply: Callable[[Sequence[Encoded]], bytes]
    table_version: int = 0  # the sender's; 0: unknown
    request_id: str = ""
    fails_at_once: bool = False
    """Reply with the error while the partition changes its primary. Koinon's own clients then fetch
    the table, and continue with other keys; commands of Redis clients are held
    (``hand_over_waits``).
    """
    work: Callable[[Sequence[Encoded]], int] | None = None
    """The cost of ``reply``, as bytes of records that take as long to handle; None: the bytes of
    its records. A script has a budget of such bytes."""


@dataclass(slots=True)
class Row:
    """A row to write. ``ttl_ms`` 0: never expires; ``if_version`` None: unconditional. With an
    ``update``, the update alone decides what is written.
    """

    key: bytes
    value: bytes = b""
    is_delete: bool = False
    ttl_ms: int = 0
    if_version: int | None = None
    update: Update | None = None

    @property
    def is_put(self) -> bool:
        """True for a put that does not depend on the existing record."""
        return not self.is_delete and self.if_version is None and self.update is None

    @property
    def size(self) -> int:
        """The bytes that the command carries for this row, without the key."""
        return len(self.value) + (self.update.size if self.update is not None else 0)

    @property
    def step(self) -> Update:
        """The row as a step of an atomic batch; transactions and scripts have no conditions."""
        if self.update is not None:
            return self.update
        return Remove() if self.is_delete else Put(self.value, self.ttl_ms)

    def written(self, result: Result) -> Written:
        """Return the outcome of the row's step. Replies check only whether the version is 0."""
        return Written(int(result is not False) if self.is_delete else 1, result)


@dataclass(slots=True)
class Written:
    """The outcome of a row: its version, 0 if nothing was written; and the result of its update."""

    version: int
    result: Result = None


@dataclass(slots=True)
class Write:
    """Rows to write. ``reply`` builds the reply from each row's outcome; if a row failed, its error
    is the reply.
    """

    rows: Sequence[Row]
    reply: Callable[[Sequence[Written]], bytes]
    durability: Durability = Durability.ALL_IN_SYNC
    table_version: int = 0
    request_id: str = ""
    weight: int = 0  # its share of a batch, in bytes; set by RedisService.weigh
    fails_at_once: bool = False  # as in ``Read``


_PART = Part()


@dataclass(slots=True)
class Jointly:
    """One atomic operation on the records of several keys of one partition."""

    keys: Sequence[bytes]
    joint: Joint
    reply: Callable[[Result], bytes]

    @property
    def steps(self) -> list[Step]:
        """The steps of the atomic batch, one for each key."""
        return [self.joint, *[_PART] * (len(self.keys) - 1)]


@dataclass(slots=True)
class Call:
    """The work of a gRPC method; ``begin`` returns its reply."""

    begin: Callable[[], Coroutine[Any, Any, bytes]]
    request_id: str = ""


@dataclass(slots=True)
class Switch:
    """A change of the protocol: after +OK was written, the connection gets the protocol from
    ``begin``. If the connection is lost before, ``begin`` is not called.
    """

    begin: Callable[[], asyncio.Protocol]


Outcome = bytes | Read | Write | Jointly | Call | Switch | Coroutine[Any, Any, bytes]


def first_key(outcome: Outcome) -> bytes | None:
    """Return the key that decides which node should execute the command."""
    if isinstance(outcome, Read | Jointly):
        return outcome.keys[0]
    return outcome.rows[0].key if isinstance(outcome, Write) else None
