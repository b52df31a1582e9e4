"""The files of a local cluster in its data directory: members, addresses, processes, and a lock.

``cluster.json`` is written whole and renamed into place, so a crash leaves the old or the new
version. Members and addresses are chosen once; until a cluster is closed, no other local cluster of
this host chooses its ports. The program that changes or runs the cluster holds ``cluster.lock``.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import shlex
import socket
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from koinon.local.processes import ProcessIdentity, ProcessState, state_of
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.process import private_files

FORMAT = 1
HOST = "127.0.0.1"
FREE_PORTS = range(10_000, 30_000)
"""The range of members' ports: below the system's range for outgoing connections, so that a stopped
member's port is still free when it starts again.
"""
PORT_ATTEMPTS = 1000


@dataclass(kw_only=True, eq=False)
class LocalClusterError(KoinonError):
    """A local cluster cannot carry out a request; ``reason`` says why and what to do."""

    reason: str


@dataclass(kw_only=True, eq=False)
class ClusterStoppedError(LocalClusterError):
    """A command needs a local cluster that does not run."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member's settings. ``joins``: a coordinator that was added to an existing group. ``rack``
    and ``weight`` are a node's; '' and None: the node's default. ``metrics``: the address at which
    its process serves metrics; ``redis``: a node's address for the Redis protocol; '': none.
    ``redis_keyspaces``: such addresses for keyspaces other than ``default``, by name.
    """

    kind: str  # "coordinator" | "node"
    address: str
    joins: bool = False
    rack: str = ""
    weight: int | None = None
    metrics: str = ""
    redis: str = ""
    redis_keyspaces: dict[str, str] = field(default_factory=dict)

    @property
    def addresses(self) -> list[str]:
        """All addresses at which it listens."""
        own = (self.address, self.metrics, self.redis, *self.redis_keyspaces.values())
        return [address for address in own if address]


@dataclass(kw_only=True)
class ClusterFile:
    """The content of ``cluster.json``. ``left``: nodes that an operator has removed from the
    cluster; their names are not used again, since the cluster accepts no node with these ids.
    ``redis_keyspaces``: the keyspaces for which each node has a port for Redis clients.
    ``tls_bundle``: the identity file for connecting, in the data directory; '': no TLS.
    ``cluster_id``: the id that the cluster reports; '': it has never been ready yet.

    ``directory`` and ``directory_id`` are the data directory's path and its identity in the file
    system. A copy of the directory has another identity, and the recorded processes belong to the
    original. So ``load`` drops them in a copy, and sets ``copied_from`` to the original's path.
    """

    members: dict[str, Member]
    bootstrap_nodes: int
    left: list[str] = field(default_factory=list)
    replication_factor: int | None = None
    coordinator_flags: list[str] = field(default_factory=list)
    node_flags: list[str] = field(default_factory=list)
    metrics: bool = False
    redis_keyspaces: list[str] = field(default_factory=list)
    tls_bundle: str = ""
    cluster_id: str = ""
    directory: str = ""
    directory_id: str = ""
    detached: bool = False
    owner: ProcessIdentity | None = None
    processes: dict[str, ProcessIdentity] = field(default_factory=dict)
    copied_from: str = field(default="", init=False)

    @property
    def partitioner(self) -> str:
        """The cluster's partitioner, as given to its coordinators when it was created."""
        flags = self.coordinator_flags
        if "--partitioner" not in flags:
            return "murmur2"
        return flags[flags.index("--partitioner") + 1]

    def names(self, kind: str) -> list[str]:
        return [name for name, member in self.members.items() if member.kind == kind]


def cluster_file_path(data_dir: Path) -> Path:
    return data_dir / "cluster.json"


