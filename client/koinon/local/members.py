"""The members of a local cluster: the initial set, their addresses, and the command lines of their
processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from koinon.local.cluster_files import (
    ClusterFile,
    LocalClusterError,
    Member,
    PortClaims,
    choose_addresses,
    load,
    port_of,
)
from koinon.local.processes import ProcessState, pid_path, state_of
from koinon.local.servers import MODULES
from koinon_proto.contract.keyspaces import DEFAULT, check_keyspace_name
from koinon_proto.partitioner import canonical_name
from koinon_proto.process.child_python import module_command

_METRICS_ABOVE = 2000
_REDIS_BELOW = 1000
_KEYSPACES_APART = 100


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a new cluster, which its directory keeps. Later starts leave them out, or
    repeat them; different ones are refused.
    """

    replication_factor: int | None = None
    """The number of copies of each partition; by default three, or as many as there are nodes."""
    partitioner: str | None = None
    """The hash of keys: murmur2 (default), md5, or crc16, which clients of Redis Cluster need."""
    router: str | None = None
    """Selects the bytes of a key that are hashed, as ``koinon_proto.routers`` says: ``until:2f``;
    by default the whole key.
    """
    racks: Sequence[str] = ()
    """The racks of the first nodes, in turn."""
    coordinator_flags: Sequence[str] = ()
    """Further arguments of ``koinon coordinator``."""
    node_flags: Sequence[str] = ()
    """Further arguments of ``koinon node``."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of a cluster's members. Metrics and keyspaces apply from each member's next start
    on, and are remembered.
    """

    first_coordinator: int = 0
    """The ports of a new cluster's coordinators count up from this one, if it is free; 0: any."""
    first_node: int = 0
    """Likewise for nodes. Nodes serve the Redis protocol 1000 below."""
    metrics: bool | None = None
    """Whether each member's process serves metrics, 2000 above its port if that is free; by default
    as the directory says, and not in a new one.
    """
    redis_keyspaces: Sequence[str] = ()
    """Keyspaces other than ``default`` that nodes serve by the Redis protocol, too."""


Setup.__module__ = Ports.__module__ = "koinon.local"


class Wanted(NamedTuple):
    """The arguments of ``LocalCluster`` about its members."""

    nodes: int | None
    coordinators: int | None
    setup: Setup
    ports: Ports


def remembered_or_new(data_dir: Path, wanted: Wanted, claims: PortClaims) -> ClusterFile:
    """Return the cluster file of the directory, or a new one that is not saved yet.

    Raises:
        LocalClusterError: the existing cluster would have to change in other ways than by more
            nodes, or the arguments are no valid cluster, or too few ports are free.
        ConfigurationError: there is no such partitioner or router.
    """
    file, setup = load(data_dir), wanted.setup
    if file is None:
        asked = _partitioner_asked(setup.partitioner, setup.router)
        flags = ["--partitioner", asked] if asked is not None else []
        file = ClusterFile(
            members=_first_members(wanted, claims),
            bootstrap_nodes=_count(wanted.nodes),
            replication_factor=setup.replication_factor,
            coordinator_flags=[*setup.coordinator_flags, *flags],
            node_flags=list(setup.node_flags),
        )
    else:
        _check_flags(file, data_dir, "coordinator", setup.coordinator_flags)
        _check_flags(file, data_dir, "node", setup.node_flags)
        _check_racks(file, data_dir, setup.racks)
    _check_counts_and_routing(file, data_dir, wanted)
    return file


def _count(asked: int | None) -> int:
    return 3 if asked is None else asked


