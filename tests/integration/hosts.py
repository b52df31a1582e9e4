"""Several hosts on one machine: network namespaces on a bridge, to cut processes off for real.

The bridge has a namespace of its own, so that the machine's own filters do not concern it.

Needs root and iproute2; ``available`` says whether they are there. Names and addresses are made
from this process's id, so that test processes side by side do not meet, and everything is removed
at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from koinon import connect
from koinon.client import Client
from koinon.local.servers import MODULES
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon_proto.contract.errors import UnavailableError

COORDINATOR_PORT, NODE_PORT = 7400, 7500
HERE = "here"
"""The name of this process's own host."""
POLL_S = 0.05
STOP_TIMEOUT_S = 10.0


def available() -> bool:
    """Tell whether network namespaces can be made here, by trying it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"kprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "del", probe)
    return True


class Hosts:
    """Named hosts, each a namespace with an address that this process reaches."""

    def __init__(self) -> None:
        self._hub = f"kh{os.getpid()}"
        self._net = f"10.{201 + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self._numbers: dict[str, int] = {}
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        _ip("link", "add", self._hub, "type", "veth", "peer", "name", "here", "netns", self._hub)
        _ip("-n", self._hub, "link", "set", "here", "master", "bridge", "up")
        _ip("addr", "add", f"{self._net}.254/24", "dev", self._hub)
        _ip("link", "set", self._hub, "up")

    def add(self, name: str) -> str:
        """Make a host; return its address."""
        number = self._numbers[name] = len(self._numbers) + 1
        space, link = self.space(name), f"v{number}"
        _ip("netns", "add", space)
        _ip("-n", self._hub, "link", "add", link, "type", "veth", "peer", "name", "there")
        _ip("-n", self._hub, "link", "set", "there", "netns", space, "name", "eth0")
        _ip("-n", self._hub, "link", "set", link, "master", "bridge", "up")
        _ip("-n", space, "addr", "add", f"{self._net}.{number}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{self._net}.{254 if name == HERE else self._numbers[name]}"

    def space(self, name: str) -> str:
        return f"k{os.getpid()}{name}"

    def isolate(self, name: str) -> None:
        """Pull the host's cable: nothing goes in or out."""
        _ip("-n", self._hub, "link", "set", f"v{self._numbers[name]}", "down")

    def rejoin(self, name: str) -> None:
        _ip("-n", self._hub, "link", "set", f"v{self._numbers[name]}", "up")

    def cut(self, one: str, other: str) -> None:
        """Let neither of the two send to the other; everyone else is reached."""
        for sender, receiver in ((one, other), (other, one)):
            _ip("-n", self.space(sender), "route", "add", "blackhole", self.address(receiver))

    def mend(self, one: str, other: str) -> None:
        for sender, receiver in ((one, other), (other, one)):
            _ip("-n", self.space(sender), "route", "del", "blackhole", self.address(receiver))

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._hub)  # at once; with its namespace it would go in a while
        for space in (*map(self.space, self._numbers), self._hub):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)


class HostCluster:
    """Coordinators ``c1…`` and nodes ``n1…``, a host each."""

    def __init__(
        self, directory: Path, *, nodes: int = 3, coordinators: int = 3, partitions: int = 64
    ) -> None:
        self.hosts = Hosts()
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator_names = [f"c{n + 1}" for n in range(coordinators)]
        self.node_names = [f"n{n + 1}" for n in range(nodes)]
        for name in (*self.coordinator_names, *self.node_names):
            self.hosts.add(name)
        self._flags = ["--bootstrap-nodes", str(nodes), "--partitions", str(partitions)]

    def __enter__(self) -> Self:
        for name in (*self.coordinator_names, *self.node_names):
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        self.hosts.close()
        if error is not None:
            for path in sorted(self._directory.glob("*.log")):
                print(f"--- {path.name}\n{path.read_text()[-3000:]}")

    @property
    def coordinators(self) -> str:
        return ",".join(self.address(name) for name in self.coordinator_names)

    def address(self, name: str) -> str:
        port = COORDINATOR_PORT if name in self.coordinator_names else NODE_PORT
        return f"{self.hosts.address(name)}:{port}"

    def add_node(self) -> str:
        """Start one more node on a host of its own; return its name."""
        name = f"n{len(self.node_names) + 1}"
        self.hosts.add(name)
        self.node_names.append(name)
        self.start(name)
        return name

    def start(self, name: str) -> None:
        """Start the member's process on its host."""
        command = ["ip", "netns", "exec", self.hosts.space(name), sys.executable, "-m"]
        command += [self.module(name), *self.arguments(name, self._directory / name)]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Linux shares CPU out by session
            )

    def module(self, name: str) -> str:
        """Return the module that the member's process runs."""
        return MODULES["coordinator" if name in self.coordinator_names else "node"]

    def arguments(self, name: str, data: Path) -> list[str]:
        """Return the arguments of the member's process."""
        arguments = ["--id", name, "--listen", self.address(name), "--data", str(data)]
        if name not in self.coordinator_names:
            return [*arguments, "--coordinators", self.coordinators]
        members = ",".join(f"{n}={self.address(n)}" for n in self.coordinator_names)
        return [*arguments, "--members", members, *self._flags]

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait(STOP_TIMEOUT_S)

    def terminate(self, name: str) -> subprocess.Popen[bytes] | None:
        """Ask the member's process to end, by SIGTERM; return it."""
        self._processes[name].terminate()
        return self._processes[name]

    def pause(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> Client:
        return connect(self.coordinators, **options)

    def status(self) -> ClusterStatus:
        """The status by the leader; raises UnavailableError."""
        with Admin(self.coordinators, timeout_ms=1000) as admin:
            return admin.status()

    def wait_for(
        self, condition: Callable[[ClusterStatus], bool], what: str, timeout_s: float = 90.0
    ) -> ClusterStatus:
        """Wait until the leader's status meets the condition; return it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(UnavailableError):
                status = self.status()
                if status.is_leader and condition(status):
                    return status
            time.sleep(POLL_S)
        raise AssertionError(f"not within {timeout_s:g} s: {what}")

    def wait_ready(self) -> ClusterStatus:
        """Wait until every partition is served."""
        return self.wait_for(lambda status: status.ready, "every partition is served")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
