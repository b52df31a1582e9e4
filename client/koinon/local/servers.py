"""The server programs of a local cluster: their required packages and their environment."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from koinon.local.cluster_files import LocalClusterError

MODULES = {"coordinator": "koinon_coordinator", "node": "koinon_node"}
SERVER_NEEDS = ("typer", "lmdb", "prometheus_client", "uvloop", "grpc_health", "grpc_reflection")
"""Packages that the servers need beyond the client's; the ``[server]`` extra installs them."""
PACKAGES = (*MODULES.values(), "koinon", "koinon_proto")


def environment() -> dict[str, str]:
    """Return this process's environment, with the path of our packages if they are not
    installed.
    """
    roots = [str(Path(p).parent) for m in PACKAGES for p in _search_path(m)]
    roots = [root for root in roots if not root.endswith("-packages")]
    paths = [*roots, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}


def is_importable(module: str) -> bool:
    """Return whether a top-level module could be imported, without doing so."""
    return importlib.util.find_spec(module) is not None


def _search_path(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


def missing_for_servers() -> list[str]:
    """Return the modules that coordinator and node need and that are missing here."""
    return [name for name in (*MODULES.values(), *SERVER_NEEDS) if not is_importable(name)]


def require_servers() -> None:
    if missing := missing_for_servers():
        raise LocalClusterError(
            reason=f"the servers need {', '.join(missing)}: pip install 'koinon[server]'"
        )
