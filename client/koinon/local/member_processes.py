"""The processes of a local cluster's members: started, watched and ended by name.

This module keeps ``cluster.json``'s record of them up to date. A member counts as serving only when
its own process reports it, never because some process answers at its address: that may belong to
another cluster, such as one on a copy of the data directory.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from koinon.local import cluster_files as files
from koinon.local import members
from koinon.local.cluster_files import ClusterFile, LocalClusterError, PortClaims
from koinon.local.processes import (
    Guardian,
    ManagedProcess,
    ProcessIdentity,
    ProcessState,
    wait_stopped,
)
from koinon.local.servers import environment

KILL_TIMEOUT_S = 5.0
PORTS_FREE_TIMEOUT_S = 2.0  # the kernel may still be closing a killed process's files
POLL_S = 0.05
TAKEN_SHOWN = 3  # addresses in an error


class MemberProcesses:
    """The process of each member, running or not. ``guardian`` ends them with this program; None:
    they outlive it, or none was started yet.
    """

    def __init__(self, data_dir: Path, file: ClusterFile, claims: PortClaims) -> None:
        self._data_dir = data_dir
        self._file = file
        self._claims = claims
        self.guardian: Guardian | None = None
        self._by_name: dict[str, ManagedProcess] = {}
        for name in file.members:
            self.prepare(name)

    def __getitem__(self, name: str) -> ManagedProcess:
        if name not in self._by_name:
            known = ", ".join(self._by_name)
            raise LocalClusterError(reason=f"no member {name!r}: there are {known}")
        return self._by_name[name]

    def __iter__(self) -> Iterator[ManagedProcess]:
        return iter(self._by_name.values())

    def alive(self) -> set[str]:
        """Return the names of the members whose processes run."""
        return {process.name for process in self if process.alive}

    def serving(self) -> set[str]:
        """Return the names of the members whose own processes report that they serve."""
        return {process.name for process in self if process.serves}

    def prepare(self, name: str) -> None:
        """Recompute the member's command line for the next start."""
        argv = members.command_line(self._file, name, self._data_dir)
        log_path = members.log_path(self._data_dir, name)
        identity = self._file.processes.get(name)
        self._by_name[name] = ManagedProcess(name, argv, log_path, identity)

    def spawn(self, name: str) -> None:
        """Start the member's process."""
        if self._file.tls_bundle:
            from koinon.local.identities import prepare  # a slow import

            prepare(self._data_dir, self._file.members[name].kind, name)
        self.prepare(name)
        self[name].start(environment(), partial(self._remember, name))

    def _remember(self, name: str, identity: ProcessIdentity) -> None:
        self._file.processes[name] = identity
        if self.guardian is not None:
            self.guardian.watch(identity)
        self.save()

    def require_ports(self, names: Collection[str]) -> None:
        """Claim the addresses of members that are about to start, against other local clusters.

        Raises:
            LocalClusterError: another program uses one of them, or is about to listen there.
        """
        wanted = [
            (name, address) for name in names for address in self._file.members[name].addresses
        ]
        deadline = time.monotonic() + PORTS_FREE_TIMEOUT_S
        while taken := [at for at in wanted if not self._is_ours(files.port_of(at[1]))]:
            if time.monotonic() > deadline:
                raise self._ports_taken(taken)
            time.sleep(POLL_S)

    def _is_ours(self, port: int) -> bool:
        return self._claims.claim(port) and files.is_free(port)

    def _ports_taken(self, taken: list[tuple[str, str]]) -> LocalClusterError:
        listed = ", ".join(f"{address} ({name})" for name, address in taken[:TAKEN_SHOWN])
        more = f" and {len(taken) - TAKEN_SHOWN} more" if len(taken) > TAKEN_SHOWN else ""
        advice = (
            "stop the programs there (another local cluster: 'koinon down --data ITS_DIRECTORY'), "
            "or make a new cluster in another --data"
        )
        if original := self._file.copied_from:
            advice = (
                f"this directory is a copy of {original}, and of a cluster and its copies one can "
                f"run at a time; 'koinon down --data {shlex.quote(original)}' stops that one"
            )
        return LocalClusterError(
            reason=f"nothing was started: the cluster on {self._data_dir} keeps its addresses, and "
            f"other programs use {listed}{more}\n  {advice[0].upper()}{advice[1:]}."
        )

    def kill(self, name: str) -> None:
        """Kill the member's process with SIGKILL, as a crash would, and wait until it is gone."""
        process = self[name]
        process.signal(signal.SIGKILL)
        if wait_stopped([process], KILL_TIMEOUT_S):
            raise LocalClusterError(reason=f"{name} does not end, even by SIGKILL")
        self._forget(process)
        self.save()

    def terminate(self, name: str, timeout_s: float) -> None:
        """Stop the member with SIGTERM, and with SIGKILL after ``timeout_s``."""
        process = self[name]
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)
        if wait_stopped([process], timeout_s):
            self.kill(name)
        self._forget(process)
        self.save()

    def stop(self, timeout_s: float) -> None:
        """Stop every member: SIGTERM, and SIGKILL for those still there after ``timeout_s``."""
        running = [process for process in self if process.alive]
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
        self.save()
        if left:
            raise LocalClusterError(reason=f"{left[0].name} does not end, even by SIGKILL")

    def kill_all(self) -> None:
        """Kill all running processes and clear their records: another program has started them."""
        running = [process for process in self if process.alive]
        for process in running:
            process.signal(signal.SIGKILL)
        wait_stopped(running, KILL_TIMEOUT_S)

    def remove(self, name: str) -> None:
        """Remove the record of a member whose process has ended."""
        del self._by_name[name]

    def died(self, fresh: Collection[str]) -> list[ManagedProcess]:
        """Return the processes that have ended by themselves, and those of ``fresh`` that did not
        even start.
        """
        expected = {*self._file.processes, *fresh}
        return [process for process in self if process.name in expected and not process.alive]

    def states(self) -> dict[str, ProcessState]:
        return {process.name: process.state for process in self}

    def release(self) -> None:
        """Let the processes continue when this program ends."""
        for process in self:
            process.release()

    def save(self) -> None:
        files.save(self._data_dir, self._file)

    def _forget(self, process: ManagedProcess) -> None:
        identity = self._file.processes.pop(process.name, None)
        if identity is not None and self.guardian is not None:
            self.guardian.forget(identity)
