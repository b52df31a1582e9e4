"""Makes errors of the core's refusals: the subject, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from koinon_coordinator.core.raft import RaftCore, Refusal
from koinon_coordinator.raft.errors import ProposalQueueFullError
from koinon_coordinator.raft.member_config import RaftConfig
from koinon_proto.contract.cluster_errors import MembershipChangeError, NotLeaderError
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError


def request_error(
    refusal: Refusal, core: RaftCore, config: RaftConfig, *, size_bytes: int = 0
) -> KoinonError:
    """Return the error for a refused proposal of ``size_bytes``, or a refused read."""
    if refusal is Refusal.TOO_LARGE:
        return InvalidArgumentError(
            field="command",
            reason=refusal.value,
            limit=config.append_bytes_max,
            actual=size_bytes,
        )
    full = {
        Refusal.QUEUE_FULL: ("uncommitted proposals", config.pending_proposals_max),
        Refusal.QUEUE_BYTES_FULL: (
            "the bytes of uncommitted proposals",
            config.pending_proposal_bytes_max,
        ),
        Refusal.READS_FULL: ("open reads", config.pending_reads_max),
    }
    if refusal in full:
        resource, limit = full[refusal]
        return ProposalQueueFullError(resource=f"Raft's queue of {resource}", limit=limit)
    return not_leader(core)


def change_error(
    refusal: Refusal, core: RaftCore, now: float, member_id: str | None, address: str = ""
) -> KoinonError:
    """Return the error for a refused change of the membership or of the leader: of adding,
    promoting or removing ``member_id`` (at ``address``), or handing leadership to it.
    """
    if refusal in (Refusal.NOT_LEADER, Refusal.TRANSFERRING):
        return not_leader(core)
    configuration = core.configuration
    members, voters = configuration.members, configuration.voters
    silent = [m for m in voters if m != core.leader_id and not core.is_active(m, now)]
    at = members.get(member_id or "", "")
    users = [other for other, its in members.items() if its == address]
    reasons = {
        Refusal.ALREADY_MEMBER: f"{member_id} is a member already, at {at}: remove it first",
        Refusal.ADDRESS_IN_USE: f"{_names(users)} is at {address} already: remove it first, "
        f"or give {member_id} another address",
        Refusal.NOT_A_MEMBER: f"{member_id} is not a member, or not any more; "
        f"the members are {_names(members)}",
        Refusal.NOT_A_LEARNER: f"{member_id} is not a learner; "
        f"the learners are {_names(configuration.learners)}",
        Refusal.NOT_A_VOTER: f"{member_id} is not a voter beside the leader, so it cannot lead; "
        f"the voters are {_names(voters)}",
        Refusal.LEARNER_BEHIND: f"{member_id} has not caught up: promote it once it has",
        Refusal.LAST_VOTER: f"{member_id} is the last voter: add another one first",
        Refusal.NO_TARGET: f"no other voter is in touch: bring {_names(silent, 'or')} back first",
        Refusal.NO_MAJORITY: f"without {member_id} no majority answers: "
        f"bring {_names((m for m in silent if m != member_id), 'or')} back, "
        f"or remove {_names((m for m in silent if m != member_id), 'or')} instead",
        Refusal.CHANGE_IN_FLIGHT: f"{refusal.value}: try again in a moment",
        Refusal.TERM_NOT_COMMITTED: f"{refusal.value}: try again in a moment",
    }
    return MembershipChangeError(reason=reasons.get(refusal, refusal.value))


def not_leader(core: RaftCore) -> NotLeaderError:
    """Return the refusal that names the leader, or the member that is about to lead."""
    leader_id = core.transfer_target or core.leader_id or ""
    return NotLeaderError(
        leader_id=leader_id,
        leader_address=core.configuration.address_of(leader_id) or "",
        term=core.term,
    )


def _names(members: Iterable[str], last_word: str = "and") -> str:
    """Return ``a, b and c``; ``none`` if there are no members."""
    *others, last = sorted(members) or ["none"]
    return f"{', '.join(others)} {last_word} {last}" if others else last
