"""A whole cluster on this machine, as processes of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from koinon.local.local_cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    if name == "LocalCluster":  # every command looks for a local cluster, but few start one
        return import_module("koinon.local.local_cluster").LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
