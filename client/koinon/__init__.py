"""Koinon: a key-value store cluster on fixed partitions. This is its client.

>>> import koinon
>>> client = koinon.connect("127.0.0.1:7400")
>>> client.put(b"key", b"value")
>>> client.get(b"key")

``koinon.aio.connect`` does the same for asyncio, ``koinon.LocalCluster`` starts a cluster here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import koinon_proto  # noqa: F401 (first of all: it sets what gRPC reads when it is imported)
from koinon import aio
from koinon.aio import AsyncClient
from koinon.client import Client, connect
from koinon.driver.request_ids import request_id
from koinon.options import ClientOptions
from koinon.types import Durability, Entry, RowFailure, WriteResult
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    ConditionFailedError,
    ConfigurationError,
    InternalError,
    InvalidArgumentError,
    KoinonError,
    LeaseExpiredError,
    NotEnoughReplicasError,
    NotPrimaryError,
    PartitionOfflineError,
    ResourceExhaustedError,
    StorageFullError,
    TableBehindError,
    UnavailableError,
    UnknownFateError,
    UnsupportedVersionError,
    WrongClusterError,
    WrongEventLoopError,
    WrongPartitionError,
)

if TYPE_CHECKING:
    from koinon.local import LocalCluster as LocalCluster

try:
    __version__ = version("koinon")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "connect",
    "Client",
    "aio",
    "AsyncClient",
    "ClientOptions",
    "request_id",
    "Durability",
    "Entry",
    "RowFailure",
    "WriteResult",
    "LocalCluster",
    "ClusterNotReadyError",
    "ConditionFailedError",
    "ConfigurationError",
    "InternalError",
    "InvalidArgumentError",
    "KoinonError",
    "LeaseExpiredError",
    "NotEnoughReplicasError",
    "NotPrimaryError",
    "PartitionOfflineError",
    "ResourceExhaustedError",
    "StorageFullError",
    "TableBehindError",
    "UnavailableError",
    "UnknownFateError",
    "UnsupportedVersionError",
    "WrongClusterError",
    "WrongEventLoopError",
    "WrongPartitionError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LocalCluster":  # drags in process handling, which few programs need
        return import_module("koinon.local").LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
