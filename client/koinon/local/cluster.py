"""A whole cluster on this machine, as processes of its own: for tests, notebooks and ``koinon up``.

``LocalCluster`` starts coordinators and nodes, keeps their data, logs, addresses and pids in one
directory, and kills, pauses and restarts them by name. Unless detached, its processes never
outlive the program: a guardian process ends them even after ``kill -9``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from koinon.local import files, members, readiness
from koinon.local.files import (
    ClusterFile,
    DirectoryLock,
    LocalClusterError,
    Member,
    PortClaims,
    running_cluster,
)
from koinon.local.processes import (
    Guardian,
    ManagedProcess,
    ProcessState,
    identify,
    wait_stopped,
)
from koinon.local.servers import environment, require_servers
from koinon.operate.admin import Admin, ClusterStatus
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.security.transport import PLAIN, Dialing, dialing

if TYPE_CHECKING:
    from koinon import Client
    from koinon.options import Options

STOP_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05
POLL_SHARE = 4.0  # for so many times longer than a question took, none is asked
STATUS_TIMEOUT_MS = 1000


class LocalCluster:
    """A local cluster; as a context manager it is ready inside the block and stopped after it.

    ``data_dir`` None makes a temporary directory that goes with the cluster; one that is given is
    kept, and starting on it again brings back the same members, addresses and data. Members are
    named ``c1, c2, …`` (coordinators) and ``n1, n2, …`` (nodes). ``nodes`` and ``coordinators``
    default to 3, or to what the directory remembers; more nodes than it remembers are added.
    ``replication_factor`` is how many copies of each partition a new cluster begins with (None: as
    the coordinators choose, three where there are three nodes); ``partitioner`` is how it hashes
    keys for ever (None: murmur2, or as remembered; clients of Redis Cluster need crc16), ``router``
    what of a key is hashed (as ``koinon_proto.routers`` says: ``until:2f``; None: the whole key, or
    as remembered); ``racks`` are given to the first nodes in turn. Ports are free, or count up from
    the two that are given where those are free. ``metrics`` True has every member's process serve
    metrics at an address of its own (``metrics_address``), 2000 above its port where that is free,
    False none, from their next start on; None: as the directory remembers, in a new one none.
    ``tls`` True has the cluster make certificates and take only who shows one, False lets everybody
    in who reaches its addresses; None: as the directory remembers, in a new one False.
    ``tls_bundle`` is the identity file of the user who may do everything. Nodes speak the Redis
    protocol at addresses of their own (``redis_address``), 1000 below; ``redis_keyspaces`` are
    further keyspaces in which they do, from their next start on. The flags are further arguments
    of ``koinon coordinator`` and ``koinon node``.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        nodes: int | None = None,
        coordinators: int | None = None,
        replication_factor: int | None = None,
        partitioner: str | None = None,
        router: str | None = None,
        racks: Sequence[str] = (),
        detached: bool = False,
        coordinator_port: int = 0,
        node_port: int = 0,
        metrics: bool | None = None,
        tls: bool | None = None,
        redis_keyspaces: Sequence[str] = (),
        coordinator_flags: Sequence[str] = (),
        node_flags: Sequence[str] = (),
    ) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="koinon-")
            data_dir = self._temporary.name
        self.data_dir = Path(data_dir).resolve()
        self._detached = detached  # its processes outlive this program
        self._node_port = node_port  # of the first node; 0: any
        self._lock: DirectoryLock | None = DirectoryLock(self.data_dir)  # None once closed
        self._guardian: Guardian | None = None  # from ``start`` on, unless detached
        self._started = False
        self._nodes_asked = (
            nodes or 0
        )  # made up for when a node turns out to have left; 0: not asked
        self._fresh: dict[str, int] = {}  # what ``start`` started: node epochs before; 0 elsewhere
        self._admin: Admin | None = None  # made when the status is first asked for
        self._claims = PortClaims()
        try:
            remembered = files.load(self.data_dir)
            if remembered is None:
                remembered = ClusterFile(
                    members=members.first_members(
                        3 if coordinators is None else coordinators,
                        3 if nodes is None else nodes,
                        coordinator_port,
                        node_port,
                        racks,
                        self._claims,
                    ),
                    bootstrap_nodes=3 if nodes is None else nodes,
                    replication_factor=replication_factor,
                    coordinator_flags=[
                        *coordinator_flags,
                        *_partitioner_flags(partitioner, router),
                    ],
                    node_flags=list(node_flags),
                )
            self._file = remembered
            members.check_asked(
                remembered,
                self.data_dir,
                nodes,
                coordinators,
                replication_factor,
                partitioner,
                router,
            )
            self._processes = {name: self._process(name) for name in self._file.members}
            self._choose_security(tls)
            members.add_redis_keyspaces(self._file, redis_keyspaces)
            self._choose_addresses(self._file.metrics if metrics is None else metrics)
            while nodes is not None and len(self._file.names("node")) < nodes:
                self._new_member("node")
        except BaseException:
            self._claims.release()
            self._lock.release()
            raise

    @classmethod
    def attach(cls, data_dir: str | os.PathLike[str]) -> LocalCluster:
        """Return the detached cluster that runs on ``data_dir``, with all its handles.

        Raises:
            LocalClusterError: no detached cluster runs there.
        """
        path = Path(data_dir).resolve()
        running = running_cluster(path)
        if running is None or not running.detached:
            raise LocalClusterError(reason=f"no detached cluster runs on {path}")
        return cls(path, detached=True)

    # --- the whole ------------------------------------------------------------------------------

    def start(self) -> list[str]:
        """Start every member that does not run; return their names. Does not wait for readiness."""
        require_servers()
        if self._lock is None:
            self._lock = DirectoryLock(self.data_dir)
        self._end_leftovers()
        self._started = True
        if not self._detached and self._guardian is None:
            self._guardian = Guardian()
            if self._temporary is not None:
                self._guardian.remove(self.data_dir)
        self._file.detached = self._detached
        self._file.owner = None if self._detached else identify(os.getpid())
        started = [name for name, process in self._processes.items() if not process.alive]
        self._fresh = self._epochs_before(started)
        for name in started:
            self._spawn(name)
        return started

    def undo_start(self) -> None:
        """Stop what the last ``start`` started, and only that."""
        if set(self._fresh) >= {name for name, p in self._processes.items() if p.alive}:
            self.stop()
            return
        for name in list(self._fresh):
            self.terminate(name)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop every member: SIGTERM, and SIGKILL for those still there after ``timeout_s``."""
        running = [process for process in self._processes.values() if process.alive]
        for process in running:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
        for process in wait_stopped(running, timeout_s):
            process.signal(signal.SIGKILL)
        left = wait_stopped(running, KILL_TIMEOUT_S)
        for process in running:
            self._forget(process)
        self._file.detached = False
        self._file.owner = None
        self._save()
        if left:
            raise LocalClusterError(reason=f"{left[0].name} does not end, even by SIGKILL")

    def close(self) -> None:
        """Stop (unless detached), let go of the directory, and remove it if it is temporary."""
        if self._lock is None:
            return
        try:
            if self._detached:
                for process in self._processes.values():
                    process.release()
            elif self._started:
                self.stop()
        finally:
            if self._admin is not None:
                self._admin.close()
                self._admin = None
            if self._guardian is not None:
                self._guardian.close()
                self._guardian = None
            self._claims.release()
            self._lock.release()
            self._lock = None
            if self._temporary is not None:
                with contextlib.suppress(OSError):
                    self._temporary.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it is -----------------------------------------------------------------------------

    @property
    def coordinators(self) -> str:
        """The coordinators' addresses, as ``koinon.connect`` takes them."""
        return members.coordinators_of(self._file)

    @property
    def names(self) -> list[str]:
        """Every member's name, coordinators first."""
        return [*self._file.names("coordinator"), *self._file.names("node")]

    @property
    def node_names(self) -> list[str]:
        return self._file.names("node")

    @property
    def coordinator_names(self) -> list[str]:
        return self._file.names("coordinator")

    @property
    def states(self) -> dict[str, ProcessState]:
        """The state of each member's process, by name."""
        return {name: self._processes[name].state for name in self.names}

    def address(self, name: str) -> str:
        return self._member(name).address

    def redis_address(self, name: str, keyspace: str = DEFAULT) -> str:
        """Return the address at which the node speaks the Redis protocol, or ''."""
        member = self._member(name)
        return member.redis if keyspace == DEFAULT else member.redis_keyspaces.get(keyspace, "")

    @property
    def redis_keyspaces(self) -> tuple[str, ...]:
        """The keyspaces other than ``default`` for which nodes have Redis addresses."""
        return tuple(self._file.redis_keyspaces)

    def metrics_address(self, name: str) -> str:
        """Return the address at which the member's process serves ``/metrics``; '': it does not."""
        return self._member(name).metrics

    def pid(self, name: str) -> int | None:
        """The process id of a running member."""
        process = self._managed(name)
        return process.identity.pid if process.alive and process.identity else None

    def log_path(self, name: str) -> Path:
        return self._managed(name).log_path

    def member_dir(self, name: str) -> Path:
        """The member's own data directory."""
        return self.data_dir / name

    @property
    def tls_bundle(self) -> str:
        """The identity file of the user who may do everything; '': the cluster is without TLS."""
        return str(self.data_dir / self._file.tls_bundle) if self._file.tls_bundle else ""

    def client(self, **options: Unpack[Options]) -> Client:
        """Connect a blocking client, as the user who may do everything unless ``tls_bundle`` names
        another; options as of ``koinon.connect``.
        """
        from koinon import connect

        if self.tls_bundle:
            options = {"tls_bundle": self.tls_bundle, **options}
        return connect(self.coordinators, **options)

    def admin(self, *, timeout_ms: int = 5000) -> Admin:
        """Connect for an operator's calls, as ``client`` does."""
        return Admin(self.coordinators, timeout_ms=timeout_ms, dialing=self._dialing())

    def status(self) -> ClusterStatus:
        """The cluster's status by its leader, or by the best informed coordinator.

        Raises:
            UnavailableError: no coordinator answers.
        """
        if self._admin is None or set(self._admin.addresses) != set(self.coordinators.split(",")):
            self._admin = self.admin(timeout_ms=STATUS_TIMEOUT_MS)
        return self._admin.status()

    def leader(self) -> str | None:
        """The name of the coordinator that leads, or None at the moment."""
        try:
            status = self.status()
        except UnavailableError:
            return None
        return status.member_id if status.is_leader else None

    # --- waiting --------------------------------------------------------------------------------

    def wait_for(
        self, condition: Callable[[ClusterStatus], bool], *, timeout_s: float, what: str
    ) -> ClusterStatus:
        """Wait until the status meets the condition, and return it.

        Raises:
            LocalClusterError: it did not inside ``timeout_s`` (names ``what`` was waited for), or
                a member's process died by itself meanwhile (shows the end of its log).
        """
        deadline = time.monotonic() + timeout_s
        last = "no coordinator answers"
        while time.monotonic() < deadline:
            self._raise_if_died()
            asked_at = time.monotonic()
            with contextlib.suppress(UnavailableError):
                status = self.status()
                if condition(status):
                    return status
                last = readiness.described(status)
            # A large table takes its time to send: waiting must not be what the leader works for.
            time.sleep(max(POLL_S, POLL_SHARE * (time.monotonic() - asked_at)))
        raise LocalClusterError(reason=f"not within {timeout_s:g} s: {what} ({last})")

    def wait_ready(self, timeout_s: float = 30.0) -> ClusterStatus:
        """Wait until every running node is active and every partition is served. A table from
        before ``start`` does not count: what it started must have registered since. Members that an
        operator has removed from the cluster are members no more; after ``start`` new nodes take
        their places, up to the number of nodes that was asked for.

        Raises:
            LocalClusterError: a process died (with the tail of its log), or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        status = self.wait_for(self._is_ready, timeout_s=timeout_s, what="the cluster is ready")
        self._raise_if_died()
        for name in self._left(status):
            self.remove_node(name)
        missing, self._nodes_asked = self._nodes_asked - len(self.node_names), 0
        if missing <= 0:
            return status
        for _ in range(missing):
            name = self._new_member("node")
            self._fresh[name] = 0
            self._spawn(name)
        return self.wait_ready(max(0.0, deadline - time.monotonic()))

    # --- one member -----------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End the member's process by SIGKILL, as a crash would, and wait until it is gone."""
        process = self._managed(name)
        process.signal(signal.SIGKILL)
        if wait_stopped([process], KILL_TIMEOUT_S):
            raise LocalClusterError(reason=f"{name} does not end, even by SIGKILL")
        self._forget(process)
        self._save()

    def pause(self, name: str) -> None:
        """Freeze the member's process (SIGSTOP)."""
        self._managed(name).signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._managed(name).signal(signal.SIGCONT)

    def terminate(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the member cleanly (SIGTERM), by force after ``timeout_s``."""
        process = self._managed(name)
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)
        if wait_stopped([process], timeout_s):
            self.kill(name)
        self._forget(process)
        self._save()

    def restart(self, name: str) -> None:
        """Start the member again, after a clean stop if it runs. Does not wait for readiness."""
        if self._managed(name).alive:
            self.terminate(name)
        self._spawn(name)

    def add_node(self, *, rack: str = "", weight: int | None = None) -> str:
        """Start one more node; return its name. It holds nothing before a rebalance."""
        name = self._new_member("node", rack=rack, weight=weight)
        self._spawn(name)
        return name

    def remove_node(self, name: str) -> None:
        """Stop a node that has left the cluster, and do not start it again. Its data stays."""
        if self._member(name).kind != "node":
            raise LocalClusterError(reason=f"{name} is a coordinator, not a node")
        self.terminate(name)
        member = self._file.members.pop(name)
        self._file.left.append(name)
        del self._processes[name]
        self._claims.release(map(files.port_of, member.addresses))
        self._save()

    def add_coordinator(self) -> str:
        """Start one more coordinator, which waits to be added to the group; return its name."""
        name = self._new_member("coordinator")
        self._spawn(name)
        return name

    # --- inside ---------------------------------------------------------------------------------

    def _member(self, name: str) -> Member:
        if name not in self._file.members:
            raise LocalClusterError(reason=f"no member {name!r}: there are {', '.join(self.names)}")
        return self._file.members[name]

    def _managed(self, name: str) -> ManagedProcess:
        self._member(name)
        return self._processes[name]

    def _new_member(self, kind: str, *, rack: str = "", weight: int | None = None) -> str:
        taken = self._file.names(kind)
        given = (int(name[1:]) for name in (*taken, *self._file.left) if name[0] == kind[0])
        name = f"{kind[0]}{max(given, default=0) + 1}"
        first_port = 0
        if kind == "node" and self._node_port:
            first_port = self._node_port + len(taken)
        address = members.free_address(self._file, first_port, self._claims)
        joins = kind == "coordinator"
        self._file.members[name] = Member(
            kind=kind, address=address, joins=joins, rack=rack, weight=weight
        )
        self._processes[name] = self._process(name)
        self._choose_addresses(self._file.metrics)
        return name

    def _choose_security(self, tls: bool | None) -> None:
        """Remember whether the cluster uses TLS.

        Raises:
            LocalClusterError: it runs, and would have to be stopped for that.
        """
        if tls is None or tls == bool(self._file.tls_bundle):
            return
        if any(process.alive for process in self._processes.values()):
            raise LocalClusterError(
                reason=f"the cluster on {self.data_dir} runs {'without' if tls else 'with'} TLS: "
                f"stop it first (koinon down --data {shlex.quote(str(self.data_dir))})"
            )
        from koinon.local.identities import root_bundle  # it needs what takes long to import

        bundle = root_bundle(self.data_dir).relative_to(self.data_dir)
        self._file.tls_bundle = str(bundle) if tls else ""

    def _dialing(self) -> Dialing:
        return dialing(self.tls_bundle) if self.tls_bundle else PLAIN

    def _choose_addresses(self, metrics: bool) -> None:
        """Give every member that does not run the addresses that it is to have beside its own, and
        keep other clusters from choosing any of them before it listens there.
        """
        self._file.metrics = metrics
        for name, member in self._file.members.items():
            if not self._processes[name].alive:
                members.give_addresses(self._file, name, self._claims)
                for address in member.addresses:
                    self._claims.claim(files.port_of(address))
                self._processes[name] = self._process(name)

    def _process(self, name: str) -> ManagedProcess:
        argv = members.command_line(self._file, name, self.data_dir)
        log_path = self.data_dir / "logs" / f"{name}.log"
        return ManagedProcess(name, argv, log_path, self._file.processes.get(name))

    def _spawn(self, name: str) -> None:
        if self._file.tls_bundle:
            from koinon.local.identities import prepare

            prepare(self.data_dir, self._member(name).kind, name)
        process = self._processes[name] = self._process(name)
        identity = process.start(environment())
        if identity is not None:
            self._file.processes[name] = identity
            if self._guardian is not None:
                self._guardian.watch(identity)
        self._save()

    def _forget(self, process: ManagedProcess) -> None:
        self._fresh.pop(process.name, None)
        identity = self._file.processes.pop(process.name, None)
        if identity is not None and self._guardian is not None:
            self._guardian.forget(identity)

    def _save(self) -> None:
        files.save(self.data_dir, self._file)

    def _end_leftovers(self) -> None:
        """End what a foreground cluster left behind: we hold the lock, so no other program runs it.
        (Its guardian is doing the same.)

        Raises:
            LocalClusterError: a detached cluster runs here.
        """
        running = [process for process in self._processes.values() if process.alive]
        if self._file.detached and running and not self._detached:
            raise LocalClusterError(
                reason=f"a detached cluster runs on {self.data_dir}: "
                f"koinon down --data {shlex.quote(str(self.data_dir))} stops it"
            )
        if self._file.detached or self._file.owner == identify(os.getpid()):
            return
        for process in running:
            process.signal(signal.SIGKILL)
        wait_stopped(running, KILL_TIMEOUT_S)

    def _epochs_before(self, started: list[str]) -> dict[str, int]:
        """The node epochs of the members about to start: 0 for coordinators, and where no leader
        knows better (then it is a new leader, whose sessions are all new).
        """
        known: dict[str, int] = {}
        if any(self._processes[name].alive for name in self.coordinator_names):
            with contextlib.suppress(UnavailableError):
                known = readiness.node_epochs(self.status())
        return {name: known.get(name, 0) for name in started}

    def _is_ready(self, status: ClusterStatus) -> bool:
        nodes = {name for name in self.node_names if self._processes[name].alive}
        fresh = {name for name in self._fresh if not self._member(name).joins}
        waited_for = (nodes | fresh) - set(self._left(status))
        return readiness.is_ready(status, waited_for, self._fresh)

    def _left(self, status: ClusterStatus) -> list[str]:
        """The nodes that an operator has removed from the cluster."""
        gone = readiness.left(status)
        return [name for name in self.node_names if name in gone]

    def _has_left(self, name: str) -> bool:
        try:
            return name in self._left(self.status())
        except UnavailableError:
            return False

    def _raise_if_died(self) -> None:
        for name, process in self._processes.items():
            expected = self._file.processes.get(name)
            if (expected is None and name not in self._fresh) or process.alive:
                continue
            if self._has_left(name):
                continue
            code = "" if process.exit_code is None else f" with code {process.exit_code}"
            tail = process.log_tail() or "(its log is empty)"
            raise LocalClusterError(
                reason=f"{name} exited{code} (its address: {self.address(name)}); "
                f"the end of {process.log_path}:\n{tail}"
            )


def _partitioner_flags(partitioner: str | None, router: str | None) -> list[str]:
    asked = members.partitioner_asked(partitioner, router)
    return ["--partitioner", asked] if asked is not None else []


LocalCluster.__module__ = "koinon"
