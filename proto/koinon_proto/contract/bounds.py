"""The greatest value of every number that a message may carry, checked where the message enters.

``check`` is for what comes from outside: requests, as ``rpc.typed_errors`` takes them, and the
messages of streams. ``check_reply`` is for what a server answered. A number beyond its bound is one
that no process of any build sends; what is let in can be counted on from, packed into 64 bits and
put into a column. The bounds are far above what is legal, never near it: what is too much of
something (rows of a batch, times of a configuration) is refused by the code that knows why.

Every number of every message is in ``BOUNDS``, and a test holds that. Enumerations are not: the
code that reads one says what an unknown value means. Nor is ``state.proto``, which never comes
from outside: what is committed is applied as it is, for every build alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter, le
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from koinon_proto.contract.errors import InvalidArgumentError, UnavailableError

PACKAGE = "koinon.v1."

ANY = None
"""All that the type holds: a sequence, a random number, a checksum, what is only shown."""
READER = None
"""The code that reads it compares it with what there is: the table, the rows of the same batch."""

TERM = LOG_INDEX = ROUND = LOAD_ID = (1 << 62) - 1
VERSION = NODE_EPOCH = PARTITION_EPOCH = (1 << 56) - 1
"""Counted up by one, and by a million when coordinators are made anew."""
PRIMARY_EPOCH = (1 << 24) - 1  # it is the upper part of a sequence
PARTITION = (1 << 16) - 1  # two bytes of a record's key
NODE_NUMBER = READER  # one that the table does not name is no node's
ROWS = BYTES = (1 << 62) - 1
RATE = float(1 << 62)
WAIT_MS = 3_600_000  # of the times that one process gives another: an hour
TIME_MS = (1 << 62) - 1  # of settings and of the calendar
SIZE = (1 << 48) - 1  # of what is held in memory or in a file
COUNT = (1 << 31) - 1
PORT = (1 << 16) - 1

_HOST_COMMAND = {
    "partition_id": PARTITION,
    "primary_epoch": PRIMARY_EPOCH,
    "partition_epoch": PARTITION_EPOCH,
}
_NODE = {"node_epoch": NODE_EPOCH, "table_version": VERSION}
TIME_S = (1 << 40) - 1  # of the calendar
_SNAPSHOT = {"round_id": ROUND, "snapshot_index": LOG_INDEX}
_KEYSPACE = {"table_version": VERSION, "keyspace_id": READER}
_STAGED = {"table_version": VERSION, "load_id": LOAD_ID}

BOUNDS: Mapping[str, Mapping[str, int | float | None]] = {
    # --- raft.proto
    "RaftHello": {"protocol_version": READER, "peer_port": READER},
    "RaftMessage": {"term": TERM},
    "RaftMessage.VoteRequest": {"last_index": LOG_INDEX, "last_term": TERM},
    "RaftMessage.VoteReply": {"request_term": TERM},
    "RaftMessage.AppendRequest": {
        "previous_index": LOG_INDEX,
        "previous_term": TERM,
        "entry_terms": TERM,
        "commit_index": LOG_INDEX,
        "round_id": ROUND,
    },
    "RaftMessage.AppendReply": {
        "round_id": ROUND,
        "match_index": LOG_INDEX,
        "rejected_index": LOG_INDEX,
        "hint_index": LOG_INDEX,
        "hint_term": TERM,
    },
    "RaftMessage.HeartbeatRequest": {"commit_index": LOG_INDEX, "round_id": ROUND},
    "RaftMessage.HeartbeatReply": {"round_id": ROUND},
    "RaftMessage.SnapshotChunk": {
        **_SNAPSHOT,
        "snapshot_term": TERM,
        "size_bytes": SIZE,
        "checksum": ANY,
        "offset": SIZE,
    },
    "RaftMessage.SnapshotReply": {
        **_SNAPSHOT,
        "chunk_offset": SIZE,
        "next_offset": SIZE,
        "match_index": LOG_INDEX,
    },
    # --- membership.proto
    "RegisterRequest": {
        "protocol_version": READER,
        "last_node_epoch": READER,  # the state may go on above it
        "weight": READER,
    },
    "RegisterResponse": {
        "node_epoch": NODE_EPOCH,
        "term": TERM,
        "heartbeat_interval_ms": WAIT_MS,
        "lease_ms": WAIT_MS,
    },
    "HostCommand": _HOST_COMMAND,
    "NodeStats": {
        "records": ROWS,
        "used_bytes": BYTES,
        "map_bytes": BYTES,
        "reads_per_second": RATE,
        "writes_per_second": RATE,
        "disk_free_bytes": BYTES,
        "disk_bytes": BYTES,
        "commit_out_ms": COUNT,
        "commit_ms": COUNT,
    },
    "ReplicaProgress": {
        "partition_id": READER,
        "records": ROWS,
        "bytes": BYTES,
        "records_total": ROWS,
        "bytes_total": BYTES,
    },
    "HeartbeatRequest": {
        **_NODE,
        "access_version": VERSION,
        "erased_keyspaces": READER,
        "call_number": ROUND,
    },
    "HeartbeatResponse": {
        "term": TERM,
        "lease_ms": WAIT_MS,
        "peer_port": PORT,
        "call_number": ROUND,
    },
    "PartitionChange": {**_HOST_COMMAND, "in_sync": NODE_NUMBER, "hand_over_to": NODE_NUMBER},
    "AlterPartitionsRequest": _NODE,
    "AlterPartitionsResponse": {"rejected": PARTITION},
    "LeaveRequest": {"node_epoch": NODE_EPOCH},
    # --- access.proto
    "Grant": {"keyspace_id": READER},
    "User": {"certificates_from_s": TIME_S},
    "Token": {"created_s": TIME_S, "expires_s": TIME_S},
    "AccessState": {"access_version": VERSION},
    # --- table.proto
    "GetTableRequest": {"known_version": VERSION},
    "ClusterConfig": {
        "partition_count": PARTITION + 1,
        "replication_factor": COUNT,
        "min_in_sync": COUNT,
        "bootstrap_nodes": COUNT,
        "max_value_bytes": COUNT,
        "heartbeat_interval_ms": WAIT_MS,
        "session_timeout_ms": WAIT_MS,
        "lease_ms": WAIT_MS,
        "check_quorum_ms": WAIT_MS,
        "replica_timeout_ms": WAIT_MS,
        "rereplicate_after_ms": TIME_MS,
    },
    "Keyspace": {
        "keyspace_id": COUNT,
        "base": PARTITION,
        "partition_count": PARTITION + 1,
        "replication_factor": COUNT,
        "min_in_sync": COUNT,
        "max_value_bytes": COUNT,
        "default_ttl_ms": TIME_MS,
        "max_ttl_ms": TIME_MS,
        "max_rows_per_s": ROWS,
        "max_bytes_per_s": BYTES,
    },
    "KeyspaceList": {"changed_at": VERSION},
    "MoveSettings": {"bytes_per_second": BYTES * 2 + 1, "moves_per_node": COUNT},
    "NodeInfo": {
        "node_number": NODE_NUMBER,
        "node_epoch": NODE_EPOCH,
        "changed_at": VERSION,
        "weight": COUNT,
    },
    "PartitionRow": {
        "partition_id": PARTITION,
        "replicas": NODE_NUMBER,
        "in_sync": NODE_NUMBER,
        "primary": NODE_NUMBER,
        "primary_epoch": PRIMARY_EPOCH,
        "partition_epoch": PARTITION_EPOCH,
        "adding": NODE_NUMBER,
        "removing": NODE_NUMBER,
        "changed_at": VERSION,
        "wanted_primary": NODE_NUMBER,
    },
    "TableUpdate": {"format_version": READER, "base_version": VERSION, "table_version": VERSION},
    "ActiveLoad": {"load_id": LOAD_ID, "committed_at": LOG_INDEX, "keyspace_id": READER},
    # --- admin.proto
    "GetStatusRequest": {"known_version": VERSION},
    "CoordinatorStatus": {"match_index": LOG_INDEX},
    "NodeSession": {"node_number": NODE_NUMBER, "heard_ms_ago": ANY},
    "ClusterStatus": {
        "term": TERM,
        "commit_index": LOG_INDEX,
        "applied_index": LOG_INDEX,
        "lease_ms": WAIT_MS,
        "session_timeout_ms": WAIT_MS,
    },
    "RecentElections": {
        "leader_changes": COUNT,
        "terms": TERM,
        "watched_ms": TIME_MS,
        "quiet_ms": TIME_MS,
    },
    "PlanRequest": {"replication_factor": READER},
    "AlterKeyspaceRequest": {
        "min_in_sync": READER,
        "max_value_bytes": READER,
        "default_ttl_ms": READER,
        "max_ttl_ms": READER,
        "max_rows_per_s": READER,
        "max_bytes_per_s": READER,
    },
    "DropKeyspaceRequest": {"keyspace_id": READER},
    "KeyspaceResponse": {"behind_serve_ms": WAIT_MS},
    "PlannedMove": {"partition_id": PARTITION, "origin": NODE_NUMBER, "target": NODE_NUMBER},
    "NodeBalance": {"node_number": NODE_NUMBER, "replicas": COUNT, "primaries": COUNT},
    "PlanRefusal": {"node_number": NODE_NUMBER, "partition_ids": PARTITION},
    "Plan": {"table_version": VERSION},
    "MoveStatus": {"plan_moves": COUNT, "progress_nodes": NODE_NUMBER},
    "CancelMovesRequest": {"partition_ids": READER},
    "CancelMovesResponse": {"dropped": COUNT, "turned_back": COUNT},
    "SetMovesRequest": {"bytes_per_second": READER, "moves_per_node": READER},
    "RestorePrimariesResponse": {"wanted": COUNT},
    "PrimaryToForce": {"partition_id": READER},
    "ForcedPrimary": {"partition_id": PARTITION, "primary_epoch": PRIMARY_EPOCH},
    "ChangeAccessRequest": {"expected_access_version": READER},
    "ChangeAccessResponse": {"access_version": VERSION, "behind_serve_ms": WAIT_MS},
    # --- errors.proto: what they say is for people, but for these
    "InvalidArgumentError": {"limit": ANY, "actual": ANY},
    "ConditionFailedError": {"expected_version": ANY, "current_version": ANY},
    "CheckFailedError": {"expected_version": ANY, "current_version": ANY},
    "NotPrimaryError": {
        "partition_id": PARTITION,
        "primary_epoch": PRIMARY_EPOCH,
        "table_version": VERSION,
    },
    "PermissionDeniedError": {"rows": READER},
    "TableBehindError": {"table_version": VERSION, "required_version": VERSION + 1},
    "WrongPartitionError": {"partition_id": ANY, "expected_partition_id": PARTITION},
    "PartitionOfflineError": {"partition_id": PARTITION},
    "ClusterNotReadyError": {"registered_nodes": COUNT, "bootstrap_nodes": COUNT},
    "UnsupportedVersionError": {"version": ANY, "supported": ANY},
    "NotLeaderError": {"term": TERM},
    "NodeFencedError": {"node_epoch": NODE_EPOCH, "current_node_epoch": NODE_EPOCH},
    "RegistrationPendingError": {"retry_after_ms": WAIT_MS},
    "ResourceExhaustedError": {"limit": ANY},
    "QuotaExceededError": {"limit": ANY, "retry_after_ms": WAIT_MS},
    "ReplyTooLargeError": {"limit": ANY, "actual": ANY},
    "NotEnoughReplicasError": {"partition_id": PARTITION, "in_sync": COUNT, "min_in_sync": COUNT},
    "FencedEpochError": {
        "partition_id": PARTITION,
        "primary_epoch": PRIMARY_EPOCH,
        "current_primary_epoch": PRIMARY_EPOCH,
    },
    "LoadClosedError": {"load_id": LOAD_ID},
    "LoadIncompleteError": {
        "load_id": LOAD_ID,
        "partition_id": PARTITION,
        "expected_rows": ROWS,
        "staged_rows": ROWS,
    },
    # --- replication.proto
    "FollowHello": {
        "protocol_version": READER,
        "node_number": NODE_NUMBER,
        "node_epoch": NODE_EPOCH,
        "to_node_number": NODE_NUMBER,
        "columns_flags": READER,
    },
    "EpochStart": {"primary_epoch": PRIMARY_EPOCH, "previous_sequence": ANY},
    "OpenPartition": {
        "partition_id": PARTITION,
        "primary_epoch": PRIMARY_EPOCH,
        "complete_through": ANY,
        "unchanged_from": ANY,
    },
    "BatchAck": {"number": ROWS},
    "PositionAcks": {
        "partition_ids": PARTITION,
        "primary_epochs": PRIMARY_EPOCH,
        "sequences": ANY,
    },
    "ClosePartitions": {"partition_ids": PARTITION},
    "OpenedPartition": {
        "partition_id": PARTITION,
        "primary_epoch": PRIMARY_EPOCH,
        "common_point": ANY,
        "stream_from": ANY,
        "unchanged_from": ANY,
        "records": ROWS,
        "bytes": BYTES,
    },
    "ClosedPartitions": {"partition_ids": PARTITION},
    "Batch": {
        "number": ROWS,
        "partition_ids": PARTITION,
        "primary_epochs": PRIMARY_EPOCH,
        "previous": ANY,
        "last": ANY,
        "crc32": ANY,
    },
    "MergeStep": {
        "partition_id": PARTITION,
        "sequence": ANY,
        "load_id": LOAD_ID,
        "attempts": ANY,
        "numbers": ANY,
        "rows": ROWS,
        "bytes": BYTES,
        "tombstone_at_ms": TIME_MS,
    },
    "PurgeFloors": {"partition_ids": PARTITION, "sequences": ANY},
    "ReadPageRequest": {
        "partition_id": PARTITION,
        "primary_epoch": PRIMARY_EPOCH,
        "after_sequence": ANY,
        "reach": ANY,
        "bytes_max": ANY,
    },
    "RecordPage": {"crc32": ANY, "bound": ANY, "purge_floor": ANY},
    "ReadKeysRequest": {"partition_id": PARTITION, "primary_epoch": PRIMARY_EPOCH},
    "ChecksumsRequest": {"partition_ids": PARTITION},
    "CopyChecksum": {
        "partition_id": PARTITION,
        "complete_through": ANY,
        "records": ROWS,
        "bytes": BYTES,
        "digest": ANY,
    },
    "PartitionSizesResponse": {"partition_ids": PARTITION, "records": ROWS, "bytes": BYTES},
    # --- loads.proto
    "StreamBatch": {"batch_id": LOG_INDEX},
    "OpenLoadRequest": {"timeout_ms": READER, "keyspace_id": READER},
    "OpenLoadResponse": {"load_id": LOAD_ID, "table_version": VERSION},
    "TouchLoadRequest": {"load_id": LOAD_ID, "attempt": ANY, "rows": ROWS, "bytes": BYTES},
    "CommitLoadRequest": {
        "load_id": LOAD_ID,
        "attempts": ANY,
        "partition_ids": READER,
        "rows": ROWS,
        "bytes": BYTES,
    },
    "AbortLoadRequest": {"load_id": LOAD_ID},
    "LoadInfo": {
        "load_id": LOAD_ID,
        "partitions": COUNT,
        "partitions_merged": COUNT,
        "rows": ROWS,
        "bytes": BYTES,
        "idle_ms": TIME_MS,
        "timeout_ms": TIME_MS,
    },
    "GetLoadsRequest": {"load_id": LOAD_ID},
    "GetManifestRequest": {"load_id": LOAD_ID},
    "LoadManifest": {
        "load_id": LOAD_ID,
        "attempts": ANY,
        "partition_ids": PARTITION,
        "keyspace_id": COUNT,
    },
    "ReportMergedRequest": {"load_id": LOAD_ID, "partition_ids": READER},
    "StageRequest": {**_STAGED, "attempt": ANY, "partition_ids": READER, "numbers": ANY},
    "PrepareRequest": {**_STAGED, "attempts": ANY, "partition_ids": READER, "rows": ROWS},
    "PrepareResponse": {"duplicate_rows": ROWS},
    "ReadColumnsRequest": {
        "table_version": VERSION,
        "partition_ids": READER,
        "bytes_max": ANY,
        "keyspace_id": READER,
    },
    "ReadColumnsResponse": {
        "partition_ids": READER,
        "row_counts": READER,
        "versions": ANY,
        "expires_at_ms": ANY,
    },
    # --- traffic.proto
    "TrafficCounters": {
        "elapsed_us": TIME_MS,
        "partition_ids": PARTITION,
        "reads": ROWS,
        "writes": ROWS,
        "read_bytes": BYTES,
        "written_bytes": BYTES,
    },
    "FollowerLag": {
        "node_number": NODE_NUMBER,
        "records": ROWS,
        "bytes": BYTES,
        "oldest_us": TIME_MS,
    },
    "SampleKeysRequest": {
        "duration_ms": READER,
        "partition_ids": READER,
        "partitions_max": READER,
        "keys_max": READER,
    },
    "KeySample": {
        "elapsed_us": TIME_MS,
        "partition_ids": PARTITION,
        "reads": ROWS,
        "writes": ROWS,
    },
    "SampledRows": {"rows": ROWS, "taken": ROWS, "missed_max": ROWS},
    # --- kv.proto: columns over rows are read into arrays and compared there
    "GetRequest": {"table_version": VERSION},
    "GetResponse": {"version": ANY, "expires_at_ms": ANY},
    "PutRequest": {"table_version": VERSION, "ttl_ms": READER, "if_version": ANY},
    "PutResponse": {"version": ANY},
    "DeleteRequest": {"table_version": VERSION, "if_version": ANY},
    "Refusal": {"partition_id": PARTITION},
    "RowError": {"row": READER},
    "BatchGetRequest": {**_KEYSPACE, "partition_ids": READER},
    "BatchGetResponse": {"missing": READER, "versions": ANY, "expires_at_ms": ANY},
    "BatchWriteRequest": {
        **_KEYSPACE,
        "partition_ids": READER,
        "deletes": READER,
        "ttl_ms": READER,
    },
    "Condition": {"row": READER, "if_version": ANY},
    "BatchWriteResponse": {"versions": ANY, "absent": READER, "present": READER},
    "BatchUpdateRequest": {**_KEYSPACE, "partition_ids": READER},
    "CommitBatchRequest": {**_KEYSPACE, "partition_id": READER},
    "CheckVersion": {"version": ANY},
    "PutValue": {"ttl_ms": READER},
    "OperationResult": {"number": ANY},
    "CommitBatchResponse": {"version": ANY},
    "Increment": {"by": ANY, "ttl_ms": READER},
    "Touch": {"ttl_ms": READER},
    "GetOrPut": {"ttl_ms": READER},
    "UpdateResult": {"version": ANY, "number": ANY},
    "ScanCursor": {"partition_id": READER},
    "ScanRequest": {**_KEYSPACE, "partition_ids": READER, "limit": ANY},
    "ScanResponse": {"partition_ids": PARTITION, "versions": ANY, "expires_at_ms": ANY},
}


def check(message: Message) -> None:
    """Check every number of the message, those of the messages in it included.

    Raises:
        InvalidArgumentError: one is beyond its bound; the field is named.
    """
    for look in _looks(message.DESCRIPTOR):
        look(message)


def check_reply(message: Message) -> None:
    """Check what a server answered, as ``check`` does.

    Raises:
        UnavailableError: it makes no sense; another server may answer.
    """
    try:
        check(message)
    except InvalidArgumentError as error:
        name = message.DESCRIPTOR.name
        raise UnavailableError(reason=f"an answer makes no sense: {name}: {error}") from error


_Look = Callable[[Any], None]


@cache
def _looks(descriptor: Descriptor) -> tuple[_Look, ...]:
    """Return the checks of a message of this type, made once."""
    bounds = BOUNDS.get(descriptor.full_name.removeprefix(PACKAGE), {})
    single: dict[str, int] = {}
    looks: list[_Look] = []
    for field in descriptor.fields:
        bound = bounds.get(field.name)
        if field.message_type is not None:
            if _has_bounds(field.message_type, frozenset()):
                looks.append(_in_messages(field))
        elif bound is not None:
            if field.is_repeated:
                looks.append(_in_column(field.name, bound))
            elif isinstance(bound, float):
                looks.append(_in_field(field.name, bound))
            else:
                single[field.name] = bound
    if len(single) == 1:
        looks.insert(0, _in_field(*single.popitem()))
    elif single:
        looks.insert(0, _in_fields(single))
    return tuple(looks)


def _has_bounds(descriptor: Descriptor, above: frozenset[str]) -> bool:
    """Return whether there is anything to look at in a message of this type."""
    name = descriptor.full_name
    if name in above:
        return False
    own = BOUNDS.get(name.removeprefix(PACKAGE), {})
    parts = [field.message_type for field in descriptor.fields if field.message_type is not None]
    return any(bound is not None for bound in own.values()) or any(
        _has_bounds(part, above | {name}) for part in parts
    )


def _in_field(name: str, bound: int | float) -> _Look:
    get = attrgetter(name)

    def look(message: Any) -> None:
        if not 0 <= get(message) <= bound:  # which a number that is none (NaN) is not either
            _refuse(name, bound, get(message))

    return look


def _in_fields(bounds: dict[str, int]) -> _Look:
    names, greatest = tuple(bounds), tuple(bounds.values())
    get = attrgetter(*names)

    def look(message: Any) -> None:
        values = get(message)
        if not all(map(le, values, greatest)):
            beyond = next(i for i, value in enumerate(values) if value > greatest[i])
            _refuse(names[beyond], greatest[beyond], values[beyond])

    return look


def _in_column(name: str, bound: int | float) -> _Look:
    get = attrgetter(name)

    def look(message: Any) -> None:
        column: Iterable[int] = get(message)
        if column and max(column) > bound:
            _refuse(name, bound, max(column))

    return look


def _in_messages(field: FieldDescriptor) -> _Look:
    name, of, get = field.name, field.message_type, attrgetter(field.name)

    if field.is_repeated:

        def look_at_all(message: Any) -> None:
            looks = _looks(of)
            for part in get(message):
                for look in looks:
                    look(part)

        return look_at_all

    def look_at_it(message: Any) -> None:
        if message.HasField(name):
            part = get(message)
            for look in _looks(of):
                look(part)

    return look_at_it


def _refuse(field: str, bound: int | float, actual: int | float) -> None:
    whole = isinstance(actual, int)
    raise InvalidArgumentError(
        field=field,
        reason="beyond what anybody could mean" if whole else f"{actual} makes no sense",
        limit=int(bound),
        actual=actual if isinstance(actual, int) else 0,
    )
