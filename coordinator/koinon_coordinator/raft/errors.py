"""What a Raft member raises, beside `koinon_proto.contract.errors.NotLeaderError`.

Two of them are the wire's own errors under the name that they have here, so that a service can
pass them on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    """The member is not running (any more); nothing was appended."""


@dataclass(kw_only=True, eq=False)
class MemberRemovedError(KoinonError):
    """A committed configuration leaves this member out; it has stopped."""

    member_id: str
    index: int

    def __str__(self) -> str:
        return f"member {self.member_id} was removed from the group at index {self.index}"


@dataclass(kw_only=True, eq=False)
class StoreChangedError(KoinonError):
    """A peer knows this member by another data directory, or remembers entries of it that it
    does not have: what it voted and acknowledged is lost, so it must not take part."""

    member_id: str
    noticed_by: str

    def __str__(self) -> str:
        return (
            f"member {self.member_id} lost its data: remove it and add it again under a new id "
            f"(noticed by {self.noticed_by}; or is that a member of another cluster?)"
        )


@dataclass(kw_only=True, eq=False)
class StorageFailedError(KoinonError):
    """Writing to disk failed; what is durable is no longer known, so the member has stopped."""

    maybe_applied: ClassVar[bool] = True

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"
