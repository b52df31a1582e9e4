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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from koinon.local import cluster_files as files
from koinon.local import members, readiness
from koinon.local.cluster_files import (
    DirectoryLock,
    LocalClusterError,
    Member,
    PortClaims,
    running_cluster,
)
from koinon.local.member_processes import POLL_S, MemberProcesses
from koinon.local.members import Ports, Setup
from koinon.local.processes import Guardian, ProcessState, identify
from koinon.local.servers import require_servers
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.security.transport import PLAIN, Dialing, dialing

if TYPE_CHECKING:
    from koinon import Client
    from koinon.options import Options

STOP_TIMEOUT_S = 8.0
POLL_SHARE = 4.0  # after a request, wait this many times its duration before the next
STATUS_TIMEOUT_MS = 1000


class LocalCluster:
    """A local cluster; as a context manager it is ready inside the block and stopped after it.

    ``data_dir`` None makes a temporary directory that is deleted with the cluster; a given
    directory is kept, and starting on it again brings back the same members, addresses and data.
    Members are named ``c1, c2, …`` (coordinators) and ``n1, n2, …`` (nodes). ``nodes`` and
    ``coordinators`` default to 3, or to the directory's numbers; if more nodes are given, they are
    added.

    ``setup`` are the settings that a new cluster keeps, ``ports`` those of its members' ports.
    With ``tls`` True the cluster makes certificates and accepts only callers with one; with False
    it accepts everybody who reaches its addresses; None: as the directory says; False in a new one.
    ``tls_bundle`` is the identity file of the user who may do everything.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        nodes: int | None = None,
        coordinators: int | None = None,
        tls: bool | None = None,
        setup: Setup | None = None,
        ports: Ports | None = None,
    ) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="koinon-")
            data_dir = self._temporary.name
        self.data_dir = Path(data_dir).resolve()
        self._detached = False  # its processes outlive this program
        ports = ports or Ports()
        self._node_port = ports.first_node  # 0: any
        self._lock: DirectoryLock | None = DirectoryLock(self.data_dir)  # None once closed
        self._started = False
        # New nodes replace removed ones up to this number; 0: no number was given.
        self._nodes_asked = nodes or 0
        # members of the last ``start``, with their node epochs before it; 0 for coordinators
        self._fresh: dict[str, int] = {}
        self._admin: Admin | None = None  # made when the status is first requested
        self._claims = PortClaims()
        wanted = members.Wanted(nodes, coordinators, setup or Setup(), ports)
        try:
            self._file = members.remembered_or_new(self.data_dir, wanted, self._claims)
            self._processes = MemberProcesses(self.data_dir, self._file, self._claims)
            self._choose_security(tls)
            members.add_redis_keyspaces(self._file, ports.redis_keyspaces)
            self._choose_addresses(self._file.metrics if ports.metrics is None else ports.metrics)
            while nodes is not None and len(self._file.names("node")) < nodes:
                self._new_member("node")
        except BaseException:
            self._claims.release()
            self._lock.release()
            raise

    @classmethod
    def attach(cls, data_dir: str | os.PathLike[str]) -> LocalCluster:
        """Return the detached cluster that runs on ``data_dir``.

        Raises:
            LocalClusterError: no detached cluster runs there.
        """
        path = Path(data_dir).resolve()
        running = running_cluster(path)
        if running is None or not running.detached:
            raise LocalClusterError(reason=f"no detached cluster runs on {path}")
        cluster = cls(path)
        cluster._detached = True
        return cluster

    # --- the whole ------------------------------------------------------------------------------

    def start(self, *, detached: bool = False) -> list[str]:
        """Start every member that does not run; return their names. Does not wait for readiness.
        With ``detached`` at the first start the processes outlive this program.

        Raises:
            LocalClusterError: another program has the address of a member; nothing was started.
        """
        self._detached = self._detached or (detached and not self._started)
        require_servers()
        if self._lock is None:
            self._lock = DirectoryLock(self.data_dir)
        self._end_leftovers()
        self._fresh = {}
        started = [process.name for process in self._processes if not process.alive]
        self._processes.require_ports(started)
        self._started = True
        if not self._detached and self._processes.guardian is None:
            self._processes.guardian = Guardian()
            if self._temporary is not None:
                self._processes.guardian.remove(self.data_dir)
        self._file.detached = self._detached
        self._file.owner = None if self._detached else identify(os.getpid())
        self._fresh = self._epochs_before(started)
        for name in started:
            self._processes.spawn(name)
        self._processes.save()  # the requested settings are kept for the next start, too
        return started

    def undo_start(self) -> None:
        """Stop only the members that the last ``start`` started."""
        if self._fresh and set(self._fresh) >= self._processes.alive():
            self.stop()
            return
        for name in list(self._fresh):
            self.terminate(name)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop every member: SIGTERM, and SIGKILL for those still there after ``timeout_s``."""
        self._fresh.clear()
        self._processes.stop(timeout_s)

    def close(self) -> None:
        """Stop (unless detached), release the directory's lock, and delete the directory if it is
        temporary.
        """
        if self._lock is None:
            return
        try:
            if self._detached:
                self._processes.release()
            elif self._started:
                self.stop()
        finally:
            if self._admin is not None:
                self._admin.close()
                self._admin = None
            if self._processes.guardian is not None:
                self._processes.guardian.close()
                self._processes.guardian = None
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

    # --- state ----------------------------------------------------------------------------------

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
        states = self._processes.states()
        return {name: states[name] for name in self.names}

    def address(self, name: str) -> str:
        return self._member(name).address

    def redis_address(self, name: str, keyspace: str = DEFAULT) -> str:
        """Return the node's address for the Redis protocol, or ''."""
        member = self._member(name)
        return member.redis if keyspace == DEFAULT else member.redis_keyspaces.get(keyspace, "")

    @property
    def redis_keyspaces(self) -> tuple[str, ...]:
        """The keyspaces other than ``default`` for which nodes have Redis addresses."""
        return tuple(self._file.redis_keyspaces)

    @property
    def waiting_for_restart(self) -> list[str]:
        """The running members that get their new metrics or Redis ports only at the next start."""
        alive = self._processes.alive()
        return [n for n in self.names if n in alive and members.lacks_addresses(self._file, n)]

    def metrics_address(self, name: str) -> str:
        """Return the address at which the member's process serves ``/metrics``; '': none."""
        return self._member(name).metrics

    def pid(self, name: str) -> int | None:
        """The process id of a running member."""
        process = self._processes[name]
        return process.identity.pid if process.alive and process.identity else None

    def log_path(self, name: str) -> Path:
        return self._processes[name].log_path

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
        """Connect for operators' calls, as ``client`` does. If coordinators of another cluster now
        have these addresses, calls fail.
        """
        return self._admin_at(self.coordinators, timeout_ms)

    def status(self) -> ClusterStatus:
        """Return the cluster's status from its leader, or from the best informed coordinator. Only
        coordinators whose processes belong to this cluster are asked.

        Raises:
            UnavailableError: no coordinator serves, or none answers.
            WrongClusterError: they belong to another cluster than before.
        """
        serving = self._processes.serving()
        addresses = [self.address(name) for name in self.coordinator_names if name in serving]
        if not addresses:
            raise UnavailableError(reason="no coordinator of this cluster serves")
        if self._admin is None or set(self._admin.addresses) != set(addresses):
            if self._admin is not None:
                self._admin.close()
            self._admin = self._admin_at(",".join(addresses), STATUS_TIMEOUT_MS)
        return self._admin.status()

    def _admin_at(self, addresses: str, timeout_ms: int) -> Admin:
        return Admin(
            addresses,
            timeout_ms=timeout_ms,
            cluster_id=self._file.cluster_id,
            dialing=self._dialing(),
        )

    def leader(self) -> str | None:
        """The name of the leading coordinator; None if there is none at the moment."""
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
            LocalClusterError: ``timeout_s`` is over (the error contains ``what``), or a member's
                process ended by itself (the error shows the end of its log).
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
            # A large table takes time to send: polling must not become the leader's main work.
            time.sleep(max(POLL_S, POLL_SHARE * (time.monotonic() - asked_at)))
        raise LocalClusterError(reason=f"not within {timeout_s:g} s: {what} ({last})")

    def wait_ready(self, timeout_s: float = 30.0) -> ClusterStatus:
        """Wait until every running node is active, every partition is served, and every running
        member's own process reports that it serves. A table from before ``start`` does not count:
        the started nodes must have registered since. Members that an operator has removed from the
        cluster do not count; after ``start`` new nodes replace them, up to the requested number of
        nodes.

        Raises:
            LocalClusterError: a process died (with the tail of its log), or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        status = self.wait_for(self._is_ready, timeout_s=timeout_s, what="the cluster is ready")
        self._raise_if_died()
        if status.table is not None and not self._file.cluster_id:
            self._file.cluster_id = status.table.cluster.cluster_id
            self._processes.save()
        for name in self._left(status):
            self.remove_node(name)
        missing, self._nodes_asked = self._nodes_asked - len(self.node_names), 0
        if missing <= 0:
            return status
        for _ in range(missing):
            name = self._new_member("node")
            self._fresh[name] = 0
            self._processes.spawn(name)
        return self.wait_ready(max(0.0, deadline - time.monotonic()))

    # --- one member -----------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill the member's process with SIGKILL, as a crash would, and wait until it is gone."""
        self._processes.kill(name)
        self._fresh.pop(name, None)

    def pause(self, name: str) -> None:
        """Freeze the member's process (SIGSTOP)."""
        self._processes[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Resume a frozen process (SIGCONT)."""
        self._processes[name].signal(signal.SIGCONT)

    def terminate(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the member with SIGTERM, and with SIGKILL after ``timeout_s``."""
        self._processes.terminate(name, timeout_s)
        self._fresh.pop(name, None)

    def restart(self, name: str) -> None:
        """Stop the member with SIGTERM if it runs, and start it again. Does not wait for
        readiness.
        """
        if self._processes[name].alive:
            self.terminate(name)
        self._processes.spawn(name)

    def add_node(self, *, rack: str = "", weight: int | None = None) -> str:
        """Start one more node; return its name. It holds no data before a rebalance."""
        name = self._new_member("node", rack=rack, weight=weight)
        self._processes.spawn(name)
        return name

    def remove_node(self, name: str) -> None:
        """Stop a node that has left the cluster, and do not start it again. Its data stays."""
        if self._member(name).kind != "node":
            raise LocalClusterError(reason=f"{name} is a coordinator, not a node")
        self.terminate(name)
        member = self._file.members.pop(name)
        self._file.left.append(name)
        self._processes.remove(name)
        self._claims.release(map(files.port_of, member.addresses))
        self._processes.save()

    def add_coordinator(self) -> str:
        """Start one more coordinator, which waits to be added to the group; return its name."""
        name = self._new_member("coordinator")
        self._processes.spawn(name)
        return name

    # --- internals ------------------------------------------------------------------------------

    def _member(self, name: str) -> Member:
        if name not in self._file.members:
            raise LocalClusterError(reason=f"no member {name!r}: there are {', '.join(self.names)}")
        return self._file.members[name]

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
        self._processes.prepare(name)
        self._choose_addresses(self._file.metrics)
        return name

    def _choose_security(self, tls: bool | None) -> None:
        """Record whether the cluster uses TLS.

        Raises:
            LocalClusterError: the cluster runs, and would have to be stopped for the change.
        """
        if tls is None or tls == bool(self._file.tls_bundle):
            return
        if self._processes.alive():
            raise LocalClusterError(
                reason=f"the cluster on {self.data_dir} runs {'without' if tls else 'with'} TLS: "
                f"stop it first (koinon down --data {shlex.quote(str(self.data_dir))})"
            )
        from koinon.local.identities import root_bundle  # a slow import

        bundle = root_bundle(self.data_dir).relative_to(self.data_dir)
        self._file.tls_bundle = str(bundle) if tls else ""

    def _dialing(self) -> Dialing:
        return dialing(self.tls_bundle) if self.tls_bundle else PLAIN

    def _choose_addresses(self, metrics: bool) -> None:
        """Give every stopped member its further addresses, and claim them against other local
        clusters until it listens there.
        """
        self._file.metrics = metrics
        for name, member in self._file.members.items():
            if not self._processes[name].alive:
                members.give_addresses(self._file, name, self._claims)
                for address in member.addresses:
                    self._claims.claim(files.port_of(address))
                self._processes.prepare(name)

    def _end_leftovers(self) -> None:
        """End the processes that a foreground cluster left behind: this program holds the lock, so
        no other program runs the cluster. (Its guardian does the same.)

        Raises:
            LocalClusterError: a detached cluster runs here.
        """
        if self._file.detached and self._processes.alive() and not self._detached:
            raise LocalClusterError(
                reason=f"a detached cluster runs on {self.data_dir}: "
                f"koinon down --data {shlex.quote(str(self.data_dir))} stops it"
            )
        if self._file.detached or self._file.owner == identify(os.getpid()):
            return
        self._processes.kill_all()

    def _epochs_before(self, started: list[str]) -> dict[str, int]:
        """Return the node epochs of the members that are about to start: 0 for coordinators, and if
        there is no leader to ask (a later leader then has only new sessions).
        """
        known: dict[str, int] = {}
        if any(self._processes[name].alive for name in self.coordinator_names):
            with contextlib.suppress(UnavailableError):
                known = readiness.node_epochs(self.status())
        return {name: known.get(name, 0) for name in started}

    def _is_ready(self, status: ClusterStatus) -> bool:
        alive = self._processes.alive()
        fresh = {name for name in self._fresh if not self._member(name).joins}
        left = set(self._left(status))
        if not (alive | self._fresh.keys()) - left <= self._processes.serving():
            return False
        waited_for = (alive.intersection(self.node_names) | fresh) - left
        return readiness.is_ready(status, waited_for, self._fresh)

    def _left(self, status: ClusterStatus) -> list[str]:
        """Return the nodes that an operator has removed from the cluster."""
        gone = readiness.left(status)
        return [name for name in self.node_names if name in gone]

    def _has_left(self, name: str) -> bool:
        try:
            return name in self._left(self.status())
        except UnavailableError:
            return False

    def _raise_if_died(self) -> None:
        for process in self._processes.died(self._fresh):
            if self._has_left(process.name):
                continue
            code = "" if process.exit_code is None else f" with code {process.exit_code}"
            tail = process.log_tail() or "(its log is empty)"
            raise LocalClusterError(
                reason=f"{process.name} exited{code} (its address: {self.address(process.name)}); "
                f"the end of {process.log_path}:\n{tail}"
            )


LocalCluster.__module__ = "koinon"
