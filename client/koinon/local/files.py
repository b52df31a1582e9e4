"""What a local cluster remembers in its data directory: members, addresses, processes.

``cluster.json`` is written whole and renamed into place, so a crash leaves the old or the new one.
Members and addresses are chosen once; until a cluster is closed, no other on this host chooses the
ports that it chose. ``cluster.lock`` is held by whoever is changing or running the cluster.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shlex
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from koinon.local.processes import ProcessIdentity
from koinon_proto.errors import DataDirectoryError, KoinonError

FORMAT = 1
HOST = "127.0.0.1"
FREE_PORTS = range(10_000, 30_000)
"""Where free ports are looked for: below the range that the system gives to outgoing connections,
so that a stopped member's port is still free when it starts again."""
PORT_ATTEMPTS = 1000


@dataclass(kw_only=True, eq=False)
class LocalClusterError(KoinonError):
    """A local cluster cannot do what was asked; ``reason`` says why and what to do."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member's place. ``joins``: a coordinator that was added to an existing group. ``rack``
    and ``weight`` are a node's; '' and None: as nodes choose. ``metrics`` is where its process
    serves metrics; '': nowhere.
    """

    kind: str  # "coordinator" | "node"
    address: str
    joins: bool = False
    rack: str = ""
    weight: int | None = None
    metrics: str = ""


@dataclass(kw_only=True)
class ClusterFile:
    """The content of ``cluster.json``."""

    members: dict[str, Member]
    bootstrap_nodes: int
    replication_factor: int | None = None
    coordinator_flags: list[str] = field(default_factory=list)
    node_flags: list[str] = field(default_factory=list)
    metrics: bool = False
    detached: bool = False
    owner: ProcessIdentity | None = None
    processes: dict[str, ProcessIdentity] = field(default_factory=dict)

    def names(self, kind: str) -> list[str]:
        return [name for name, member in self.members.items() if member.kind == kind]


def cluster_file_path(data_dir: Path) -> Path:
    return data_dir / "cluster.json"


def save(data_dir: Path, content: ClusterFile) -> None:
    """Replace ``cluster.json``."""
    path = cluster_file_path(data_dir)
    temporary = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, **asdict(content)}, indent=2)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(data_dir: Path) -> ClusterFile | None:
    """Return what the directory remembers, or None if no cluster was ever made in it.

    Raises:
        DataDirectoryError: the file is damaged, foreign, or of another format.
    """
    path = cluster_file_path(data_dir)
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if data.pop("format") != FORMAT:
            raise DataDirectoryError(path=str(path), reason="made by another version of Koinon")
        owner = data.pop("owner")
        return ClusterFile(
            members={name: Member(**member) for name, member in data.pop("members").items()},
            processes={n: ProcessIdentity(**p) for n, p in data.pop("processes").items()},
            owner=ProcessIdentity(**owner) if owner else None,
            **data,
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataDirectoryError(path=str(path), reason=f"not a cluster file: {error}") from error


class DirectoryLock:
    """An exclusive lock on a data directory, held until released or until the process ends."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._file = (data_dir / "cluster.lock").open("a+")
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
    """Ports chosen for members that do not listen yet, which no other cluster of this host chooses
    meanwhile. A claim is a name among Linux's abstract Unix sockets: it ends with the process.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def claim(self, port: int) -> bool:
        """Return whether the port was nobody's, and is claimed now."""
        s = socket.socket(socket.AF_UNIX)
        try:
            s.bind(f"\0koinon-port-{port}")
        except OSError:
            s.close()
            return False
        self._sockets.append(s)
        return True

    def take(self, other: PortClaims) -> None:
        """Take over all that the other has claimed."""
        self._sockets += other._sockets
        other._sockets = []

    def release(self) -> None:
        for s in self._sockets:
            s.close()
        self._sockets = []


def choose_addresses(
    count: int, first_port: int, taken: Collection[str] = (), claims: PortClaims | None = None
) -> list[str]:
    """Return ``count`` free local addresses, none of them in ``taken`` or claimed: from
    ``first_port`` up if those ports are free, else (or with ``first_port`` 0) anywhere in
    ``FREE_PORTS``. They are added to ``claims``.
    """
    spoken_for = {int(address.rpartition(":")[2]) for address in taken}
    ours = PortClaims()
    try:
        if first_port:
            ports = [first_port + index for index in range(count)]
            if all(
                port not in spoken_for and ours.claim(port) and _is_free(port) for port in ports
            ):
                return _chosen(ports, ours, claims)
            ours.release()
        ports = []
        for port in random.sample(FREE_PORTS, PORT_ATTEMPTS):
            if len(ports) == count:
                return _chosen(ports, ours, claims)
            if port not in spoken_for and ours.claim(port) and _is_free(port):
                ports.append(port)
    finally:
        ours.release()
    raise LocalClusterError(reason=f"no {count} free ports on {HOST}")


def _chosen(ports: list[int], ours: PortClaims, claims: PortClaims | None) -> list[str]:
    if claims is not None:
        claims.take(ours)
    return [f"{HOST}:{port}" for port in ports]


def _is_free(port: int) -> bool:
    """Whether the port can be bound."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError:
            return False
    return True
