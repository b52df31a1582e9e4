"""A Raft member on asyncio: the core, its storage and its transport, and the state machine.

Everything but `RaftStorage.save` and the encoding of snapshots happens on the event loop; saves run
on a thread of their own, one at a time, and what gathers meanwhile goes with the next one (group
commit). Messages that need no disk, a leader's appends among them, leave before the save begins.

A member stops by itself after a failed write, an `apply` that raises, a broken invariant, or its
own removal; `stopped` raises the reason.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from koinon_coordinator.core.raft import (
    Configuration,
    Entry,
    EntryKind,
    LogPosition,
    LostEntriesError,
    Message,
    RaftCore,
    Ready,
    Refusal,
    RemovedFromGroup,
    Role,
    RoleChange,
    TransferGivenUp,
)
from koinon_coordinator.raft.election_stats import ElectionHistory
from koinon_coordinator.raft.errors import (
    MemberRemovedError,
    MemberStoppedError,
    StoreChangedError,
    check_term,
)
from koinon_coordinator.raft.member_config import TICKS_APART_MAX, RaftConfig
from koinon_coordinator.raft.refusals import change_error, not_leader, request_error
from koinon_coordinator.raft.snapshots import Snapshots
from koinon_coordinator.raft.status import RaftCounters, RaftStatus, status_of
from koinon_coordinator.raft.storage import LmdbRaftStorage, RaftStorage
from koinon_coordinator.raft.transport import RaftTransport
from koinon_coordinator.raft.waiting import Waiting
from koinon_proto.contract.cluster_errors import (
    MembershipChangeError,
    NotLeaderError,
)
from koinon_proto.process.clock import boottime
from koinon_proto.process.measures import Histogram

log = logging.getLogger(__name__)

PROCESS_S = 0.01  # of work in one turn of the event loop, about
_GROUP = ""  # the group's id is pinned beside the members' store ids; no member has this name


class StateMachine(Protocol):
    """The state that the group replicates. Called on the event loop, in log order."""

    @property
    def group_id(self) -> str:
        """The group's own id, "" until it has one. It distinguishes the members of another group
        that are met at a reused address.
        """
        ...

    def apply(self, index: int, command: bytes) -> object:
        """Apply a command, deterministically; the result goes to a proposer here."""
        ...

    def capture(self) -> Callable[[], bytes]:
        """Return a function that encodes a snapshot of the present state. It is called on another
        thread, while further commands are applied.
        """
        ...

    def restore(self, snapshot: bytes) -> None: ...


class RaftMember:
    """One member of the group, for as long as its process runs. Use it on one event loop."""

    def __init__(
        self,
        config: RaftConfig,
        state_machine: StateMachine,
        transport: RaftTransport,
        *,
        on_leader: Callable[[int], None] | None = None,
        on_follower: Callable[[int, str | None], None] | None = None,
        storage: Callable[[], RaftStorage] | None = None,
    ) -> None:
        """`on_leader(term)` is called once this member leads and has applied all entries committed
        before its term; `on_follower(term, leader_id)` when that leadership is lost."""
        self._config = config
        self._state_machine = state_machine
        self._transport = transport
        self._on_leader = on_leader
        self._on_follower = on_follower
        self._open_storage = storage or self._open_lmdb
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raft-storage")
        self._storage: RaftStorage | None = None
        self._core: RaftCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store_id = ""  # of this member's own directory
        self._pins: dict[str, str] = {}  # by member: the store it was first met with; and _GROUP
        self._pin_lock = asyncio.Lock()  # two hellos at once agree on the first value
        self._group_pinning: asyncio.Task[str | None] | None = None
        self._waiting = Waiting()
        self._served_term: int | None = None  # the term that on_leader was called for
        self._leads = False  # by the core; it may not serve yet
        self._snapshots = Snapshots(config)
        self._scheduled = False  # whether ``_process`` runs at the end of this turn
        self._running = False  # between ``start`` and ``_halt``
        self._saving: asyncio.Future[float] | None = None  # the save that is out, one at a time
        self._tick_timer: asyncio.TimerHandle | None = None
        self._outcome: asyncio.Future[None] | None = None  # ends with the member, with its error
        self._closing: asyncio.Task[None] | None = None  # set once: the member has begun to stop
        self.counters = RaftCounters()
        self._elections = ElectionHistory(boottime())
        self.commit_seconds = Histogram()  # from proposal to apply, of this member's own proposals
        self.sync_seconds = Histogram()  # of saves
        self._leader_seen = (0, "")  # term and id of the leader that was heard of last

    # -- life

    async def start(self) -> None:
        """Open the directory, restore the state machine, and take part in the group.

        Raises DataDirectoryError or UnsupportedVersionError if the directory is not usable.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        try:
            storage = await loop.run_in_executor(self._thread, self._open_storage)
            self._storage = storage
            restored = await loop.run_in_executor(self._thread, storage.load)
            self._pins = await loop.run_in_executor(self._thread, storage.pinned_stores)
            check_term(restored.hard_state.term, self._config.data_dir)
        except BaseException:
            await self._close()
            raise
        self._store_id = storage.store_id
        if restored.snapshot.index > 0:
            self._state_machine.restore(restored.snapshot.data)
        self._core = RaftCore(self._config.core_config(), restored, random.Random(), boottime())
        self._running = True
        self._transport.attach(self)
        self._process()
        self._tick()
        log.info(
            "member started member_id=%s term=%d last_index=%d snapshot_index=%d",
            self.member_id,
            self._core.term,
            self._core.log.last_index,
            restored.snapshot.index,
        )

    async def stop(self) -> None:
        """Leave at once. Waiting proposers learn that their proposal's fate is unknown."""
        self._halt(None)
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def stopped(self) -> None:
        """Wait until the member has stopped; raise the error that stopped it, if any."""
        if self._outcome is None:
            raise MemberStoppedError(reason=f"member {self.member_id} was never started")
        await asyncio.shield(self._outcome)

    def _open_lmdb(self) -> RaftStorage:
        return LmdbRaftStorage(
            self._config.data_dir,
            self._config.member_id,
            Configuration(voters=self._config.initial_members),
            map_bytes=self._config.map_bytes,
            map_bytes_max=self._config.map_bytes_max,
        )

    def _halt(self, error: BaseException | None) -> None:
        """Stop taking part, and end all waiting requests with an error."""
        if self._closing is not None or self._loop is None:
            return
        self._running = False
        if error is not None:
            log.error("member stops member_id=%s error=%r", self.member_id, error, exc_info=error)
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        why = f"member {self.member_id} stopped" + (f": {error}" if error else "")
        term = self._core.term if self._core is not None else 0
        self._waiting.fail_proposals(why, before_term=term + 1)
        self._waiting.fail_reads(lambda: MemberStoppedError(reason=why))
        self._waiting.settle_transfers(lambda: MemberStoppedError(reason=why))
        self._leads = False
        self._closing = self._loop.create_task(self._finish(error))

    async def _finish(self, error: BaseException | None) -> None:
        assert self._outcome is not None
        try:
            if self._core is not None:
                self._stop_serving(self._core.term, None)
            await self._close()
        except Exception as closing_error:
            log.exception("closing failed member_id=%s", self.member_id)
            error = error or closing_error
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)
            self._outcome.exception()  # seen, even if no caller waits for it

    async def _close(self) -> None:
        await self._transport.close()
        if self._saving is not None:
            await asyncio.wait([self._saving])
        if self._storage is not None:
            storage, self._storage = self._storage, None
            await asyncio.get_running_loop().run_in_executor(self._thread, storage.close)
        self._thread.shutdown(wait=False)

    # -- requests

    async def propose(self, command: bytes) -> object:
        """Replicate `command`; return the result of `apply` for it on this member.

        Raises NotLeaderError, ProposalQueueFullError, InvalidArgumentError or MemberStoppedError
        if it was never appended, and ProposalUnknownError if its fate is unknown.
        """
        core = self._running_core()
        now = boottime()
        outcome = core.propose(command, now)
        self._schedule()
        if isinstance(outcome, Refusal):
            raise request_error(outcome, core, self._config, size_bytes=len(command))
        return await self._waiting.for_proposal(outcome, now)

    async def read_barrier(self) -> int:
        """Return once everything committed before this call is applied here; the index up to
        which it is. Raises NotLeaderError, also when leadership is lost meanwhile."""
        core = self._running_core()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        refusal = core.read_index(future, boottime())
        self._schedule()
        if refusal is not None:
            raise request_error(refusal, core, self._config)
        return await self._waiting.for_read(future)

    async def add_learner(self, member_id: str, address: str) -> None:
        """Add a member that receives all entries and has no vote; return once that is committed."""
        core, now = self._running_core(), boottime()
        await self._changed(core.add_learner(member_id, address, now), now, member_id, address)

    async def change_own_address(self, address: str) -> None:
        """Replicate a new address of this leader, which is the only member of its group."""
        core, now = self._running_core(), boottime()
        await self._changed(core.change_own_address(address, now), now, self.member_id, address)

    async def promote(self, member_id: str) -> None:
        """Give a vote to a learner that has caught up."""
        core, now = self._running_core(), boottime()
        await self._changed(core.promote(member_id, now), now, member_id)

    async def remove_member(self, member_id: str) -> None:
        """Remove a voter or a learner. A leader that removes itself steps down once that is
        committed. A voter is not removed if the leader could then reach no majority."""
        core, now = self._running_core(), boottime()
        await self._changed(core.remove_member(member_id, now), now, member_id)

    async def transfer_leadership(self, to: str | None = None) -> None:
        """Hand over to `to` (None: the voter that is furthest on); done when this member no
        longer leads. Raises MembershipChangeError if the target does not take over in time."""
        core = self._running_core()
        now = boottime()
        outcome = core.transfer_leadership(to, now)
        self._schedule()
        if isinstance(outcome, Refusal):
            raise change_error(outcome, core, now, to)
        log.info("transfer begun member_id=%s to=%s", self.member_id, outcome)
        await self._waiting.for_transfer()

    async def _changed(
        self, outcome: LogPosition | Refusal, now: float, member_id: str, address: str = ""
    ) -> None:
        self._schedule()
        if isinstance(outcome, Refusal):
            raise change_error(outcome, self._running_core(), now, member_id, address)
        await self._waiting.for_proposal(outcome, now)

    def quorum_contact_at(self) -> float | None:
        """Return when (by `boottime`) the newest round that a quorum has answered was sent; None if
        this member does not lead. Right after a pause as well: it is a fact, not a claim of now."""
        if self._core is None or not self._running:
            return None
        return self._core.quorum_contact_at(boottime())

    def status(self) -> RaftStatus:
        """Return this member's status.

        Raises MemberStoppedError.
        """
        now = boottime()
        elections = self._elections.recent(now)
        return status_of(self._running_core(), self.member_id, now, self.counters, elections)

    def _running_core(self) -> RaftCore:
        if self._core is None or not self._running:
            raise MemberStoppedError(reason=f"member {self.member_id} is not running")
        return self._core

    def _not_leader(self) -> NotLeaderError:
        assert self._core is not None
        return not_leader(self._core)

    # -- the transport's side (RaftEndpoint)

    @property
    def group(self) -> str:
        return self._pins.get(_GROUP, "")

    @property
    def member_id(self) -> str:
        return self._config.member_id

    @property
    def store_id(self) -> str:
        return self._store_id

    @property
    def address(self) -> str:
        if self._core is None:
            return ""
        return self._core.configuration.address_of(self.member_id) or ""

    def listens_to(self, member_id: str, group: str) -> bool:
        core = self._core
        if core is None:
            return False
        if core.is_member(member_id):
            return True
        names_group = "" not in (group, self.group) or not core.configuration.members
        return names_group and core.listens_to_strangers(boottime())

    def on_messages(self, messages: Sequence[Message]) -> None:
        if not self._running or self._core is None:
            return
        now = boottime()
        sender = ""
        try:
            for message in messages:
                sender = message.sender
                if not self._core.listens_to(sender, now):
                    continue  # its membership has ended since its hello
                self._core.step(message, now)
        except LostEntriesError:
            self._halt(StoreChangedError(member_id=self.member_id, noticed_by=sender))
            return
        except Exception as error:
            self._halt(error)
            return
        self._schedule()

    async def is_known_store(self, member_id: str, store_id: str) -> bool:
        if self._core is None or member_id not in self._core.configuration:
            return True  # a stranger: the core knows what to make of it, and it leaves no trace
        known = await self._pin(member_id, store_id)
        if known is None:
            raise MemberStoppedError(reason=f"member {self.member_id} is not running")
        return known == store_id

    async def _pin(self, name: str, value: str) -> str | None:
        """Remember the first value of the name, durably; return the remembered value."""
        if name in self._pins:  # hellos are repeated: none is to wait for the disk
            return self._pins[name]
        async with self._pin_lock:
            known = self._pins.get(name)
            if known is None and self._running and self._storage is not None:
                assert self._loop is not None
                pin = self._storage.pin_store
                try:
                    await self._loop.run_in_executor(self._thread, pin, name, value)
                except Exception as error:
                    self._halt(error)
                    return None
                known = self._pins[name] = value
        return known

    def _pin_group(self) -> None:
        """Remember the group's id, once the group has one."""
        if (
            _GROUP not in self._pins
            and self._group_pinning is None
            and self._state_machine.group_id
        ):
            assert self._loop is not None
            self._group_pinning = self._loop.create_task(
                self._pin(_GROUP, self._state_machine.group_id)
            )

    def on_store_refused(self, refused_by: str) -> None:
        self._halt(StoreChangedError(member_id=self.member_id, noticed_by=refused_by))

    # -- the loop

    def _tick(self) -> None:
        if not self._running:
            return
        assert self._core is not None
        try:
            self._core.tick(boottime())
            self._process()
        finally:
            if self._running:
                self._tick_later()

    def _tick_later(self) -> None:
        """Schedule the next tick: when the core has work, but not before an interval has passed,
        and early enough not to look like a pause of this process.
        """
        assert self._core is not None
        assert self._loop is not None
        now, interval_s = boottime(), self._config.tick_interval_ms / 1000
        intervals = (self._core.tick_due_at(now) - now) / interval_s
        delay_s = min(max(1.0, intervals), TICKS_APART_MAX) * interval_s
        self._tick_timer = self._loop.call_later(delay_s, self._tick)

    def _schedule(self) -> None:
        """Process at the end of this turn of the loop: its proposals share one output."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._process_scheduled)

    def _process_scheduled(self) -> None:
        self._scheduled = False
        self._process()

    def _process(self) -> None:
        """Carry out the core's outputs until there are no more. Only many entries to apply, after a
        restart, take long: heartbeats are sent in between.
        """
        began_at = time.perf_counter()
        try:
            while self._running and self._core is not None:
                ready = self._core.ready(boottime())
                if ready is None:
                    return
                self._carry_out(ready)
                if ready.committed and time.perf_counter() - began_at > PROCESS_S:
                    self._schedule()
                    return
        except Exception as error:
            self._halt(error)

    def _carry_out(self, ready: Ready) -> None:
        if ready.configuration is not None:
            self._transport.set_peers(ready.configuration.members)
        self._transport.send(ready.messages)
        if ready.needs_persist:
            self._begin_save(ready)
        else:
            self._transport.send(ready.messages_after_persist)
        if ready.snapshot_write is not None and ready.snapshot_write.installed:
            self._state_machine.restore(ready.snapshot_write.snapshot.data)
            self._snapshots.counted_anew()
        for entry in ready.committed:
            self._apply(entry)
        self._pin_group()
        for index, context in ready.finished_reads:
            assert isinstance(context, asyncio.Future)
            if not context.done():
                context.set_result(index)
        for event in ready.events:
            self._on_event(event)
        if ready.committed:
            self._take_snapshot_if_due()

    def _apply(self, entry: Entry) -> None:
        result: object = None
        began_s = time.thread_time()
        if entry.kind is EntryKind.COMMAND:
            result = self._state_machine.apply(entry.index, entry.data)
        self._snapshots.applied(entry.size_bytes, time.thread_time() - began_s)
        proposed_at = self._waiting.on_applied(entry, result)
        if proposed_at is not None:
            self.commit_seconds.observe(boottime() - proposed_at)
        core = self._core
        assert core is not None
        opens_term = entry.kind is EntryKind.NOOP and entry.term != self._served_term
        if opens_term and core.role is Role.LEADER and entry.term == core.term:
            self._served_term = entry.term
            log.info("leader serves member_id=%s term=%d", self.member_id, entry.term)
            if self._on_leader is not None:
                self._on_leader(entry.term)

    def _begin_save(self, ready: Ready) -> None:
        assert self._loop is not None
        self._saving = self._loop.run_in_executor(self._thread, self._save, ready)
        self._saving.add_done_callback(lambda saving: self._on_saved(ready, saving))

    def _save(self, ready: Ready) -> float:
        """Save on the storage thread. Return the seconds it took."""
        storage = self._storage
        assert storage is not None
        began_at = time.perf_counter()
        storage.save(
            hard_state=ready.hard_state,
            snapshot_write=ready.snapshot_write,
            entries=ready.entries,
        )
        return time.perf_counter() - began_at

    def _on_saved(self, ready: Ready, saving: asyncio.Future[float]) -> None:
        self._saving = None
        error = saving.exception()
        if error is not None:
            self._halt(error)
        if not self._running or self._core is None:
            return
        self.sync_seconds.observe(saving.result())
        self._transport.send(ready.messages_after_persist)
        self._core.advance(ready)
        self._process()

    def _take_snapshot_if_due(self) -> None:
        core = self._core
        assert core is not None
        index = core.log.applied_index
        if self._snapshots.is_due(index - core.log.snapshot.index):
            self._snapshots.begin(self._state_machine.capture(), partial(self._on_encoded, index))

    def _on_encoded(self, index: int, encoded: bytes | BaseException) -> None:
        """Compact the log, now that the state after ``index`` is encoded, unless a newer snapshot
        came from the leader meanwhile.
        """
        if isinstance(encoded, BaseException):
            self._halt(encoded)
        elif self._running and self._core is not None and index > self._core.log.snapshot.index:
            self._core.compact(index, encoded)
            self._process()

    # -- events

    def _on_event(self, event: RoleChange | RemovedFromGroup | TransferGivenUp) -> None:
        if isinstance(event, RoleChange):
            self._on_role(event)
        elif isinstance(event, TransferGivenUp):
            log.warning("transfer given up member_id=%s to=%s", self.member_id, event.to)
            self._waiting.settle_transfers(
                lambda: MembershipChangeError(reason=f"{event.to} did not take over in time")
            )
        else:
            self._halt(MemberRemovedError(member_id=self.member_id, index=event.index))

    def _on_role(self, event: RoleChange) -> None:
        log.info(
            "role changed member_id=%s role=%s term=%d leader=%s",
            self.member_id,
            event.role.value,
            event.term,
            event.leader_id,
        )
        self._elections.note(boottime(), event.term, event.leader_id)
        if event.role is Role.CANDIDATE:
            self.counters.elections_started += 1
        if event.leader_id is not None and self._leader_seen != (event.term, event.leader_id):
            self._leader_seen = event.term, event.leader_id
            self.counters.leader_changes += 1
        if self._leads:
            self._warn_if_disk_hangs()
            # It may lead again by now, and hold proposals of the new term.
            first_term = event.term if event.role is Role.LEADER else event.term + 1
            self._waiting.fail_proposals(
                "leadership was lost before the proposal was applied", before_term=first_term
            )
            self._waiting.fail_reads(self._not_leader)
            self._waiting.settle_transfers(None)
            if self._served_term != event.term or event.role is not Role.LEADER:
                self._stop_serving(event.term, event.leader_id)
        self._leads = event.role is Role.LEADER

    def _warn_if_disk_hangs(self) -> None:
        now = boottime()
        if self._core is not None and self._core.is_save_late(now):
            log.warning(
                "disk hangs member_id=%s saving_s=%.1f why=%s",
                self.member_id,
                self._core.saving_s(now),
                "a write to the log has not returned; this member leads again only once it has",
            )

    def _stop_serving(self, term: int, leader_id: str | None) -> None:
        """Call `on_follower` if `on_leader` was called for a leadership that is over."""
        if self._served_term is not None:
            self._served_term = None
            if self._on_follower is not None:
                self._on_follower(term, leader_id)
