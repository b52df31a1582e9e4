"""CLUSTER: the nodes of each slot. Redis Cluster's clients ask at first, and after each MOVED."""

from __future__ import annotations

from koinon_node.resp import wire
from koinon_node.resp.commands.arguments import integer
from koinon_node.resp.commands.rules import check_counting
from koinon_node.resp.commands.scans import pages_of
from koinon_node.resp.commands.spec import subcommands
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_node.resp.topology import SlotRange, Topology, cluster_node_id
from koinon_proto.contract.keyspaces import DEFAULT_ID
from koinon_proto.contract.table import SLOT_COUNT, NodeInfo, NodeStatus
from koinon_proto.partitioner import slot_of

_BUS_PORT_ABOVE = 10_000  # where Redis would have its bus; no server listens there
_CHOSEN_WITH_CLUSTER = (
    "That is chosen when a cluster is made: koinon coordinator --partitioner crc16, or koinon up "
    "--partitioner crc16"
)
_CHOSEN_WITH_KEYSPACE = (
    "That is chosen when a keyspace is created: koinon admin keyspaces create --partitioner crc16"
)


def topology_of(session: Session) -> Topology:
    """Return the present topology.

    Raises:
        RefusedError: the keyspace does not route by Redis's slots.
        UnknownKeyspaceError: there is no such keyspace, or not any more.
        ClusterNotReadyError: this node has no table yet.
    """
    keyspace = session.served.keyspace()
    if keyspace.partitioner != "crc16":
        is_default = keyspace.keyspace_id == DEFAULT_ID
        which = "this cluster" if is_default else f"keyspace {keyspace.name}"
        chosen = _CHOSEN_WITH_CLUSTER if is_default else _CHOSEN_WITH_KEYSPACE
        raise RefusedError(
            f"ERR {which} routes keys by {keyspace.partitioner}, clients of Redis Cluster by crc16 "
            f"(with no router but the hash tag). {chosen}"
        )
    return session.served.topology()


def _host_port(topology: Topology, node: NodeInfo) -> tuple[str, int]:
    host, _, port = topology.address_of(node).rpartition(":")
    return host.strip("[]"), int(port)


# --- subcommands -------------------------------------------------------------------------------


def _slots(session: Session, arguments: Arguments) -> Outcome:
    topology = topology_of(session)
    return wire.array([_slots_entry(topology, span) for span in topology.ranges])


def _slots_entry(topology: Topology, span: SlotRange) -> bytes:
    host, port = _host_port(topology, span.node)
    name = cluster_node_id(topology.table, span.node)
    node = [wire.bulk(host.encode()), wire.integer(port), wire.bulk(name.encode()), wire.array([])]
    return wire.array([wire.integer(span.first), wire.integer(span.last), wire.array(node)])


def _shards(session: Session, arguments: Arguments) -> Outcome:
    topology = topology_of(session)
    return wire.array([_shard(session, topology, node) for node in topology.nodes])


def _shard(session: Session, topology: Topology, node: NodeInfo) -> bytes:
    host, port = _host_port(topology, node)
    is_live = node.status in (NodeStatus.ACTIVE, NodeStatus.DRAINING)
    facts = {
        b"id": wire.bulk(cluster_node_id(topology.table, node).encode()),
        b"port": wire.integer(port),
        b"ip": wire.bulk(host.encode()),
        b"endpoint": wire.bulk(host.encode()),
        b"role": wire.bulk(b"master"),
        b"replication-offset": wire.integer(topology.epoch),
        b"health": wire.bulk(b"online" if is_live else b"fail"),
    }
    pairs = [(wire.bulk(name), value) for name, value in facts.items()]
    bounds = [
        wire.integer(slot)
        for span in topology.ranges_of[node.number]
        for slot in (span.first, span.last)
    ]
    nodes = wire.array([wire.map_of(pairs, resp3=session.resp3)])
    shard = [(wire.bulk(b"slots"), wire.array(bounds)), (wire.bulk(b"nodes"), nodes)]
    return wire.map_of(shard, resp3=session.resp3)


