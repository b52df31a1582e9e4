"""Errors within a cluster: of its servers among one another, of operators' changes, of bulk loads.

Programs that read and write never meet them. ``errors`` has the errors of such programs, and
explains the attributes of the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from koinon_proto.contract.error_words import KoinonError
from koinon_proto.contract.errors_gen import (
    BackupStoppedError,
    CutFailedError,
    DuplicateNodeError,
    FencedEpochError,
    GroupInUseError,
    KeyspaceChangeError,
    LoadClosedError,
    LoadIncompleteError,
    MembershipChangeError,
    NodeFencedError,
    NotLeaderError,
    PlanStaleError,
    RegistrationPendingError,
    UnknownGroupError,
    UnknownNodeError,
)

__all__ = [
    "BackupStoppedError",
    "CutFailedError",
    "DataDirectoryError",
    "DuplicateNodeError",
    "FencedEpochError",
    "GroupInUseError",
    "KeyspaceChangeError",
    "LoadClosedError",
    "LoadIncompleteError",
    "MembershipChangeError",
    "NodeFencedError",
    "NotLeaderError",
    "PlanStaleError",
    "RegistrationPendingError",
    "UnknownGroupError",
    "UnknownNodeError",
]


@dataclass(kw_only=True, eq=False)
class DataDirectoryError(KoinonError):
    """A data directory that cannot be used as it is; ``path`` names the file."""

    template: ClassVar[str] = "{e.path}: {e.reason}"

    path: str
    reason: str
