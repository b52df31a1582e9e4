"""Koinon: a key-value store cluster on fixed partitions. This is its client.

>>> import koinon
>>> client = koinon.connect("127.0.0.1:7400")
>>> client.put(b"key", b"value")
>>> client.get(b"key")

``koinon.aio.connect`` does the same for asyncio, ``koinon.LocalCluster`` starts a cluster here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import koinon_proto  # noqa: F401 (first of all: it sets what gRPC reads when it is imported)

if TYPE_CHECKING:
    from koinon import aio
    from koinon.aio import AsyncClient, AsyncKeyspaceClient
    from koinon.client import Client, KeyspaceClient, connect
    from koinon.core.feeds import Change, ChangeBatch, FeedPositions
    from koinon.driver.group import AsyncGroup, Group, GroupBatch, GroupPart
    from koinon.driver.request_ids import request_id
    from koinon.local import LocalCluster
    from koinon.options import ClientOptions
    from koinon.types import Durability, Entry, Observation, RowFailure, WriteResult
    from koinon_proto.contract.errors import *

    __version__: str

__all__ = [
    "connect",
    "Client",
    "aio",
    "AsyncClient",
    "KeyspaceClient",
    "AsyncKeyspaceClient",
    "Group",
    "AsyncGroup",
    "GroupBatch",
    "GroupPart",
    "ClientOptions",
    "request_id",
    "Durability",
    "BatchResult",
    "Change",
    "ChangeBatch",
    "Entry",
    "FeedPositions",
    "Observation",
    "RowFailure",
    "WriteResult",
    "LocalCluster",
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
    "__version__",
]

_ERRORS = "koinon_proto.contract.errors"
_HOMES = {
    "connect": "koinon.client",
    "Client": "koinon.client",
    "KeyspaceClient": "koinon.client",
    "AsyncClient": "koinon.aio",
    "AsyncKeyspaceClient": "koinon.aio",
    "Group": "koinon.driver.group",
    "AsyncGroup": "koinon.driver.group",
    "GroupBatch": "koinon.driver.group",
    "GroupPart": "koinon.driver.group",
    "ClientOptions": "koinon.options",
    "request_id": "koinon.driver.request_ids",
    "Durability": "koinon.types",
    "BatchResult": "koinon.types",
    "Change": "koinon.core.feeds",
    "ChangeBatch": "koinon.core.feeds",
    "Entry": "koinon.types",
    "FeedPositions": "koinon.core.feeds",
    "Observation": "koinon.types",
    "RowFailure": "koinon.types",
    "WriteResult": "koinon.types",
    "LocalCluster": "koinon.local",
}
"""The modules that define the names above, except the errors. gRPC, protobuf and the rest are
imported when the first of these names is used, so that ``import koinon`` alone is cheap.
"""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "aio":
        value: Any = import_module("koinon.aio")
    elif name == "__version__":
        value = _version()
    else:
        value = getattr(import_module(_HOMES.get(name, _ERRORS)), name)
    globals()[name] = value  # later uses find the name without this function
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("koinon")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