def save(data_dir: Path, content: ClusterFile) -> None:
    """Replace ``cluster.json``."""
    path = cluster_file_path(data_dir)
    temporary = path.with_suffix(".tmp")
    content.directory, content.directory_id = str(data_dir.resolve()), _directory_id(data_dir)
    kept = asdict(content)
    del kept["copied_from"]
    text = json.dumps({"format": FORMAT, **kept}, indent=2)
    with open(temporary, "w", encoding="utf-8", opener=private_files.opener) as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(data_dir: Path) -> ClusterFile | None:
    """Return the cluster file of the directory, or None if no cluster was ever made in it.

    Raises:
        DataDirectoryError: the file is damaged, foreign, or of another format.
    """
    path = cluster_file_path(data_dir)
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if data.pop("format") != FORMAT:
            raise DataDirectoryError(path=str(path), reason="made by another version of Koinon")
        owner = data.pop("owner")
        found = ClusterFile(
            members={name: Member(**member) for name, member in data.pop("members").items()},
            processes={n: ProcessIdentity(**p) for n, p in data.pop("processes").items()},
            owner=ProcessIdentity(**owner) if owner else None,
            **data,
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataDirectoryError(path=str(path), reason=f"not a cluster file: {error}") from error
    if found.directory_id != _directory_id(data_dir):
        found.processes, found.owner, found.detached = {}, None, False
        # if it does not, the directory was moved or restored
        if cluster_file_path(Path(found.directory)).exists():
            found.copied_from = found.directory
    return found


def _directory_id(data_dir: Path) -> str:
    """Return the directory's device and inode, which do not depend on the path to it."""
    found = data_dir.stat()
    return f"{found.st_dev}:{found.st_ino}"


def running_cluster(data_dir: Path) -> ClusterFile | None:
    """Return the cluster file of ``data_dir`` if any of its recorded processes runs, else None."""
    remembered = load(data_dir)
    if remembered is None:
        return None
    running = (state_of(identity) for identity in remembered.processes.values())
    return remembered if any(state is not ProcessState.STOPPED for state in running) else None


class DirectoryLock:
    """An exclusive lock on a data directory, held until released or until the process ends."""

    def __init__(self, data_dir: Path) -> None:
        private_files.make_directory(data_dir, cluster_file_path(data_dir).name)
        path = data_dir / "cluster.lock"
        self._file = open(path, "a+", opener=private_files.opener)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LocalClusterError(
                reason=f"a local cluster already runs on {data_dir}: stop it first "
                f"(koinon down --data {shlex.quote(str(data_dir))}, or Ctrl-C where it runs), "
                "or choose another --data"
            ) from error

    def release(self) -> None:
        self._file.close()


class PortClaims:
    """Reserves ports for members that do not listen yet, against other local clusters of this host.
    A claim is a name among Linux's abstract Unix sockets, and ends with the process.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def claim(self, port: int) -> bool:
        """Claim the port if the system supports it; return False if another local cluster has
        claimed it.
        """
        if port in self._sockets:
            return True
        try:
            s = socket.socket(socket.AF_UNIX)
        except OSError:
            return True
        try:
            s.bind(f"\0koinon-port-{port}")
        except OSError as error:
            s.close()
            return error.errno != errno.EADDRINUSE
        self._sockets[port] = s
        return True

    def release(self, ports: Iterable[int] | None = None) -> None:
        """Release these ports, or all."""
        for port in list(self._sockets) if ports is None else ports:
            if port in self._sockets:
                self._sockets.pop(port).close()


def choose_addresses(
    count: int, first_port: int, taken: Collection[str] = (), claims: PortClaims | None = None
) -> list[str]:
    """Return ``count`` free local addresses that are neither in ``taken`` nor claimed: from
    ``first_port`` up if those ports are free, else (or with ``first_port`` 0) anywhere in
    ``FREE_PORTS``. They are added to ``claims``.
    """
    ours = PortClaims() if claims is None else claims
    try:
        ports = _choose_ports(count, first_port, set(map(port_of, taken)), ours)
    finally:
        if claims is None:
            ours.release()
    return [f"{HOST}:{port}" for port in ports]


def _choose_ports(
    count: int, first_port: int, spoken_for: Collection[int], claims: PortClaims
) -> list[int]:
    def free(port: int) -> bool:
        if port in spoken_for or not claims.claim(port):
            return False
        if not is_free(port):
            claims.release([port])
            return False
        return True

    ports = [first_port + index for index in range(count)]
    if first_port and all(map(free, ports)):
        return ports
    if first_port:
        claims.release(port for port in ports if port not in spoken_for)
    ports = list(itertools.islice(filter(free, random.sample(FREE_PORTS, PORT_ATTEMPTS)), count))
    if len(ports) < count:
        raise LocalClusterError(reason=f"no {count} free ports on {HOST}")
    return ports


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def is_free(port: int) -> bool:
    """Return whether the port can be bound."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError:
            return False
    return True
