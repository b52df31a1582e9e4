"""Finds the cluster that a command is for where ``--coordinators`` does not name it.

What a user names is never replaced by a default: a command for a cluster that does not run would
else reach another one, which has its usual addresses by now.
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
BUNDLE_VARIABLE = "KOINON_TLS_BUNDLE"  # as security.transport has it, which imports gRPC
USUAL_COORDINATORS = "127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402"
"""The coordinators of the first ``koinon up`` on a machine."""


def variable(name: str) -> str:
    """Return the value of a variable that names a target; '' if it is not set.

    Raises:
        ConfigurationError: it is set to nothing, as by a script in which another variable is unset.
    """
    value = os.environ.get(name)
    if value == "":
        raise ConfigurationError(
            reason=f"the variable {name} is set and empty: give it a value, or unset it to use "
            "the default"
        )
    return value or ""


def data_directory(given: Path | None = None) -> Path:
    """Return where the local cluster is: ``given``, else KOINON_DATA, else the default directory.

    Raises:
        ConfigurationError: KOINON_DATA is set and empty.
    """
    return given or Path(variable(DATA_VARIABLE) or default_data_dir())


def default_data_dir() -> Path:
    """Return the directory in which ``koinon up`` keeps its cluster by default."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "koinon" / "local"


def default_coordinators() -> str:
    """Return the coordinators that KOINON_COORDINATORS names, else those of the local cluster that
    run; where no local cluster was ever made, the usual local addresses.

    Raises:
        ConfigurationError: a variable is set and empty.
        ClusterStoppedError: the local cluster does not run, or KOINON_DATA names a directory
            without one.
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
    """The local cluster that runs on the data directory."""
    try:
        return running_cluster(data_directory())
    except KoinonError:
        return None


def take_local_identity(coordinators: str) -> None:
    """Connect with the certificate that the local cluster has made, if these are its coordinators
    and the environment names no other. What connects looks there.
    """
    if os.environ.get(BUNDLE_VARIABLE):
        return
    running = local_cluster()
    if running is None or not running.tls_bundle:
        return
    if set(coordinators.split(",")) <= set(coordinators_of(running).split(",")):
        os.environ[BUNDLE_VARIABLE] = str(data_directory() / running.tls_bundle)
