"""The members of a local cluster: which there are at first, their addresses, and how their
processes are started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from koinon.local.files import (
    ClusterFile,
    LocalClusterError,
    Member,
    PortClaims,
    choose_addresses,
    port_of,
)
from koinon.local.servers import MODULES
from koinon_proto.contract.keyspaces import DEFAULT, check_keyspace_name
from koinon_proto.partitioner import canonical_name

_METRICS_ABOVE = 2000
_REDIS_BELOW = 1000
_KEYSPACES_APART = 100


def first_members(
    coordinators: int,
    nodes: int,
    coordinator_port: int,
    node_port: int,
    racks: Sequence[str],
    claims: PortClaims,
) -> dict[str, Member]:
    """Return the members of a new cluster by name: ``c1, c2, …, n1, n2, …``.

    Raises:
        LocalClusterError: the numbers make no cluster, or too few ports are free.
    """
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
    addresses = choose_addresses(coordinators, coordinator_port, claims=claims)
    members = {
        f"c{index}": Member(kind="coordinator", address=address)
        for index, address in enumerate(addresses, start=1)
    }
    for index, address in enumerate(choose_addresses(nodes, node_port, addresses, claims)):
        rack = racks[index % len(racks)] if racks else ""
        members[f"n{index + 1}"] = Member(kind="node", address=address, rack=rack)
    return members


def free_address(file: ClusterFile, port: int, claims: PortClaims) -> str:
    """Return a free address that is no member's: of this port if it is free, else of any."""
    taken = {address for member in file.members.values() for address in member.addresses}
    return choose_addresses(1, port, taken, claims)[0]


def give_addresses(file: ClusterFile, name: str, claims: PortClaims) -> None:
    """Give the member an address for its metrics, or take it away, as the file says; a node those
    for the Redis protocol that it lacks. Each is at a distance of its own from the member's port if
    that one is free.
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


def add_redis_keyspaces(file: ClusterFile, names: Sequence[str]) -> None:
    """Note that nodes are to have ports for clients of Redis in these keyspaces, too.

    Raises:
        InvalidArgumentError: one is no name of a keyspace.
    """
    for name in names:
        check_keyspace_name(name)
        if name not in (DEFAULT, *file.redis_keyspaces):  # each node has a port for that one
            file.redis_keyspaces.append(name)


def check_asked(
    file: ClusterFile,
    data_dir: Path,
    nodes: int | None,
    coordinators: int | None,
    replication_factor: int | None,
    partitioner: str | None,
    router: str | None,
) -> None:
    """Check what was asked for against what the directory remembers (None: not asked for).

    Raises:
        LocalClusterError: an existing cluster would have to change otherwise than by more nodes.
    """
    have = len(file.names("coordinator"))
    if coordinators is not None and coordinators != have:
        raise _refused(data_dir, "coordinators", coordinators, have)
    have = len(file.names("node"))
    if nodes is not None and nodes < have:
        raise _refused(data_dir, "nodes", nodes, have)
    own_hash = file.partitioner.partition("(")[0]
    asked = partitioner_asked(own_hash if partitioner is None else partitioner, router)
    if (partitioner, router) != (None, None) and asked != file.partitioner:
        raise LocalClusterError(
            reason=f"the cluster on {data_dir} routes keys by {file.partitioner}, for ever: "
            "choose another --data"
        )
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


def _refused(data_dir: Path, what: str, asked: int, have: int) -> LocalClusterError:
    return LocalClusterError(
        reason=f"the cluster on {data_dir} has {have} {what}, not {asked}: "
        f"leave --{what} out, or choose another --data"
    )


def partitioner_asked(partitioner: str | None, router: str | None) -> str | None:
    """Return the name of the partitioner with this router; None if neither was asked for.

    Raises:
        ConfigurationError: there is no such partitioner or router.
    """
    if partitioner is None and router is None:
        return None
    return canonical_name(partitioner or "murmur2", router or "")


def coordinators_of(file: ClusterFile) -> str:
    """Return the coordinators' addresses, as ``koinon.connect`` takes them."""
    return ",".join(file.members[name].address for name in file.names("coordinator"))


def command_line(file: ClusterFile, name: str, data_dir: Path) -> list[str]:
    """Return how a member's process is started."""
    member = file.members[name]
    argv = [sys.executable, "-m", MODULES[member.kind], "--id", name]
    argv += ["--listen", member.address, "--data", str(data_dir / name)]
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
    from koinon.local.identities import member_bundle  # it needs what takes long to import

    return ["--tls-bundle", str(member_bundle(data_dir, kind, name))]
