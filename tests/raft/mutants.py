"""Runs one planted defect against the scenarios and the simulation.

    python -m tests.raft.mutants NAME      prints what caught it; exits 1 if nothing did
    python -m tests.raft.mutants --list

A mutant is a replacement in the core's source text. The changed core is put before the real one
on the import path, in a process of its own.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koinon_coordinator import core

CORE = Path(core.__file__).with_name("raft")
SEEDS_MAX = 400
TOPICS = ("elections", "replication", "changes", "snapshots")


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `file`; with `new` in its place the core is wrong. `seed` is one
    that showed it when that was last looked at: it is tried first.
    """

    name: str
    file: str
    old: str
    new: str
    seed: int | None = None


MUTANTS = [
    # What the packages that were tried do, or leave out.
    Mutant(
        "grants-two-votes-in-a-term",
        "raft.py",
        "self._vote in (None, request.sender)",
        "True",
    ),
    Mutant(
        "forgets-vote-on-restart",
        "raft.py",
        "self._vote = restored.hard_state.vote",
        "self._vote = None",
    ),
    Mutant(
        "forgets-term-on-restart",
        "raft.py",
        "self.term = restored.hard_state.term",
        "self.term = 0",
    ),
    Mutant(
        "vote-not-recorded",
        "raft.py",
        "                self._vote = request.sender\n",
        "                pass\n",
    ),
    Mutant(
        "counts-stale-votes",
        "raft.py",
        "self.role is role and reply.request_term == term",
        "self.role is role",
    ),
    Mutant(
        "counts-pre-votes-as-votes",
        "raft.py",
        "if self.role is role and reply.request_term == term",
        "if self.role in (Role.PRE_CANDIDATE, Role.CANDIDATE)",
    ),
    Mutant(
        "no-up-to-date-check",
        "raft.py",
        "up_to_date = (request.last_term, request.last_index) >= (last.term, last.index)",
        "up_to_date = True",
    ),
    Mutant(
        "compares-only-the-index",
        "raft.py",
        "up_to_date = (request.last_term, request.last_index) >= (last.term, last.index)",
        "up_to_date = request.last_index >= last.index",
    ),
    Mutant(
        "commits-older-terms-by-counting",
        "leader.py",
        "if index > before and log.term_at(index) == self._term:",
        "if index > before:",
    ),
    Mutant(
        "majority-off-by-one",
        "configuration.py",
        "return len(self.voters) // 2 + 1",
        "return max(1, len(self.voters) // 2)",
    ),
    Mutant(
        "majority-wrong-for-even-groups",
        "configuration.py",
        "return len(self.voters) // 2 + 1",
        "return (len(self.voters) + 1) // 2",
    ),
    Mutant(
        "no-log-matching-check",
        "follower.py",
        "elif log.term_at(previous_index) != request.previous_term:",
        "elif log.term_at(previous_index) is None:",
    ),
    Mutant(
        "truncates-a-matching-suffix",
        "log.py",
        "if self.term_at(entry.index) != entry.term:",
        "if self.term_at(entry.index) != entry.term or entry.index > self.commit_index:",
    ),
    Mutant(
        "follower-commits-what-it-lacks",
        "follower.py",
        "log.commit_to(min(request.commit_index, match_index))",
        "log.commit_to(min(request.commit_index, log.last_index))",
    ),
    Mutant(
        "counts-own-unpersisted-entries",
        "leader.py",
        "log.persisted_index if member_id == self._id",
        "log.last_index if member_id == self._id",
    ),
    Mutant(
        "read-without-a-quorum-round",
        "leader.py",
        "while self._open_reads and self._open_reads[0].round_id <= self._rounds.answered:",
        "while self._open_reads:",
    ),
    Mutant(
        "read-answered-by-an-earlier-round",
        "leader.py",
        "            round_id = self._begin_round(now)\n            contexts",
        "            round_id = self._rounds.current\n            contexts",
    ),
    Mutant(
        "read-before-the-terms-noop",
        "leader.py",
        "if self._new_reads and self.has_committed_in_term:",
        "if self._new_reads:",
    ),
    Mutant(
        "read-before-it-is-applied",
        "leader.py",
        "count = bisect_right(finished, self._log.applied_index, key=lambda read: read[0])",
        "count = len(finished)",
        seed=28,
    ),
    Mutant(
        "contact-counted-from-the-answer",
        "progress.py",
        "self._open.append((self.current, now))",
        "self._open.append((self.current, now + 0.02))",
    ),
    Mutant(
        "stale-contact-after-a-pause",
        "leader.py",
        "return now - last_contact <= self._config.check_quorum_ms / 1000",
        "return True",
    ),
    # Patience of processes that are starved.
    Mutant(
        "counts-time-in-which-it-did-not-run",
        "raft.py",
        "RunningTime(now, config.step_ms_max / 1000)",
        "RunningTime(now, 1e9)",
    ),
    Mutant(
        "leader-takes-requests-while-out-of-touch",
        "raft.py",
        "return leader if leader is not None and leader.has_quorum_contact(now) else None",
        "return leader",
    ),
    Mutant(
        "leader-alone-never-steps-down",
        "raft.py",
        "if hangs or running - self._quorum_heard_at > step_down_s:",
        "if hangs:",
    ),
    Mutant(
        "elections-in-vain-all-as-close",
        "raft.py",
        "wider = min(1 << max(0, self._campaigns - 2), _WIDER_MAX)",
        "wider = 1",
    ),
    # Durability before replies.
    Mutant(
        "term-and-vote-not-persisted",
        "raft.py",
        "hard_state=None if is_durable or self._persisting else hard_state",
        "hard_state=None",
    ),
    Mutant(
        "messages-before-term-and-vote-are-durable",
        "raft.py",
        "messages = _take(self._messages) if is_durable else ()",
        "messages = _take(self._messages)",
    ),
    Mutant(
        "acknowledges-before-entries-are-durable",
        "raft.py",
        "durable = match_index <= self.log.persisted_index",
        "durable = True",
    ),
    Mutant(
        "late-acknowledgement-of-an-old-term",
        "raft.py",
        "            self._messages_after_entries.clear()\n",
        "",
    ),
    Mutant(
        "replaced-entries-count-as-durable",
        "log.py",
        "        self._handed_out_to = min(self._handed_out_to, index - 1)\n",
        "",
    ),
    # Membership.
    Mutant(
        "learner-counted-in-quorum",
        "configuration.py",
        "return len(self.voters) // 2 + 1",
        "return max(1, len(self.voters) // 2 + 1 - len(self.learners))",
    ),
    Mutant(
        "learner-copies-count-for-commit",
        "leader.py",
        "            for member_id in log.configuration.voters\n        ]\n        index",
        "            for member_id in log.configuration.members\n        ]\n        index",
    ),
    Mutant(
        "leads-with-a-disk-that-hangs",
        "raft.py",
        "hangs = self.is_save_late(now) and leader.can_be_spared(now)",
        "hangs = False",
    ),
    Mutant(
        "disk-that-hangs-leaves-nobody-to-lead",
        "raft.py",
        "hangs = self.is_save_late(now) and leader.can_be_spared(now)",
        "hangs = self.is_save_late(now)",
    ),
    Mutant(
        "campaigns-with-a-disk-that-hangs",
        "raft.py",
        "if self._may_campaign() and not self.is_save_late(now):",
        "if self._may_campaign():",
    ),
    Mutant(
        "takes-over-with-a-disk-that-hangs",
        "raft.py",
        "if self.role is Role.FOLLOWER and is_voter and not self.is_save_late(now):",
        "if self.role is Role.FOLLOWER and is_voter:",
    ),
    Mutant(
        "learner-campaigns",
        "raft.py",
        "return self._id in self.configuration.voters or self._id in committed.voters",
        "return self._id in self.configuration",
    ),
    Mutant(
        "change-without-waiting-for-the-previous",
        "leader.py",
        "if self._log.has_uncommitted_configuration:",
        "if False:",
    ),
    Mutant(
        "change-before-the-terms-noop",
        "leader.py",
        "        if not self.has_committed_in_term:\n            return Refusal",
        "        if False:\n            return Refusal",
    ),
    Mutant(
        "removal-that-leaves-no-majority-in-touch",
        "leader.py",
        "if in_touch < changed.quorum and member_id in current.voters:",
        "if False:",
    ),
    Mutant(
        "change-not-rolled-back",
        "log.py",
        "        self.configurations.truncate_from(index)\n",
        "",
    ),
    Mutant(
        "removed-leader-counts-itself",
        "leader.py",
        "            for member_id in log.configuration.voters\n        ]\n        index",
        "            for member_id in {self._id, *log.configuration.voters}\n"
        "        ]\n        index",
    ),
    Mutant(
        "removed-leader-leads-on",
        "raft.py",
        "if self._leader is not None and self._id not in committed.voters:",
        "if False:",
    ),
    # Snapshots.
    Mutant(
        "chunk-out-of-order-accepted",
        "follower.py",
        "chunk.offset == len(self._received) and self._has_room_for(chunk)",
        "self._has_room_for(chunk)",
    ),
    Mutant(
        "snapshot-checksum-ignored",
        "follower.py",
        "if zlib.crc32(data) != chunk.checksum:",
        "if False:",
    ),
    Mutant(
        "snapshot-over-newer-state",
        "follower.py",
        "if chunk.snapshot_index <= log.commit_index:",
        "if False:",
    ),
    Mutant(
        "snapshot-of-the-wrong-configuration",
        "log.py",
        "self.configurations.at(index), data)",
        "self.configurations._versions[0][1], data)",
    ),
    # Liveness.
    Mutant(
        "lost-appends-never-noticed",
        "progress.py",
        "            self.tail_check_due = True\n",
        "            pass\n",
    ),
    Mutant(
        "lost-chunk-never-sent-again",
        "leader.py",
        "            self._resend_chunk_if_lost(progress, now)\n",
        "",
    ),
    Mutant(
        "no-leader-stickiness",
        "raft.py",
        "if request.transfer or not self._hears_leader(now):",
        "if True:",
    ),
    Mutant(
        "transfer-before-the-target-has-caught-up",
        "leader.py",
        "if self.progress[transfer.to].match_index == self._log.last_index:",
        "if True:",
    ),
    Mutant(
        "no-pre-vote",
        "raft.py",
        "self._campaign(now, pre_vote=True)",
        "self._campaign(now, pre_vote=False)",
    ),
]


