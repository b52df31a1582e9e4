"""The node's agent for membership: registers, sends heartbeats, holds the lease, follows the table.

Runs on a thread of its own with blocking calls, so that an event loop busy with bulk writes cannot
delay heartbeats: the thread needs the GIL for a moment every interval and nothing from the loop.
Only this thread changes the table. Events from other threads (a watched update, an answer of the
leader, a ready partition) wait in its queue, and are handled at once, between two heartbeats.

Order within an acknowledged heartbeat: the table and the access state in the reply are applied and
published, then the lease is extended, counted from when the heartbeat was sent. So a revoked right
is refused here within a lease and a heartbeat, or this node serves no client. A table is published
(NodeState.served) before the event loop hears of it. The event loop's writer persists epochs, while
heartbeats go on.

An event loop that does not turn (a hanging call into C, a debugger) serves no client, but this
thread would keep its lease for ever. So with each heartbeat it schedules a callback on the loop.
After three lease times without a callback it gives up the lease, says farewell, and registers again
once the loop turns.

Transitions: unregistered -> (Register answered, epoch durable) -> registered -> (NodeFenced)
-> unregistered, and so on. WrongCluster, DuplicateNode and a partitioner that differs from the
cluster's end the process; the partitioner is checked before a table is published.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from koinon_node.config import NodeConfig
from koinon_node.core.membership.assignment import (
    Adoption,
    Assignment,
    HostCommand,
    ServedPartitions,
)
from koinon_node.core.membership.lease import (
    NO_LEASE,
    PATIENCE_LEASES,
    LoopWatchdog,
    clock_ahead_ms,
    heartbeat_timeout_s,
)
from koinon_node.core.membership.reports import LoopLag, Report
from koinon_node.membership.coordinator_calls import PLAIN_CHANNELS, Channels, Coordinators
from koinon_node.membership.table_watch import TableWatch
from koinon_node.state import NodeState
from koinon_node.storage.opened_store import CLUSTER_ID, NODE_EPOCH, REGISTRATION_ID, Identity
from koinon_proto.contract import convert
from koinon_proto.contract.access import Access
from koinon_proto.contract.cluster_errors import (
    DuplicateNodeError,
    MembershipChangeError,
    NodeFencedError,
    RegistrationPendingError,
    UnknownNodeError,
)
from koinon_proto.contract.codec import codec
from koinon_proto.contract.errors import (
    ConfigurationError,
    InvalidArgumentError,
    KoinonError,
    PartitionerMismatchError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.contract.leader_search import Route
from koinon_proto.contract.table import NodeId, NodeNumber, RedisPort, Table
from koinon_proto.contract.versions import NODE_PROTOCOL_VERSION
from koinon_proto.partitioner import partitioner_of
from koinon_proto.process.measures import Histogram
from koinon_proto.v1 import access_pb2, membership_pb2, table_pb2

log = logging.getLogger(__name__)

_COMMAND = codec(HostCommand, membership_pb2.HostCommand)
_REDIS_PORT = codec(RedisPort, table_pb2.RedisPort)
_FATAL = (
    WrongClusterError,
    DuplicateNodeError,
    ConfigurationError,
    PartitionerMismatchError,
    UnsupportedVersionError,
    InvalidArgumentError,
)
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.05, 0.2  # a waiting node asks as often as a member
_REMOVED_RETRY_S = 30.0
_REPORT_INTERVAL_S = 5.0  # between reports of partitions' sizes, and between those of the load
_FAREWELL_S_MAX = 1.0
_FAREWELL_TIMEOUT_S = 0.5  # of one attempt

Event = Callable[[], None]
"""A call for the agent's thread."""


