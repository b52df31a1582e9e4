"""The outcomes that a command's handler may return, and the replies that are made of them. Pure.

=========== ========================================================================================
``bytes``   the reply: no record is needed
``Read``    keys to read, and how the reply is made of their records
``Write``   rows to write, and how the reply is made of each row's outcome
``Jointly`` an operation on several keys that is one step, and how the reply is made of its result
``Call``    the work of a method of gRPC, whose reply it is
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
    """Keys to read. ``reply`` is made of their records, one for each key."""

    keys: Sequence[bytes]
    reply: Callable[[Sequence[Encoded]], bytes]
    table_version: int = 0  # the sender's; 0: not known
    request_id: str = ""
    fails_at_once: bool = False
    """Answer with the error while the partition changes hands. Koinon's own clients ask for the
    table then, and go on with other keys; a client of Redis is kept waiting (``hand_over_waits``).
    """
    work: Callable[[Sequence[Encoded]], int] | None = None
    """The time that ``reply`` takes, as bytes of records that would take as long to handle; None:
    no longer than the records that it is made of. A script has a budget of such bytes."""


@dataclass(slots=True)
class Row:
    """A row to write. ``ttl_ms`` 0: it never expires; ``if_version`` None: unconditional. Where
    there is an ``update``, it alone says what is written.
    """

    key: bytes
    value: bytes = b""
    is_delete: bool = False
    ttl_ms: int = 0
    if_version: int | None = None
    update: Update | None = None

    @property
    def is_put(self) -> bool:
        """True if it is a put that does not depend on the record that is there."""
        return not self.is_delete and self.if_version is None and self.update is None

    @property
    def size(self) -> int:
        """The bytes that the command brings for it."""
        return len(self.value) + (self.update.size if self.update is not None else 0)

    @property
    def step(self) -> Update:
        """The row as a step of an atomic batch; transactions and scripts have no conditions."""
        if self.update is not None:
            return self.update
        return Remove() if self.is_delete else Put(self.value, self.ttl_ms)

    def written(self, result: Result) -> Written:
        """Return the outcome of the row's step. Replies look at the version only as to whether it
        is 0.
        """
        return Written(int(result is not False) if self.is_delete else 1, result)


@dataclass(slots=True)
class Written:
    """The outcome of a row: its version, 0 if nothing was written; the answer of its update."""

    version: int
    result: Result = None


@dataclass(slots=True)
class Write:
    """Rows to write. ``reply`` is made of each row's outcome; if a row failed, its error is the
    reply.
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
    """One operation on the records of several keys of one partition."""

    keys: Sequence[bytes]
    joint: Joint
    reply: Callable[[Result], bytes]

    @property
    def steps(self) -> list[Step]:
        """The steps of an atomic batch, one for each key."""
        return [self.joint, *[_PART] * (len(self.keys) - 1)]


@dataclass(slots=True)
class Call:
    """The work of a method of gRPC; ``begin`` returns its reply."""

    begin: Callable[[], Coroutine[Any, Any, bytes]]
    request_id: str = ""


@dataclass(slots=True)
class Switch:
    """The connection gets the protocol that ``begin`` returns, once +OK has been written. A
    connection may be lost before that, and then nothing has begun.
    """

    begin: Callable[[], asyncio.Protocol]


Outcome = bytes | Read | Write | Jointly | Call | Switch | Coroutine[Any, Any, bytes]


def first_key(outcome: Outcome) -> bytes | None:
    """Return the key that decides where the command belongs."""
    if isinstance(outcome, Read | Jointly):
        return outcome.keys[0]
    return outcome.rows[0].key if isinstance(outcome, Write) else None
