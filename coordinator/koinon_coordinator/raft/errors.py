"""The errors of a Raft member, beside `koinon_proto.contract.cluster_errors.NotLeaderError`.

Two of them are aliases of the wire's errors, so that services can pass them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from koinon_coordinator.core.raft import TERM_MAX
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import (
    KoinonError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)

ProposalQueueFullError = ResourceExhaustedError
ProposalUnknownError = UnknownFateError


@dataclass(kw_only=True, eq=False)
class MemberStoppedError(UnavailableError):
    """The member is not running (any more); nothing was appended to the log."""


@dataclass(kw_only=True, eq=False)
class MemberRemovedError(KoinonError):
    """A committed configuration leaves this member out; it has stopped."""

    template: ClassVar[str] = "member {e.member_id} was removed from the group at index {e.index}"

    member_id: str
    index: int


@dataclass(kw_only=True, eq=False)
class StoreChangedError(KoinonError):
    """A peer knows this member by another data directory, or remembers entries that this member
    lacks: its votes and acknowledgements are lost, so it must not take part.
    """

    template: ClassVar[str] = (
        "member {e.member_id} lost its data: remove it and add it again under a new id "
        "(noticed by {e.noticed_by}; or is that a member of another cluster?)"
    )

    member_id: str
    noticed_by: str


@dataclass(kw_only=True, eq=False)
class StorageFailedError(KoinonError):
    """Writing to disk failed. It is unknown which data are durable, so the member has stopped."""

    template: ClassVar[str] = "{e.path}: {e.reason}"
    maybe_applied: ClassVar[bool] = True

    path: str
    reason: str


def check_term(term: int, data_dir: Path) -> None:
    """Refuse a stored term beyond TERM_MAX, with which no election could be won.

    Raises:
        DataDirectoryError: it is one; the error says what to do.
    """
    if term > TERM_MAX:
        raise DataDirectoryError(
            path=str(data_dir),
            reason=f"its term, {term}, is one that no group reaches. Remove this member and add it "
            "again under a new id; where no majority is left, make a new group with "
            "koinon recover-coordinators",
        )
