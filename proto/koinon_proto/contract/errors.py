"""The errors of Koinon that programs meet, with their facts as fields.

Those that only servers, operators and bulk loads meet are in ``cluster_errors``.

One root, :class:`KoinonError`. A class says three things about itself, and callers decide by
them, never by text:

``retriable``      the same operation may succeed later; nothing of it was applied.
``stale_table``    the sender's partition table (or its idea of the leader) should be refreshed.
``maybe_applied``  the fate of a write is unknown: it may or may not have been applied.

Errors with a wire form are written into ``errors_gen`` from ``v1/errors.proto``, which has their
fields, facts and texts; ``convert`` maps them to messages. The others stand here. All are
picklable, so that they cross process pools and Spark workers whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from koinon_proto.contract.error_words import KoinonError
from koinon_proto.contract.errors_gen import (
    CertificateNotValidError,
    CheckFailedError,
    ClusterNotReadyError,
    ConditionFailedError,
    ConfigurationError,
    CursorMovedError,
    DeadlinePassedError,
    HistoryBranchedError,
    InternalError,
    InvalidArgumentError,
    LeaseExpiredError,
    MemberFencedError,
    NotANumberError,
    NotEnoughReplicasError,
    NotPrimaryError,
    NumberOverflowError,
    PartitionOfflineError,
    PermissionDeniedError,
    QuotaExceededError,
    ReplyTooLargeError,
    ResourceExhaustedError,
    SnapshotNeededError,
    StaleGenerationError,
    StorageFullError,
    TableBehindError,
    UnauthenticatedError,
    UnavailableError,
    UnknownFateError,
    UnknownKeyspaceError,
    UnsupportedVersionError,
    WrongClusterError,
    WrongPartitionError,
)

__all__ = [
    "CertificateNotValidError",
    "CheckFailedError",
    "ClientClosedError",
    "ClusterNotReadyError",
    "ConditionFailedError",
    "ConfigurationError",
    "CursorMovedError",
    "DeadlinePassedError",
    "ForkedError",
    "HistoryBranchedError",
    "InternalError",
    "InvalidArgumentError",
    "KoinonError",
    "LeaseExpiredError",
    "MemberFencedError",
    "NobodyListensError",
    "NotANumberError",
    "NotEnoughReplicasError",
    "NotPrimaryError",
    "NumberOverflowError",
    "PartitionOfflineError",
    "PartitionerMismatchError",
    "PermissionDeniedError",
    "QuotaExceededError",
    "ReplyTooLargeError",
    "ResourceExhaustedError",
    "SnapshotNeededError",
    "StaleGenerationError",
    "StorageFullError",
    "TableBehindError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownFateError",
    "UnknownHostError",
    "UnknownKeyspaceError",
    "UnsupportedVersionError",
    "WrongClusterError",
    "WrongEventLoopError",
    "WrongPartitionError",
]
"""``koinon`` has them all."""


@dataclass(kw_only=True, eq=False)
class WrongEventLoopError(KoinonError):
    """An asyncio client was used on another event loop than the one that it was connected on. Its
    connections and timers belong to that one: nothing was sent.
    """

    template: ClassVar[str] = (
        "this client belongs to another event loop: connect one on each loop that uses one "
        "(koinon.aio.connect), or share a blocking client between threads (koinon.connect)"
    )


@dataclass(kw_only=True, eq=False)
class ClientClosedError(KoinonError):
    """The client was closed, by its program. Nothing was applied, and nothing will be."""

    template: ClassVar[str] = "the client is closed{e.request}"


@dataclass(kw_only=True, eq=False)
class ForkedError(KoinonError):
    """An operator's call in a forked process whose parent had used gRPC, which does not survive a
    fork. Clients (``koinon.connect``) do.
    """

    template: ClassVar[str] = (
        "gRPC was used before this process was forked, and cannot be used here: make this call in "
        "the parent, or start the process by spawn (multiprocessing.get_context('spawn'))"
    )


@dataclass(kw_only=True, eq=False)
class PartitionerMismatchError(KoinonError):
    """This process knows the cluster's partitioner by its name, and it answers otherwise here: keys
    would be looked for, and written, where they do not belong. Nothing was written. Fingerprints
    are hexadecimal.
    """

    template: ClassVar[str] = (
        "the cluster's partitioner is {e.cluster_partitioner} (fingerprint "
        "{e.cluster_fingerprint}); here it is {e.own_partitioner} (fingerprint "
        "{e.own_fingerprint}), which places keys otherwise: install the version of the router that "
        "the cluster was made with"
    )

    cluster_partitioner: str
    cluster_fingerprint: str
    own_partitioner: str
    own_fingerprint: str


@dataclass(kw_only=True, eq=False)
class NotSentError(UnavailableError):
    """There was no connection, or no server to send to: the request never left."""


@dataclass(kw_only=True, eq=False)
class NobodyListensError(NotSentError):
    """``connect`` reached no address, because each refuses connections (or is of no known host):
    no server runs there. It may have been stopped for a moment.
    """


@dataclass(kw_only=True, eq=False)
class UnknownHostError(NotSentError):
    """``connect`` reached no address, because none of the hosts' names has one."""


for _name in __all__:  # by which programs import it, and tracebacks name it
    globals()[_name].__module__ = "koinon"
