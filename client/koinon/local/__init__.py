"""A whole cluster on this machine, as processes of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from koinon.local.local_cluster import LocalCluster
    from koinon.local.members import Ports, Setup

__all__ = ["LocalCluster", "Ports", "Setup"]
_MODULES = {"LocalCluster": "local_cluster", "Setup": "members", "Ports": "members"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # every command looks for a local cluster, but few start one
        return getattr(import_module(f"koinon.local.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