def _first_members(wanted: Wanted, claims: PortClaims) -> dict[str, Member]:
    """Return the members of a new cluster by name: ``c1, c2, …, n1, n2, …``."""
    coordinators, nodes = _count(wanted.coordinators), _count(wanted.nodes)
    if coordinators < 1 or nodes < 1:
        raise LocalClusterError(
            reason=f"a cluster needs at least 1 coordinator and 1 node, "
            f"not {coordinators} and {nodes}"
        )
    if coordinators % 2 == 0:
        raise LocalClusterError(
            reason=f"{coordinators} coordinators survive no more failures than "
            f"{coordinators - 1}: choose an odd number"
        )
    addresses = choose_addresses(coordinators, wanted.ports.first_coordinator, claims=claims)
    members = {
        f"c{index}": Member(kind="coordinator", address=address)
        for index, address in enumerate(addresses, start=1)
    }
    racks = wanted.setup.racks
    node_addresses = choose_addresses(nodes, wanted.ports.first_node, addresses, claims)
    for index, address in enumerate(node_addresses):
        rack = racks[index % len(racks)] if racks else ""
        members[f"n{index + 1}"] = Member(kind="node", address=address, rack=rack)
    return members


def free_address(file: ClusterFile, port: int, claims: PortClaims) -> str:
    """Return a free address that no member uses: with this port if it is free, else with any."""
    taken = {address for member in file.members.values() for address in member.addresses}
    return choose_addresses(1, port, taken, claims)[0]


def give_addresses(file: ClusterFile, name: str, claims: PortClaims) -> None:
    """Set or remove the member's metrics address, as the file says, and set the missing addresses
    of a node for the Redis protocol. Each is at a fixed distance from the member's port if that
    port is free.
    """
    member = file.members[name]
    port = port_of(member.address)
    if file.metrics != bool(member.metrics):
        above = port + _METRICS_ABOVE
        address = free_address(file, above, claims) if file.metrics else ""
        member = file.members[name] = replace(member, metrics=address)
    if member.kind == "node" and not member.redis:
        address = free_address(file, max(port - _REDIS_BELOW, 0), claims)
        member = file.members[name] = replace(member, redis=address)
    for number, keyspace in enumerate(file.redis_keyspaces if member.kind == "node" else (), 1):
        if keyspace not in member.redis_keyspaces:
            near = max(port - _REDIS_BELOW, 0) + number * _KEYSPACES_APART
            member.redis_keyspaces[keyspace] = free_address(file, near, claims)


def lacks_addresses(file: ClusterFile, name: str) -> bool:
    """Return whether ``give_addresses`` would change the member's addresses."""
    member = file.members[name]
    keyspaces = set(file.redis_keyspaces if member.kind == "node" else ())
    return file.metrics != bool(member.metrics) or not keyspaces <= member.redis_keyspaces.keys()


def add_redis_keyspaces(file: ClusterFile, names: Sequence[str]) -> None:
    """Add keyspaces to those for which nodes have ports for Redis clients.

    Raises:
        InvalidArgumentError: a text is no name of a keyspace.
    """
    for name in names:
        check_keyspace_name(name)
        if name not in (DEFAULT, *file.redis_keyspaces):  # each node has a port for ``default``
            file.redis_keyspaces.append(name)


def _check_counts_and_routing(file: ClusterFile, data_dir: Path, wanted: Wanted) -> None:
    nodes, coordinators, setup = wanted.nodes, wanted.coordinators, wanted.setup
    have = len(file.names("coordinator"))
    if coordinators is not None and coordinators != have:
        raise _refused(data_dir, "coordinators", coordinators, have)
    have = len(file.names("node"))
    if nodes is not None and nodes < have:
        raise _refused(data_dir, "nodes", nodes, have)
    own_hash = file.partitioner.partition("(")[0]
    asked = _partitioner_asked(setup.partitioner or own_hash, setup.router)
    if (setup.partitioner, setup.router) != (None, None) and asked != file.partitioner:
        raise LocalClusterError(
            reason=f"the cluster on {data_dir} routes keys by {file.partitioner}, for ever: "
            "choose another --data"
        )
    replication_factor = setup.replication_factor
    if replication_factor is None:
        return
    if replication_factor != file.replication_factor:
        raise LocalClusterError(
            reason=f"the cluster on {data_dir} exists: once it runs, 'koinon admin "
            f"set-replication-factor {replication_factor}' changes its copies"
        )
    if replication_factor > file.bootstrap_nodes:
        raise LocalClusterError(
            reason=f"{replication_factor} copies of each partition need as many nodes, "
            f"not {file.bootstrap_nodes}"
        )


