"""A follower's work: append the leader's entries to the log, and answer how far the logs agree.

The functions change the log in memory and return the answers. The core sends an answer only once
the entries that it acknowledges are durable.
"""

import zlib

from koinon_coordinator.core.raft.core_config import RaftCoreConfig
from koinon_coordinator.core.raft.log import RaftLog, Snapshot
from koinon_coordinator.core.raft.messages import (
    AppendReply,
    AppendRequest,
    SnapshotChunk,
    SnapshotReply,
)


def accept_append(log: RaftLog, request: AppendRequest, term: int) -> AppendReply:
    """Match, append, and follow the leader's commit index (Raft paper, figure 2)."""
    previous_index, entries = request.previous_index, request.entries
    if previous_index < log.commit_index:
        # The leader has every entry that is committed here: begin after them.
        entries = entries[log.commit_index - previous_index :]
        previous_index = log.commit_index
    elif log.term_at(previous_index) != request.previous_term:
        hint = log.last_at_or_below(previous_index, request.previous_term)
        return AppendReply(
            term=term,
            sender=request.to,
            to=request.sender,
            round_id=request.round_id,
            success=False,
            rejected_index=previous_index,
            hint_index=hint.index,
            hint_term=hint.term,
        )
    log.append_replicated(entries)
    match_index = previous_index + len(entries)
    log.commit_to(min(request.commit_index, match_index))
    return AppendReply(
        term=term,
        sender=request.to,
        to=request.sender,
        round_id=request.round_id,
        success=True,
        match_index=match_index,
    )


class SnapshotAssembly:
    """Assembles the chunks of one snapshot, in order, until it is complete and its checksum is
    right.

    The identity of a snapshot does not depend on its sender: a new leader with the same snapshot
    continues where the old leader stopped.
    """

    def __init__(self, config: RaftCoreConfig) -> None:
        self._config = config
        # Index, term, size and checksum of the snapshot under way.
        self._identity: tuple[int, int, int, int] | None = None
        self._fed_in_term = 0  # the term of the last accepted chunk
        self._received = bytearray()  # from offset 0 on, without gaps

    def accept(
        self, log: RaftLog, chunk: SnapshotChunk, term: int
    ) -> tuple[SnapshotReply, Snapshot | None]:
        """Return the answer to a chunk, and the snapshot if the chunk completed it."""
        if chunk.snapshot_index <= log.commit_index:
            return self._reply(chunk, term, match_index=log.commit_index), None
        if log.term_at(chunk.snapshot_index) == chunk.snapshot_term:
            # The log has all entries that the snapshot covers (figure 13, step 6).
            log.commit_to(chunk.snapshot_index)
            return self._reply(chunk, term, match_index=chunk.snapshot_index), None
        identity = (chunk.snapshot_index, chunk.snapshot_term, chunk.size_bytes, chunk.checksum)
        if identity != self._identity:
            superseded = self._identity is not None and chunk.snapshot_index < self._identity[0]
            if superseded and self._fed_in_term == term:
                # A late chunk. (From a new leader it may be the first of its snapshot: accept it.)
                return self._reply(chunk, term, next_offset=chunk.offset), None
            self._begin(identity)
        self._fed_in_term = term
        if chunk.offset == len(self._received) and self._has_room_for(chunk):
            self._received += chunk.data
        if len(self._received) < chunk.size_bytes:
            return self._reply(chunk, term, next_offset=len(self._received)), None
        data = bytes(self._received)
        self._begin(None)
        if zlib.crc32(data) != chunk.checksum:
            return self._reply(chunk, term, next_offset=0), None
        snapshot = Snapshot(
            index=chunk.snapshot_index,
            term=chunk.snapshot_term,
            configuration=chunk.configuration,
            data=data,
            checksum=chunk.checksum,
        )
        return self._reply(chunk, term, match_index=snapshot.index), snapshot

    def _begin(self, identity: tuple[int, int, int, int] | None) -> None:
        self._identity = identity
        self._received = bytearray()

    def _has_room_for(self, chunk: SnapshotChunk) -> bool:
        end = chunk.offset + len(chunk.data)
        return end <= min(chunk.size_bytes, self._config.snapshot_bytes_max)

    def _reply(
        self, chunk: SnapshotChunk, term: int, *, next_offset: int = 0, match_index: int = 0
    ) -> SnapshotReply:
        return SnapshotReply(
            term=term,
            sender=chunk.to,
            to=chunk.sender,
            round_id=chunk.round_id,
            snapshot_index=chunk.snapshot_index,
            chunk_offset=chunk.offset,
            next_offset=next_offset,
            match_index=match_index,
        )
