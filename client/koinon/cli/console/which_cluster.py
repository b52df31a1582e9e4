"""Finds the cluster for a command without ``--coordinators``.

A default never replaces a cluster that the user has named: if that cluster is down, its usual
addresses may by now belong to another cluster.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from koinon.local.cluster_files import (
    ClusterFile,
    ClusterStoppedError,
    load,
    running_cluster,
)
from koinon.local.members import coordinators_of, running_coordinators_of
from koinon_proto.contract.errors import ConfigurationError, KoinonError

COORDINATORS_VARIABLE = "KOINON_COORDINATORS"
DATA_VARIABLE = "KOINON_DATA"
# the default of security.transport, whose import would import gRPC
BUNDLE_VARIABLE = "KOINON_TLS_BUNDLE"
USUAL_COORDINATORS = "127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402"
"""The coordinators of the first ``koinon up`` on a machine."""


def variable(name: str) -> str:
    """Return the value of an environment variable that names a target; '' if it is not set.

    Raises:
        ConfigurationError: it is set to an empty text, as by a script whose own variable is unset.
    """
    value = os.environ.get(name)
    if value == "":
        raise ConfigurationError(
            reason=f"the variable {name} is set and empty: give it a value, or unset it to use "
            "the default"
        )
    return value or ""


def data_directory(given: Path | None = None) -> Path:
    """Return the local cluster's directory: ``given``, else KOINON_DATA, else the default
    directory.

    Raises:
        ConfigurationError: KOINON_DATA is set and empty.
    """
    return given or Path(variable(DATA_VARIABLE) or default_data_dir())


def default_data_dir() -> Path:
    """Return the directory in which ``koinon up`` keeps its cluster by default."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "koinon" / "local"


def default_coordinators() -> str:
    """Return the coordinators of KOINON_COORDINATORS, else the running coordinators of the local
    cluster; if no local cluster was ever made, the usual local addresses.

    Raises:
        ConfigurationError: a variable is set and empty.
        ClusterStoppedError: the local cluster does not run, or KOINON_DATA names a directory
            without a cluster.
    """
    if named := variable(COORDINATORS_VARIABLE):
        return named
    directory = data_directory()
    remembered = load(directory)
    if remembered is None and not os.environ.get(DATA_VARIABLE):
        return USUAL_COORDINATORS
    coordinators = running_coordinators_of(remembered) if remembered is not None else ""
    if coordinators:
        return coordinators
    state = "does not run" if remembered is not None else "was never made"
    if remembered is not None and running_cluster(directory) is not None:
        state = "has no coordinator that runs"
    place = "" if directory == default_data_dir() else f" --data {shlex.quote(str(directory))}"
    raise ClusterStoppedError(
        reason=f"the local cluster on {directory} {state}\n"
        f"  'koinon up{place}' starts it; --coordinators or {COORDINATORS_VARIABLE} says where "
        "another cluster is."
    )


def local_cluster() -> ClusterFile | None:
    """Return the local cluster that runs on the data directory, or None."""
    try:
        return running_cluster(data_directory())
    except KoinonError:
        return None


def take_local_identity(coordinators: str) -> None:
    """Use the certificate that the local cluster has made, if these are its coordinators and the
    environment names no other: set the environment variable that connections read.
    """
    if os.environ.get(BUNDLE_VARIABLE):
        return
    running = local_cluster()
    if running is None or not running.tls_bundle:
        return
    if set(coordinators.split(",")) <= set(coordinators_of(running).split(",")):
        os.environ[BUNDLE_VARIABLE] = str(data_directory() / running.tls_bundle)
