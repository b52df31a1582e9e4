"""Claims, commits and reads of a group's cursors, as an operation over partitions: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from koinon.core.atomic import CommitOperation, Operations
from koinon.core.feeds import PartitionPosition
from koinon.core.operations import Call, RowsOperation
from koinon.core.retry import RetryPolicy, final_error
from koinon_proto.contract.errors import CursorMovedError, KoinonError

if TYPE_CHECKING:
    from koinon.core.operations import Failed
    from koinon.core.routing import Rows


class CursorAction(Enum):
    """An action on cursors."""

    CLAIM = "claim_cursors"
    COMMIT = "commit_cursors"
    READ = "read_cursors"


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorWork:
    """An action on the cursors of one group in some partitions of one keyspace."""

    action: CursorAction
    keyspace_id: int
    group_id: int
    member_id: str = ""
    rows: Mapping[int, tuple[int, PartitionPosition]] = field(default_factory=dict)
    """The generation, and the position to commit, of each partition."""
    from_now: bool = False
    """A claimed cursor whose position was never set is put at the end of the changes."""


class StoredCursor(NamedTuple):
    """A group's cursor in a partition."""

    position: PartitionPosition
    generation: int  # 0: there is no cursor
    member_id: str
    committed_at_ms: int  # Unix time
    completed_sequence: int  # of the partition: all changes through it can be read


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorReply:
    """A node's reply: cursors and refusals by partition."""

    cursors: Mapping[int, StoredCursor]
    refused: Mapping[int, KoinonError]


class CursorRows(RowsOperation[CursorReply]):
    """An action on cursors. Attempts of unknown fate are repeated: each action may be."""

    write = True
    idempotent = True

    def __init__(self, work: CursorWork, policy: RetryPolicy) -> None:
        import numpy as np

        ids = np.fromiter(sorted(work.rows), np.uint32, len(work.rows))
        super().__init__([b""] * len(ids), ids, policy, work.keyspace_id)
        self.work = work
        self.cursors: dict[int, StoredCursor] = {}
        self.failures: dict[int, KoinonError] = {}  # by partition

    def _store(self, call: Call, reply: CursorReply) -> Failed:
        self.cursors.update(reply.cursors)
        return [(call.rows[call.partition_ids == p], error) for p, error in reply.refused.items()]

    def fail(self, rows: Rows, error: KoinonError, timed_out_ms: int | None = None) -> None:
        # An action that may be repeated has no unknown fate: the caller repeats it.
        final = final_error(error, write=False, maybe_applied=False, timed_out_ms=timed_out_ms)
        self.failures.update(dict.fromkeys(self.partition_ids[rows].tolist(), final))


class CommitWithCursor(CommitOperation):
    """The commit of an atomic batch together with its partition's cursor. Attempts of unknown fate
    are repeated: the batch is applied only while the cursor is at ``after``.
    """

    idempotent = True

    def __init__(
        self,
        batch: Operations,
        work: CursorWork,
        after: PartitionPosition,
        policy: RetryPolicy,
    ) -> None:
        import numpy as np

        ((self.partition_id, (self.generation, self.position)),) = work.rows.items()
        super().__init__(
            batch,
            np.array([self.partition_id], np.uint32),
            policy,
            work.keyspace_id,
            durability="all_in_sync",
        )
        self.group_id = work.group_id
        self.after = after
        self.is_unsure = False
        """True if an attempt had no reply."""

    def _note_unknown(self, rows: Rows) -> None:
        self.is_unsure = True

    def fail(self, rows: Rows, error: KoinonError, timed_out_ms: int | None = None) -> None:
        if isinstance(error, CursorMovedError):  # the caller finds out by whom
            self.error = error
        else:
            maybe = self.is_unsure
            self.error = final_error(
                error, write=True, maybe_applied=maybe, timed_out_ms=timed_out_ms
            )