def _check_flags(file: ClusterFile, data_dir: Path, kind: str, given: Sequence[str]) -> None:
    """Check the given flags of coordinators or nodes against the directory's."""
    kept = file.coordinator_flags if kind == "coordinator" else file.node_flags
    routed = kept[-2:-1] == ["--partitioner"]  # the flag of the argument ``partitioner``
    if given and list(given) not in (kept, kept[:-2] if routed else kept):
        raise LocalClusterError(
            reason=f"the cluster on {data_dir} starts each {kind} with the flags "
            f"{shlex.join(kept) or '(none)'}, not {shlex.join(given)}: leave the flags out, or "
            "choose another directory"
        )


def _check_racks(file: ClusterFile, data_dir: Path, racks: Sequence[str]) -> None:
    """Check the racks of the first nodes against the directory's."""
    first = {f"n{index + 1}": index for index in range(file.bootstrap_nodes)}
    kept = {name: file.members[name].rack for name in first if name in file.members}
    if racks and kept != {name: racks[first[name] % len(racks)] for name in kept}:
        listed = ", ".join(f"{name} in {rack or 'none'}" for name, rack in kept.items())
        raise LocalClusterError(
            reason=f"the nodes of the cluster on {data_dir} keep their racks ({listed}): leave "
            "racks out, or choose another data_dir"
        )


def _refused(data_dir: Path, what: str, asked: int, have: int) -> LocalClusterError:
    return LocalClusterError(
        reason=f"the cluster on {data_dir} has {have} {what}, not {asked}: "
        f"leave --{what} out, or choose another --data"
    )


def _partitioner_asked(partitioner: str | None, router: str | None) -> str | None:
    """Return the name of the partitioner with this router; None if neither is given."""
    if partitioner is None and router is None:
        return None
    return canonical_name(partitioner or "murmur2", router or "")


def coordinators_of(file: ClusterFile) -> str:
    """Return the coordinators' addresses, as ``koinon.connect`` takes them."""
    return ",".join(file.members[name].address for name in file.names("coordinator"))


def running_coordinators_of(file: ClusterFile) -> str:
    """Return the addresses of the coordinators whose processes run; '' if none does. The address of
    a stopped coordinator may belong to another cluster by now.
    """
    running = (
        file.members[name].address
        for name in file.names("coordinator")
        if state_of(file.processes.get(name)) is not ProcessState.STOPPED
    )
    return ",".join(running)


def log_path(data_dir: Path, name: str) -> Path:
    """Return the path of a member's log."""
    return data_dir / "logs" / f"{name}.log"


def command_line(file: ClusterFile, name: str, data_dir: Path) -> list[str]:
    """Return the command line of a member's process."""
    member = file.members[name]
    argv = module_command(MODULES[member.kind], "--id", name)
    argv += ["--listen", member.address, "--data", str(data_dir / name)]
    argv += ["--pid-file", str(pid_path(log_path(data_dir, name)))]
    argv += ["--metrics-listen", member.metrics] if member.metrics else []
    argv += _tls_flags(file, member.kind, name, data_dir)
    if member.kind == "node":
        argv += ["--coordinators", coordinators_of(file)]
        argv += ["--redis-listen", member.redis] if member.redis else []
        for keyspace, address in member.redis_keyspaces.items():
            argv += ["--redis-listen", f"{keyspace}={address}"]
        argv += ["--rack", member.rack] if member.rack else []
        argv += ["--weight", str(member.weight)] if member.weight is not None else []
        return argv + file.node_flags
    founders = [n for n in file.names("coordinator") if not file.members[n].joins]
    members = ",".join(f"{n}={file.members[n].address}" for n in founders)
    argv += ["--join"] if member.joins else ["--members", members]
    argv += ["--bootstrap-nodes", str(file.bootstrap_nodes)]
    if file.replication_factor is not None:
        argv += ["--replication-factor", str(file.replication_factor)]
    return argv + file.coordinator_flags


def _tls_flags(file: ClusterFile, kind: str, name: str, data_dir: Path) -> list[str]:
    if not file.tls_bundle:
        return []
    from koinon.local.identities import member_bundle  # a slow import

    return ["--tls-bundle", str(member_bundle(data_dir, kind, name))]
