"""The cluster that is tried: coordinators ``c1…``, nodes ``n1…`` and clients ``w1…``, each process
in a network namespace of its own; members on disks of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon_node.state import partitioner_of
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import NodeStatus, Table
from tests.checkers.applied import Applied
from tests.integration.copies import is_settled
from tests.integration.hosts import STOP_TIMEOUT_S, HostCluster
from tests.nemesis import means
from tests.nemesis.client import KEYS, key_name
from tests.nemesis.disks import Disk
from tests.nemesis.journal import GENERATION
from tests.nemesis.links import Links
from tests.nemesis.member import APPLIED, CLOCKS, STOP_IN_READ

ROOT = Path(__file__).parents[2]
PARTITIONS = 64
KEYSPACE, KEYSPACE_PARTITIONS = "nemesis", 16
COORDINATORS, NODES = 3, 4
CLIENTS = {
    "w1": ("asyncio", "auto", "reader"),
    "w2": ("blocking", "auto", "writer"),
    "w3": ("asyncio", "grpc", "mixed"),
}
"""Name: through which client, over what, and in which role (client.py)."""
REDIS_PORT = 7070  # single operations go over it, and nodes follow
PROCESSES_PER_LIFE = GENERATION * GENERATION
KILL_TIMEOUT_S = 20.0
BUSY_BYTES = 12_000  # of a client's journal
ADMIN_TIMEOUT_MS = 3_000


@dataclass
class _Client:
    """A client's processes, one life after the other."""

    process: subprocess.Popen[bytes] | None = None
    journals: list[Path] = field(default_factory=list)