def plant(mutant: Mutant, directory: Path) -> None:
    """Have the core be imported from ``directory``, with the defect in it."""
    shutil.copytree(CORE, directory / "raft")
    source = (CORE / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: its text occurs {source.count(mutant.old)} times in {mutant.file}"
        )
    (directory / "raft" / mutant.file).write_text(source.replace(mutant.old, mutant.new))
    core.__path__.insert(0, str(directory))


def _cases(scenario: Any) -> list[dict[str, Any]]:
    """Return the arguments of each case of a scenario: none, or the values of its one parameter."""
    for mark in getattr(scenario, "pytestmark", ()):
        if mark.name == "parametrize":
            name, values = mark.args
            return [{name: value} for value in values]
    return [{}]


def what_catches(likely: int | None, seeds_max: int) -> str | None:
    """Return what fails with the core that is imported now: the seed that is likely to, or the
    first scenario or seed; None if nothing does.
    """
    simulation = importlib.import_module("tests.raft.simulation")
    if likely is not None and (violation := _violation_of(simulation, likely)) is not None:
        return violation
    for topic in TOPICS:
        scenarios = vars(importlib.import_module(f"tests.raft.test_scenarios_{topic}"))
        for name in [name for name in scenarios if name.startswith("test_")]:
            for arguments in _cases(scenarios[name]):
                try:
                    scenarios[name](**arguments)
                except Exception as error:
                    return f"{name} ({type(error).__name__})"
    violations = (_violation_of(simulation, seed) for seed in range(seeds_max))
    return next(filter(None, violations), None)


