"""Between bulk loads and their form in the log: the part of ``convert`` that is about loads."""

from __future__ import annotations

from typing import Any, cast

from koinon_coordinator.core.cluster.bulk_loads import Load, LoadsImage
from koinon_coordinator.core.cluster.commands import CommitLoad, OpenLoad
from koinon_proto.contract.bulk_loads import LoadMode, LoadState, StreamBatch
from koinon_proto.contract.table import PartitionId
from koinon_proto.v1 import loads_pb2, state_pb2


def open_to_proto(command: OpenLoad) -> state_pb2.OpenLoadCommand:
    return state_pb2.OpenLoadCommand(
        job_id=command.job_id,
        mode=cast(Any, int(command.mode)),
        prefix=command.prefix,
        stream_batch=batch_to_proto(command.stream_batch),
        description=command.description,
        timeout_ms=command.timeout_ms,
    )


def open_from_proto(body: state_pb2.OpenLoadCommand) -> OpenLoad:
    return OpenLoad(
        job_id=body.job_id,
        mode=LoadMode(body.mode),
        prefix=body.prefix,
        stream_batch=batch_from_proto(body),
        description=body.description,
        timeout_ms=body.timeout_ms,
    )


def commit_to_proto(command: CommitLoad) -> state_pb2.CommitLoadCommand:
    return state_pb2.CommitLoadCommand(
        load_id=command.load_id,
        attempts=command.attempts,
        partition_ids=command.partition_ids,
        rows=command.rows,
        bytes=command.bytes,
    )


def commit_from_proto(
    body: state_pb2.CommitLoadCommand | loads_pb2.CommitLoadRequest,
) -> CommitLoad:
    """Return the command; it has the same fields on the wire and in the log."""
    return CommitLoad(
        load_id=body.load_id,
        attempts=tuple(body.attempts),
        partition_ids=tuple(PartitionId(p) for p in body.partition_ids),
        rows=body.rows,
        bytes=body.bytes,
    )


def batch_to_proto(batch: StreamBatch | None) -> loads_pb2.StreamBatch | None:
    if batch is None:
        return None
    return loads_pb2.StreamBatch(query_id=batch.query_id, batch_id=batch.batch_id)


def batch_from_proto(
    message: state_pb2.OpenLoadCommand | loads_pb2.OpenLoadRequest | state_pb2.Load,
) -> StreamBatch | None:
    """Return the ``stream_batch`` of a message that may have one: batch 0 is one."""
    if not message.HasField("stream_batch"):
        return None
    return StreamBatch(message.stream_batch.query_id, message.stream_batch.batch_id)


# --- snapshots ---------------------------------------------------------------------------------


def image_to_proto(image: LoadsImage, message: state_pb2.StateSnapshot) -> None:
    """Write the loads into a snapshot."""
    message.loads.extend(_load_to_proto(load) for load in image.active)
    message.ended_loads.extend(_load_to_proto(load) for load in image.ended)
    message.stream_batches.extend(
        loads_pb2.StreamBatch(query_id=batch.query_id, batch_id=batch.batch_id)
        for batch in image.batches
    )
    message.load_id_base = image.id_base


def image_from_proto(message: state_pb2.StateSnapshot) -> LoadsImage:
    """Return a snapshot's loads; one of a build that knew of none has none."""
    return LoadsImage(
        active=tuple(_load_from_proto(load) for load in message.loads),
        ended=tuple(_load_from_proto(load) for load in message.ended_loads),
        batches=tuple(StreamBatch(b.query_id, b.batch_id) for b in message.stream_batches),
        id_base=message.load_id_base,
    )


def _load_to_proto(load: Load) -> state_pb2.Load:
    return state_pb2.Load(
        load_id=load.load_id,
        job_id=load.job_id,
        mode=cast(Any, int(load.mode)),
        prefix=load.prefix,
        stream_batch=batch_to_proto(load.stream_batch),
        description=load.description,
        timeout_ms=load.timeout_ms,
        state=cast(Any, int(load.state)),
        attempts=load.attempts,
        attempts_digest=load.attempts_digest,
        committed_at=load.committed_at,
        partitions=load.partitions,
        unmerged=load.unmerged,
        rows=load.rows,
        bytes=load.bytes,
        reason=load.reason,
    )


def _load_from_proto(message: state_pb2.Load) -> Load:
    return Load(
        load_id=message.load_id,
        job_id=message.job_id,
        mode=LoadMode(message.mode),
        prefix=message.prefix,
        stream_batch=batch_from_proto(message),
        description=message.description,
        timeout_ms=message.timeout_ms,
        state=LoadState(message.state),
        attempts=tuple(message.attempts),
        attempts_digest=message.attempts_digest,
        committed_at=message.committed_at,
        partitions=message.partitions,
        unmerged=tuple(PartitionId(p) for p in message.unmerged),
        rows=message.rows,
        bytes=message.bytes,
        reason=message.reason,
    )
