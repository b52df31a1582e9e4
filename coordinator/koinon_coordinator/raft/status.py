"""A member's status of itself and, if it leads, of the others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from koinon_coordinator.core.raft import RaftCore, Role
from koinon_coordinator.raft.election_stats import RecentElections


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """One member as seen by the answering member. Only a leader knows the last three fields."""

    address: str
    is_voter: bool
    match_index: int | None
    is_active: bool | None
    lag_entries: int | None


@dataclass(kw_only=True, slots=True)
class RaftCounters:
    """Running totals since the start, for metrics."""

    elections_started: int = 0
    leader_changes: int = 0  # how often this member heard of another leader


@dataclass(frozen=True, kw_only=True, slots=True)
class RaftStatus:
    """A member's state at one moment."""

    member_id: str
    role: Role
    term: int
    leader_id: str | None
    leader_address: str | None
    commit_index: int
    applied_index: int
    last_index: int
    snapshot_index: int
    members: Mapping[str, MemberStatus]
    is_changing: bool  # whether `members` include a change that is not committed yet
    pending_save_s: float  # the duration of the save under way; 0 if there is none
    counters: RaftCounters  # a copy
    elections: RecentElections


def status_of(
    core: RaftCore,
    member_id: str,
    now: float,
    counters: RaftCounters,
    elections: RecentElections,
) -> RaftStatus:
    """Return the status of ``core``, the core of member ``member_id``."""
    voters = core.configuration.voters
    members = {
        other: _member_status(core, member_id, other, address, other in voters, now)
        for other, address in core.configuration.members.items()
    }
    return RaftStatus(
        member_id=member_id,
        role=core.role,
        term=core.term,
        leader_id=core.leader_id,
        leader_address=core.configuration.address_of(core.leader_id or ""),
        commit_index=core.log.commit_index,
        applied_index=core.log.applied_index,
        last_index=core.log.last_index,
        snapshot_index=core.log.snapshot.index,
        members=members,
        is_changing=core.log.has_uncommitted_configuration,
        pending_save_s=core.saving_s(now),
        counters=replace(counters),
        elections=elections,
    )


def _member_status(
    core: RaftCore, own_id: str, member_id: str, address: str, is_voter: bool, now: float
) -> MemberStatus:
    match_index: int | None = None
    is_active: bool | None = None
    if member_id == own_id:
        match_index, is_active = core.log.persisted_index, True
    elif member_id in core.progress:
        match_index = core.progress[member_id].match_index
        is_active = core.is_active(member_id, now)
    known = core.role is Role.LEADER and match_index is not None
    return MemberStatus(
        address=address,
        is_voter=is_voter,
        match_index=match_index if known else None,
        is_active=is_active if known else None,
        lag_entries=core.log.last_index - match_index
        if known and match_index is not None
        else None,
    )