class Host(Protocol):
    """The event loop's side, as the agent needs it. Coroutines and ``on_table`` run on the loop,
    the rest on the agent's thread.
    """

    async def adopt(self, adoptions: Sequence[Adoption]) -> None:
        """Persist the epochs and take the partitions over; each is reported with
        ``Agent.on_ready`` when it may be led. Returns or raises once they are persisted.
        """

    async def put_meta(self, values: Mapping[bytes, str]) -> None: ...
    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Handle a newer table, or another epoch of this node (0: fenced), that has been published,
        or the first acknowledged heartbeat of this epoch.
        """

    def stats(self) -> membership_pb2.NodeStats: ...
    def sizes(self) -> membership_pb2.PartitionSizes: ...
    def load(self, lag_s: float) -> membership_pb2.NodeLoad: ...
    def progress(self) -> Sequence[membership_pb2.ReplicaProgress]: ...
    def erased(self) -> Sequence[int]:
        """Return the ids of dropped keyspaces without any data on this node."""

    def on_fatal(self, error: BaseException) -> None:
        """The agent has ended with this error, which must end the process."""


class Agent:
    """The thread."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        seen_epochs: Mapping[int, int],
        state: NodeState,
        host: Host,
        channels: Channels = PLAIN_CHANNELS,
    ) -> None:
        self._config = config
        self._identity = identity
        self._cluster_id = identity.cluster_id
        self._node_epoch = 0  # of this process; 0 while unregistered
        self._last_node_epoch = identity.node_epoch
        self._registration_id = identity.registration_id
        self._state = state
        self._host = host
        self._assignment = Assignment(NodeId(config.node_id), seen_epochs)
        self._now = state.now
        self._coordinators = Coordinators(config.coordinators, self._now, channels)
        self._watch = TableWatch(
            lambda: (self._cluster_id, state.served.table_version),
            lambda: self._coordinators.route.current,
            lambda update: self._events.put(partial(self._apply_table, update)),
            channels.blocking,
        )
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._farewell = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0  # the identifier of the thread that runs the loop
        self._untold = False  # whether a call of ``Host.on_table`` is scheduled on the loop
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._heartbeat_interval_s = 0.2
        self._lease_s = 1.0
        self._held_lease = False
        self.old_store = ""  # why the directory is an old copy; '': it is not
        self.clock_ahead_ms = 0  # least lead of this clock over the leader's; negative: behind
        self._term = 0  # of the leader that answered last
        self._sizes, self._load = Report(_REPORT_INTERVAL_S), Report(_REPORT_INTERVAL_S)
        self.lag = LoopLag()  # of the callbacks scheduled on the loop
        self.lease_losses = 0  # since the start of this process
        self.heartbeat_seconds = Histogram()  # of acknowledged heartbeats

    def served_at(self, config: NodeConfig) -> None:
        """Set the configuration with the ports that the system has chosen; before ``start``."""
        self._config = config

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread. The host's coroutines run on ``loop``, which calls this method."""
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._thread.start()

    def stop(self, *, farewell: bool = False) -> None:
        """Stop the thread; no lease is held when this returns. ``farewell``: tell the leader that
        this node leaves, unless that takes long.
        """
        self._farewell = farewell
        self._stopping.set()
        self._events.put(None)
        self._watch.stop()
        if farewell:
            self._thread.join(timeout=_FAREWELL_S_MAX)
        self._coordinators.close()  # breaks off a waiting call
        self._thread.join(timeout=10.0)
        self._state.lease = NO_LEASE

    # --- from other threads ----------------------------------------------------------------

    def on_ready(self, adoptions: Sequence[Adoption]) -> None:
        """Note that these partitions have been taken over and may be led."""
        self._events.put(partial(self._ready, tuple(adoptions)))

    def registration(self) -> tuple[str, int, int, str] | None:
        """Return (cluster id, node epoch, table version, registration id); None while
        unregistered.
        """
        served = self._state.served
        if not served.node_epoch:
            return None
        registration_id = self._state.registration_id
        return self._cluster_id, served.node_epoch, served.table_version, registration_id

    def route(self) -> Route:
        """Return the coordinators' addresses and leader as known now."""
        known = self._coordinators.route
        return Route(known.addresses, known.current)

    async def hand_table(self, update: table_pb2.TableUpdate | None) -> None:
        """Apply the update on the agent's thread; return once it and all earlier ones are applied
        and the event loop's side has them. Never returns if the agent has ended.
        """
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[None] = loop.create_future()

        def apply() -> None:
            if update is not None:
                self._apply_table(update)
            loop.call_soon_threadsafe(_resolve, seen)

        self._events.put(apply)
        await seen

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._register():
                    self._heartbeat_until_fenced()
            if self._farewell and self._node_epoch:
                self._say_farewell()
        except BaseException as error:
            if self._stopping.is_set():
                return
            self._state.lease = NO_LEASE
            self._host.on_fatal(error)

    def _say_farewell(self) -> None:
        """Have the leader fence this epoch at once, after the lease is given up. Then neither other
        nodes nor this node's next start wait for the lease to end.
        """
        self._state.lease = NO_LEASE
        request = membership_pb2.LeaveRequest(
            cluster_id=self._cluster_id,
            node_id=self._config.node_id,
            node_epoch=self._node_epoch,
            registration_id=self._state.registration_id,
        )
        try:
            self._coordinators.leave(request, timeout_s=_FAREWELL_TIMEOUT_S)
        except KoinonError as error:
            log.info("no coordinator took the farewell error=%s", error)

    # --- registration ----------------------------------------------------------------------

    def _register(self) -> bool:
        """Register, however long it takes; return False if the node is stopping."""
        if not self._registration_id:
            self._registration_id = secrets.token_hex(16)
            self._wait(self._host.put_meta({REGISTRATION_ID: self._registration_id}))
        backoff_s = _BACKOFF_MIN_S
        while not self._stopping.is_set():
            try:
                reply = self._coordinators.register(self._register_request())
            except _FATAL:
                raise
            except RegistrationPendingError as error:
                log.info("registration pending retry_after_ms=%d", error.retry_after_ms)
                self._pause(max(error.retry_after_ms, 10) / 1000)
                continue
            except MembershipChangeError as error:
                log.warning("registration refused: stop this process error=%s", error)
                self._pause(_REMOVED_RETRY_S)
                continue
            except KoinonError as error:
                log.info("registration failed error=%s", error)
                self._pause(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
                continue
            self._on_registered(reply)
            return True
        return False

    def _register_request(self) -> membership_pb2.RegisterRequest:
        return membership_pb2.RegisterRequest(
            protocol_version=NODE_PROTOCOL_VERSION,
            cluster_id=self._cluster_id,
            node_id=self._config.node_id,
            address=self._config.advertise,
            rack=self._config.rack,
            store_id=self._identity.store_id,
            last_node_epoch=self._last_node_epoch,
            registration_id=self._registration_id,
            weight=self._config.weight,
            redis_address=self._config.redis_address,
            pool=self._config.pool,
            redis_ports=map(_REDIS_PORT.encode, self._config.redis_ports),
        )

    def _on_registered(self, reply: membership_pb2.RegisterResponse) -> None:
        if self._cluster_id and reply.cluster_id != self._cluster_id:
            raise WrongClusterError(
                expected_cluster_id=self._cluster_id, actual_cluster_id=reply.cluster_id
            )
        self._wait(
            self._host.put_meta(
                {
                    CLUSTER_ID: reply.cluster_id,
                    NODE_EPOCH: str(reply.node_epoch),
                    REGISTRATION_ID: "",
                }
            )
        )
        if reply.known_node_epoch:
            self.old_store = (
                f"an old copy of its directory, of node epoch {self._last_node_epoch}, was put in "
                f"the place of one of epoch {reply.known_node_epoch}"
            )
            log.warning(
                "data directory is an old copy store_epoch=%d known_epoch=%d why=%s",
                self._last_node_epoch,
                reply.known_node_epoch,
                "none of its copies counts as in sync: each catches up from its primary",
            )
        self._state.registration_id, self._registration_id = self._registration_id, ""
        self._cluster_id = reply.cluster_id
        self._node_epoch = self._last_node_epoch = reply.node_epoch
        self._heartbeat_interval_s = reply.heartbeat_interval_ms / 1000
        self._lease_s = reply.lease_ms / 1000
        self._assignment.on_registered(reply.node_epoch)
        log.info(
            "registered cluster=%s node=%s node_epoch=%d",
            reply.cluster_id,
            self._config.node_id,
            reply.node_epoch,
        )
        if reply.HasField("access"):
            self._apply_access(reply.access)
        if reply.HasField("table"):
            self._apply_table(reply.table)
        else:
            self._publish()
        self._watch.start()

    # --- heartbeats ------------------------------------------------------------------------

    def _heartbeat_until_fenced(self) -> None:
        """Send heartbeats at the interval, and at once when there is an acknowledgement to send."""
        last_heard = self._now()
        loop_watch = LoopWatchdog(last_heard)
        while not self._stopping.is_set():
            sent_at = self._now()
            silent_s = loop_watch.silent_s(self.lag.runs, sent_at)
            if silent_s > PATIENCE_LEASES * self._lease_s:
                self._leave_with_a_hung_loop(silent_s)
                return
            self._schedule_sign()
            try:
                self._heartbeat()
            except (NodeFencedError, UnknownNodeError) as error:
                self._on_fenced(error)
                return
            except _FATAL:
                raise
            except KoinonError as error:
                log.debug("heartbeat failed error=%s", error)
                self._note_lease()
                if self._now() - last_heard > self._lease_s:
                    log.warning("lease lost: no coordinator acknowledges error=%s", error)
                    last_heard = self._now()
                self._pause(random.uniform(0.01, 0.05))
                continue
            last_heard = sent_at
            self._take_events(sent_at + self._heartbeat_interval_s)

    def _schedule_sign(self) -> None:
        assert self._loop is not None
        if not self.lag.waits:
            self.lag.scheduled(self._now())
            self._loop.call_soon_threadsafe(self._on_sign)

    def _on_sign(self) -> None:
        self.lag.ran(self._now())

    def _leave_with_a_hung_loop(self, silent_s: float) -> None:
        """Have other nodes lead. The epoch ends whether or not the farewell arrives: a late
        farewell must not end a lease of a later epoch.
        """
        frame = sys._current_frames().get(self._loop_thread)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        log.critical(
            "event loop does not turn: gives up its lease silent_s=%.1f at=%s", silent_s, where
        )
        self._say_farewell()
        self._end_epoch()

    def _heartbeat(self) -> None:
        acknowledgements = self._assignment.acknowledgements()
        table = self._assignment.table
        request = membership_pb2.HeartbeatRequest(
            cluster_id=self._cluster_id,
            node_id=self._config.node_id,
            node_epoch=self._node_epoch,
            table_version=table.table_version if table else 0,
            hosted=map(_COMMAND.encode, acknowledgements),
            stats=self._host.stats(),
            progress=self._host.progress(),
            registration_id=self._state.registration_id,
            access_version=self._state.access.version,
            erased_keyspaces=self._host.erased(),
        )
        if self._sizes.is_due(self._term, now := self._now()):
            request.sizes.CopyFrom(self._host.sizes())
        elif self._load.is_due(self._term, now):  # another heartbeat, so that both stay short
            request.load.CopyFrom(self._host.load(self.lag.mean_s))
        timeout_s = heartbeat_timeout_s(self._lease_s, self._heartbeat_interval_s)
        reply, sent_at = self._coordinators.heartbeat(request, timeout_s)
        self._term = reply.term
        if request.HasField("sizes"):
            self._sizes.told(reply.term, sent_at)
        if request.HasField("load"):
            self._load.told(reply.term, sent_at)
        self._assignment.on_acknowledged(acknowledgements)
        if reply.HasField("access"):
            self._apply_access(reply.access)
        if reply.HasField("table"):
            self._apply_table(reply.table)
        self._assignment.on_commands(map(_COMMAND.decode, reply.commands))
        self._lease_s = reply.lease_ms / 1000
        took_s = max(0.0, self._now() - sent_at)
        self.heartbeat_seconds.observe(took_s)
        if reply.wall_ms:
            self.clock_ahead_ms = clock_ahead_ms(reply.wall_ms, time.time() * 1000, took_s * 1000)
        held, confirmed = self._note_lease(), self._state.confirmed(self._node_epoch)
        self._state.lease = self._state.lease.renewed(self._node_epoch, sent_at, self._lease_s)
        self._note_lease()
        if not held:
            log.info("lease held node_epoch=%d lease_ms=%d", self._node_epoch, reply.lease_ms)
        if not confirmed:
            self._tell(self._state.served)
        self._watch.heard_elsewhere(
            self._coordinators.route.current, self._state.served.table_version
        )

    def _note_lease(self) -> bool:
        """Return whether the lease holds; count a loss since the last call."""
        held = self._state.serving()
        self.lease_losses += self._held_lease and not held
        self._held_lease = held
        return held

    def _take_events(self, until: float) -> None:
        """Handle events until the next heartbeat's time, or until there is an acknowledgement to
        send.
        """
        for _ in range(self._events.qsize()):  # handled even if the time has come already
            self._take_event(until)
        while not self._stopping.is_set() and not self._assignment.acknowledgements():
            if self._now() >= until or not self._take_event(until):
                return

    def _pause(self, seconds: float) -> None:
        """Wait, and handle events meanwhile."""
        until = self._now() + seconds
        while not self._stopping.is_set() and self._now() < until:
            if not self._take_event(until):
                return

    def _take_event(self, until: float) -> bool:
        """Handle the next event; return False if none came in time."""
        try:
            event = self._events.get(timeout=max(until - self._now(), 0.0))
        except queue.Empty:
            return False
        if event is not None:
            event()
        return True

    def _on_fenced(self, error: KoinonError) -> None:
        log.warning("fenced: registers again error=%s", error)
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._state.lease = NO_LEASE
        self._note_lease()
        self._node_epoch = 0
        self._assignment.on_fenced()
        self._publish()

    # --- access and the table --------------------------------------------------------------

    def _apply_access(self, message: access_pb2.AccessState) -> None:
        """Use a newer access state from now on. Requests under way are not checked again."""
        before = self._state.access
        if message.access_version <= before.version:
            return
        try:
            self._state.access = Access(convert.ACCESS.decode(message), before)
        except ValueError as error:
            raise UnsupportedVersionError(
                what=f"access state of a newer build ({error})",
                version=message.access_version,
                supported=before.version,
            ) from error
        log.info("access state applied access_version=%d", message.access_version)

    def _apply_table(self, message: table_pb2.TableUpdate) -> None:
        before = self._assignment.table
        table = convert.table_after(before, message)
        if table is None or (table is before and self._state.served.node_epoch == self._node_epoch):
            return
        if before is None or table.keyspace_list is not before.keyspace_list:
            for keyspace in table.keyspaces:
                partitioner_of(keyspace)  # raises if it would place keys differently here
        adoptions = self._assignment.on_table(table)
        for refused in self._assignment.take_refused():
            log.warning(
                "assignment refused: epoch seen before partition=%d primary_epoch=%d", *refused
            )
        self._publish()
        if adoptions:
            log.debug(
                "adopting partitions count=%d table_version=%d", len(adoptions), table.table_version
            )
            self._submit(self._host.adopt(adoptions)).add_done_callback(self._on_adopted)

    def _on_adopted(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._events.put(partial(_raise, error))

    def _ready(self, adoptions: Sequence[Adoption]) -> None:
        self._assignment.on_adopted(adoptions)
        self._publish()
        if self._by_moves(adoptions):
            log.debug("leads partitions by moves taken_over=%d", len(adoptions))
        else:
            log.info("leads partitions taken_over=%d", len(adoptions))

    def _by_moves(self, adoptions: Sequence[Adoption]) -> bool:
        """Return whether moves gave all of these partitions to this node: such lines are logged at
        DEBUG, since coordinators log plans.
        """
        table = self._assignment.table
        rows = [table.rows[a.partition_id] for a in adoptions] if table is not None else []
        return all(row.adding or row.removing for row in rows)

    def _publish(self) -> None:
        before, served = self._state.served, self._assignment.served()
        self._state.served = served
        if served.table is not before.table or served.node_epoch != before.node_epoch:
            self._tell(served)

    def _tell(self, served: ServedPartitions) -> None:
        """Schedule ``Host.on_table`` on the event loop, once for all tables published until it
        runs.
        """
        if served.table is not None and not self._untold:
            assert self._loop is not None
            self._untold = True
            self._loop.call_soon_threadsafe(self._tell_newest)

    def _tell_newest(self) -> None:
        self._untold = False  # a table published from here on schedules another call
        served = self._state.served
        if served.table is not None:
            self._host.on_table(served.table, served.node_number, served.node_epoch)

    # --- between the threads ---------------------------------------------------------------

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._submit(coroutine).result()


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _raise(error: BaseException) -> None:
    raise error