def _nodes(session: Session, arguments: Arguments) -> Outcome:
    topology = topology_of(session)
    lines = []
    for node in topology.nodes:
        host, port = _host_port(topology, node)
        is_live = node.status in (NodeStatus.ACTIVE, NodeStatus.DRAINING)
        flags = "master" if is_live else "master,fail"
        if node.node_id == session.service.node_id:
            flags = f"myself,{flags}"
        slots = " ".join(
            f"{span.first}-{span.last}" if span.last > span.first else f"{span.first}"
            for span in topology.ranges_of[node.number]
        )
        name = cluster_node_id(topology.table, node)
        state = "connected" if is_live else "disconnected"
        line = (
            f"{name} {host}:{port}@{port + _BUS_PORT_ABOVE} {flags} - 0 0 {topology.epoch} {state}"
        )
        lines.append(f"{line} {slots}".rstrip() + "\n")
    return wire.bulk("".join(lines).encode())


def _info(session: Session, arguments: Arguments) -> Outcome:
    topology = topology_of(session)
    serving = sum(bool(spans) for spans in topology.ranges_of.values())
    facts = {
        "cluster_enabled": 1,
        "cluster_state": "ok" if topology.covered == SLOT_COUNT else "fail",
        "cluster_slots_assigned": SLOT_COUNT,
        "cluster_slots_ok": topology.covered,
        "cluster_slots_pfail": 0,
        "cluster_slots_fail": SLOT_COUNT - topology.covered,
        "cluster_known_nodes": len(topology.nodes),
        "cluster_size": serving,
        "cluster_current_epoch": topology.epoch,
        "cluster_my_epoch": topology.epoch,
    }
    return wire.bulk("".join(f"{name}:{value}\r\n" for name, value in facts.items()).encode())


def _myid(session: Session, arguments: Arguments) -> Outcome:
    table = session.service.table()
    for node in table.nodes.values():
        if node.node_id == session.service.node_id:
            return wire.bulk(cluster_node_id(table, node).encode())
    raise RefusedError("CLUSTERDOWN this node is not in the table yet")


def _keyslot(session: Session, arguments: Arguments) -> Outcome:
    topology_of(session)  # where keys are not routed by slots, a slot would mislead
    return wire.integer(slot_of(arguments[2]))


def _countkeysinslot(session: Session, arguments: Arguments) -> Outcome:
    slot = integer(arguments[2])
    if not 0 <= slot < SLOT_COUNT:
        raise RefusedError("ERR Invalid slot")
    check_counting(session)
    keyspace = topology_of(session).keyspace
    partition_id = keyspace.base + slot * keyspace.partition_count // SLOT_COUNT
    return _count_in_slot(session, partition_id, slot)


async def _count_in_slot(session: Session, partition_id: int, slot: int) -> bytes:
    found = 0
    if partition_id in session.served.led():
        async for keys in pages_of(session, (partition_id,), b"", counted=True):
            found += sum(slot_of(key) == slot for key in keys)
    is_led = partition_id in session.served.led()
    return wire.integer(found if is_led else 0)  # 0: as Redis says of another node's slot


cluster = subcommands(
    {
        b"SLOTS": (2, _slots),
        b"SHARDS": (2, _shards),
        b"NODES": (2, _nodes),
        b"INFO": (2, _info),
        b"MYID": (2, _myid),
        b"KEYSLOT": (3, _keyslot),
        b"COUNTKEYSINSLOT": (3, _countkeysinslot),
    }
)


def wait(session: Session, arguments: Arguments) -> Outcome:
    """Reply with the number of backups that hold all acknowledged writes: the least in_sync of the
    partitions led here, without the primary.
    """
    integer(arguments[1])
    integer(arguments[2])
    rows, led = session.service.table().rows, session.served.led()
    return wire.integer(min((len(rows[p].in_sync) for p in led), default=1) - 1)