class NemesisCluster(HostCluster):
    """``defect`` is planted into every member, and every client; "" for none."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = NODES,
        coordinators: int = COORDINATORS,
        defect: str = "",
    ) -> None:
        self.directory = directory
        self.schedule_directory = directory  # of the schedule that runs: clients write there
        self.keyspace = DEFAULT  # of the keys of the schedule that runs
        self._defect = defect
        self._clients = {name: _Client() for name in CLIENTS}
        self._lives = 0
        self._offset: dict[str, int] = {}  # seconds on the clocks since boot, by member
        self.disks: dict[str, Disk] = {}
        super().__init__(directory, nodes=nodes, coordinators=coordinators, partitions=PARTITIONS)
        self._flags += ["--router", "tag"]  # keys without a tag, which most are, are hashed whole
        for name in CLIENTS:
            self.hosts.add(name)
        self.links = Links(self.hosts)

    def __enter__(self) -> NemesisCluster:
        try:
            for name in self.members:
                (self.directory / f"{name}.control").mkdir()
                self.disks[name] = disk = Disk(self.directory, name)
                if means.missing(means.MOUNTS):
                    disk.path.parent.mkdir()
                else:
                    disk.make()
                self.start(name)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for disk in self.disks.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                disk.thaw()
        for client in self._clients.values():
            _end(client.process)
        for name in list(self._processes):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.kill(name)
        for disk in self.disks.values():
            _unmounted(disk)
        self.hosts.close()

    @property
    def members(self) -> list[str]:
        return [*self.coordinator_names, *self.node_names]

    # --- processes ---------------------------------------------------------------------------

    def arguments(self, name: str, data: Path) -> list[str]:
        arguments = super().arguments(name, data)
        if name in self.node_names:
            arguments += ["--redis-listen", f"{self.hosts.address(name)}:{REDIS_PORT}"]
        return arguments

    def start(self, name: str) -> None:
        """Start the member's process on its host, on its disk, through member.py."""
        offset = self._offset.get(name, 0)
        command = ["nsenter", f"--net=/run/netns/{self.hosts.space(name)}"]
        if offset:
            command += ["unshare", "--time", "--boottime", str(offset), "--monotonic", str(offset)]
        command += [sys.executable, "-m", "tests.nemesis.member", str(self._control(name))]
        if self._defect:
            command += ["--defect", self._defect]
        command += [self.module(name), *self.arguments(name, self.disks[name].path)]
        self._processes[name] = self._spawn(name, command)

    def choose_keyspace(self, name: str) -> None:
        """Have the keys of the next schedule lie in this keyspace; make it if it is not there. All
        has to be well.
        """
        self.keyspace = name
        if self.table().keyspaces.get(name) is None:
            with self.admin() as admin:
                admin.keyspaces.create(
                    name, partition_count=KEYSPACE_PARTITIONS, partitioner="murmur2(tag)"
                )

    def start_clients(self, directory: Path) -> None:
        """Start all clients on keys of their own, with their journals in this directory."""
        self.schedule_directory = directory
        for name in CLIENTS:
            self._clients[name] = _Client()
            self.start_client(name)

    def wait_for_clients(self, timeout_s: float) -> None:
        """Wait until every client has done a few dozen operations."""
        deadline = time.monotonic() + timeout_s
        while any(c.journals[-1].stat().st_size < BUSY_BYTES for c in self._clients.values()):
            assert time.monotonic() < deadline, "the clients have not begun"
            time.sleep(0.02)

    def start_client(self, name: str) -> None:
        """Start the client's next life, with a journal of its own."""
        client = self._clients[name]
        kind, transport, role = CLIENTS[name]
        self._lives += 1
        journal = self.schedule_directory / f"{name}-{self._lives}.jsonl"
        journal.touch()
        client.journals.append(journal)
        command = ["nsenter", f"--net=/run/netns/{self.hosts.space(name)}", sys.executable]
        command += ["-m", "tests.nemesis.client", "--kind", kind, "--role", role]
        command += ["--transport", transport]
        command += ["--name", f"{name}-{self._lives}", "--coordinators", self.coordinators]
        command += ["--keyspace", self.keyspace]
        command += ["--prefix", self.schedule_directory.name, "--journal", str(journal)]
        command += ["--first-process", str(self._lives * PROCESSES_PER_LIFE)]
        if self._defect:
            command += ["--defect", self._defect]
        client.process = self._spawn(name, command, subprocess.PIPE)

    def _spawn(
        self, name: str, command: list[str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=ROOT,
                start_new_session=True,  # Linux shares CPU out by session
            )

    def stop_clients(self) -> list[Path]:
        """End all clients; return their journals."""
        ended = {name: client.process for name, client in self._clients.items()}
        for process in ended.values():
            if process is not None and process.stdin is not None:
                process.stdin.close()
        for name, process in ended.items():
            if process is None:
                continue
            code = process.wait(STOP_TIMEOUT_S)
            assert code == 0, f"{name} ended with {code}: see {self.directory / name}.log"
            self._clients[name].process = None
        return [path for client in self._clients.values() for path in client.journals]

    def running(self, name: str) -> bool:
        process = self._process(name)
        return process is not None and process.poll() is None

    def kill(self, name: str) -> None:
        """End the process by SIGKILL; a node's writer goes with it."""
        process = self._process(name)
        if process is None:
            return
        writer = self._writer(name)
        self.let_end(name)
        process.kill()
        if writer:
            with contextlib.suppress(ProcessLookupError):
                os.kill(writer, signal.SIGKILL)  # it may have been stopped
        process.wait(KILL_TIMEOUT_S)
        if name in CLIENTS:
            self._clients[name].process = None

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs; ``n1.writer`` names a node's writer."""
        member, _, writer = name.partition(".")
        if writer:
            pid = self._writer(member)
        else:
            process = self._process(member)
            pid = process.pid if process is not None and process.poll() is None else 0
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def take_descriptors(self, name: str) -> Callable[[], None]:
        """Leave the process no free file descriptor; return what gives them back."""
        process = self._process(name)
        if process is None or process.poll() is not None:
            return lambda: None
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        taken = {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        lowest_free = next(number for number in itertools.count() if number not in taken)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))

        def give_back() -> None:
            if process.poll() is None:
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)

        return give_back

    def terminate(self, name: str) -> subprocess.Popen[bytes] | None:
        """Send SIGTERM to the process that runs now, if any; return it."""
        process = self._process(name)
        if process is None or process.poll() is not None:
            return None
        process.terminate()
        return process

    def let_end(self, name: str) -> None:
        """Take back what would keep the process from ending: a frozen disk, a pause."""
        if name in self.disks:
            self.disks[name].thaw()
        self.send(name, signal.SIGCONT)

    def wait_stopped(self, name: str, timeout_s: float) -> bool:
        """Wait until the process ends or is stopped by a signal; return whether it is."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.running(name) or self._state(name) == "T":
                return True
            time.sleep(0.02)
        return False

    def _process(self, name: str) -> subprocess.Popen[bytes] | None:
        return self._clients[name].process if name in CLIENTS else self._processes.get(name)

    def _state(self, name: str) -> str:
        process = self._process(name)
        assert process is not None
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    def _writer(self, name: str) -> int:
        """Return the pid of a node's writer process; 0 if there is none."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return 0
        for listing in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in listing.read_text().split():
                    if b"writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
        return 0

    # --- what a member is told ------------------------------------------------------------------

    def _control(self, name: str) -> Path:
        return self.directory / f"{name}.control"

    def set_clocks(self, name: str, **wanted: float) -> None:
        """``wall_s``: how far off Unix time is; ``lease_rate``: how fast the lease's clock runs."""
        path = self._control(name) / CLOCKS
        path.with_suffix(".new").write_text(json.dumps(wanted))
        path.with_suffix(".new").rename(path)

    def offset_clocks(self, name: str, seconds: int) -> None:
        """Put the clocks that count since boot off by so much, from the process's next life on."""
        self._offset[name] = seconds

    def stop_in_next_read(self, name: str, *, wanted: bool) -> None:
        flag = self._control(name) / STOP_IN_READ
        if wanted:
            flag.touch()
        else:
            flag.unlink(missing_ok=True)

    # --- what is known of it --------------------------------------------------------------------

    def applied(self) -> Iterator[Applied]:
        """Return the puts that nodes have given versions since the cluster began."""
        for name in self.node_names:
            path = self._control(name) / APPLIED
            for line in path.read_text().splitlines() if path.exists() else ():
                key, value, version = json.loads(line)
                yield Applied(key.encode(), value.encode(), version)

    def table(self) -> Table:
        """Return the table as the leader has it; raises KoinonError."""
        table = self.status().table
        if table is None or not table.rows:
            raise AssertionError("there is no table yet")
        return table

    def resolve(self, target: str) -> str:
        """Return the process that a schedule means: ``primary/3`` leads the fourth key now,
        ``primary`` most of them, ``leader`` the coordinators; all else is a name.
        """
        if target == "leader":
            return self.status().leader_id or self.coordinator_names[0]
        if not target.startswith("primary"):
            return target
        table = self.table()
        which = target.partition("/")[2]
        keys = range(KEYS) if not which else [int(which)]
        hashed = partitioner_of(table.keyspaces.named(self.keyspace))
        rows = [
            table.rows[hashed.partition_of(key_name(self.schedule_directory.name, key).encode())]
            for key in keys
        ]
        ((number, _),) = Counter(row.primary for row in rows).most_common(1)
        node = table.nodes.get(number)
        return node.node_id if node is not None else self.node_names[0]

    def settled(self, timeout_s: float) -> ClusterStatus:
        """Wait until all is well: every copy in sync, every member alive, nothing to move."""
        return self.wait_for(
            lambda status: is_settled(status) and all_active(status), "all is well again", timeout_s
        )

    def admin(self) -> Admin:
        return Admin(self.coordinators, timeout_ms=ADMIN_TIMEOUT_MS)


def all_active(status: ClusterStatus) -> bool:
    assert status.table is not None
    nodes = status.table.nodes.values()
    return all(node.status is NodeStatus.ACTIVE for node in nodes) and all(
        member.active or member.leader for member in status.coordinators
    )


def _end(process: subprocess.Popen[Any] | None) -> None:
    if process is not None and process.poll() is None:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _unmounted(disk: Disk) -> None:
    """A process that was killed may hold the mount for a moment longer."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while True:
        try:
            disk.close()
        except subprocess.CalledProcessError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
