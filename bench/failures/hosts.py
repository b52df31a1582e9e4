"""A cluster in which each process has a network namespace of its own, as containers have.

Packets to a process that is cut off vanish without an error. Needs root and iproute2.

On the host there are a bridge, which the program's own clients use, and one link per process.
``cut`` takes the link down. ``kill`` ends the process and takes the link down too, as the end of a
container does.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from koinon.local.servers import MODULES, environment
from koinon.operate.admin import Admin, ClusterStatus
from koinon_proto.contract.errors import KoinonError

COORDINATOR_PORT, NODE_PORT = 7400, 7500
READY_S_MAX = 60.0
END_S_MAX = 30.0
POLL_S = 0.05


def is_possible() -> bool:
    """Return whether this machine allows network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


def _accept(action: str, bridge: str) -> None:
    """Insert (-I) or delete (-D) a rule that accepts traffic over the bridge. Where Docker runs,
    the machine drops this traffic otherwise.
    """
    if shutil.which("iptables") is not None:
        rule = ["FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT"]
        subprocess.run(["iptables", "-w", action, *rule], check=False, capture_output=True)


class HostCluster:
    """Coordinators ``c1, …`` and nodes ``n1, …``; a context manager. ``subnet`` has the second and
    third number of the addresses in 10/8.
    """

    def __init__(self, *, nodes: int = 4, coordinators: int = 3, subnet: str = "213.7") -> None:
        self.coordinator_names = [f"c{n + 1}" for n in range(coordinators)]
        self.node_names = [f"n{n + 1}" for n in range(nodes)]
        self._tag = f"kx{os.getpid() % 100_000:x}"
        self._subnet = subnet
        self._directory = Path(tempfile.mkdtemp(prefix="koinon-hosts-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._admin: Admin | None = None

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._tag, "type", "bridge")
            _ip("addr", "add", f"10.{self._subnet}.1/24", "dev", self._tag)
            _ip("link", "set", self._tag, "up")
            _accept("-I", self._tag)
            for name in (*self.coordinator_names, *self.node_names):
                self._add_host(name)
                self.start(name)
            self._admin = Admin(self.coordinators, timeout_ms=1000)
            self.wait_in_sync()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._admin is not None:
            self._admin.close()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for name in self._processes:
            _ip("netns", "del", self._host(name), check=False)
        _accept("-D", self._tag)
        _ip("link", "del", self._tag, check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _host(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _add_host(self, name: str) -> None:
        host, link = self._host(name), f"{self._tag}{name}"
        _ip("netns", "add", host)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("link", "set", link, "master", self._tag, "up")
        inside = ("netns", "exec", host, "ip")
        _ip(*inside, "addr", "add", f"{self._ip_of(name)}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")

    # --- what it is -------------------------------------------------------------------------------

    def _ip_of(self, name: str) -> str:
        number = int(name[1:])
        return f"10.{self._subnet}.{number + (10 if name[0] == 'c' else 100)}"

    def address(self, name: str) -> str:
        port = COORDINATOR_PORT if name[0] == "c" else NODE_PORT
        return f"{self._ip_of(name)}:{port}"

    @property
    def coordinators(self) -> str:
        return ",".join(map(self.address, self.coordinator_names))

    def log_path(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def status(self) -> ClusterStatus:
        assert self._admin is not None
        return self._admin.status()

    def wait_in_sync(self) -> None:
        """Wait until a leader says that every replica of every partition is in sync."""
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline:
            try:
                status = self.status()
            except KoinonError:
                continue
            table = status.table
            if (
                status.is_leader
                and status.ready
                and table is not None
                and table.rows
                and all(len(row.in_sync) == len(row.replicas) for row in table.rows)
            ):
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"not all in sync within {READY_S_MAX:g} s")

    def restore_primaries(self) -> None:
        """Give every partition back to its preferred primary."""
        assert self._admin is not None
        deadline = time.monotonic() + READY_S_MAX
        while self._admin.restore_primaries() and time.monotonic() < deadline:
            time.sleep(2 * POLL_S)
        self.wait_in_sync()

    # --- what happens to it -----------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start the process; its host is connected."""
        kind = "coordinator" if name[0] == "c" else "node"
        data = self._directory / name
        data.mkdir(exist_ok=True)
        argv = ["--id", name, "--listen", self.address(name), "--data", str(data)]
        if kind == "node":
            argv += ["--coordinators", self.coordinators]
        else:
            members = ",".join(f"{n}={self.address(n)}" for n in self.coordinator_names)
            argv += ["--members", members, "--bootstrap-nodes", str(len(self.node_names))]
        self.connect(name)
        with self.log_path(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self._host(name),
                    sys.executable,
                    "-m",
                    MODULES[kind],
                    *argv,
                ],
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,  # as containers: CPU is shared by session
            )

    def cut(self, name: str) -> None:
        """Take the host off the network: packets to it and from it vanish."""
        _ip("link", "set", f"{self._tag}{name}", "down")

    def connect(self, name: str) -> None:
        _ip("link", "set", f"{self._tag}{name}", "up")

    def kill(self, name: str) -> None:
        """End the process and its host at once."""
        self._processes[name].kill()
        self.cut(name)
        self._processes[name].wait()

    def terminate(self, name: str) -> None:
        """Ask the process to end, by SIGTERM."""
        self._processes[name].send_signal(signal.SIGTERM)

    def wait_ended(self, name: str) -> None:
        self._processes[name].wait(END_S_MAX)