def _violation_of(simulation: Any, seed: int) -> str | None:
    try:
        simulation.run_seed(seed)
    except AssertionError as error:
        return str(error)[:200]
    return None


def forget() -> None:
    """Import what catches mutants, then forget the core and all that has imported it."""
    for module in ("simulation", *(f"test_scenarios_{topic}" for topic in TOPICS)):
        importlib.import_module(f"tests.raft.{module}")
    with_the_core = ("koinon_coordinator.core.raft", "koinon_coordinator.raft", "tests.raft.")
    for name in [name for name in sys.modules if name.startswith(with_the_core)]:
        if name != __name__:
            del sys.modules[name]


def main() -> int:
    if sys.argv[1:] == ["--list"]:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0
    (mutant,) = (m for m in MUTANTS if m.name == sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        plant(mutant, Path(scratch))
        caught_by = what_catches(mutant.seed, SEEDS_MAX)
        planted = importlib.import_module(f"koinon_coordinator.core.raft.{mutant.file[:-3]}")
        assert str(planted.__file__).startswith(scratch), "the mutant was not what ran"
    print(f"{mutant.name}: {'caught by ' + caught_by if caught_by else 'MISSED'}")
    return 0 if caught_by else 1


if __name__ == "__main__":
    sys.exit(main())
