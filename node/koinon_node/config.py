"""The settings of a node process, checked against one another."""

from __future__ import annotations

from dataclasses import dataclass, field

from koinon_node.store_config import StoreConfig
from koinon_proto.contract.addresses import check_address
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import DEFAULT_WEIGHT
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.transport import Listening
from koinon_proto.server.admission import LaneLimits, Share

MAX_WEIGHT = 10_000
_MIB = 1024 * 1024
# What is held for a request or an answer costs some 2.3 times its size: the message, its bytes, its
# rows. Together these are below 1.1 GB, of the 2 GiB that a container of a node is given.
DATA_LANE = LaneLimits(
    connection=Share(calls=256, request_bytes=80 * _MIB, reply_bytes=64 * _MIB),
    host=Share(calls=1_024, request_bytes=120 * _MIB, reply_bytes=96 * _MIB),
    all=Share(calls=2_048, request_bytes=160 * _MIB, reply_bytes=128 * _MIB),
)
CONTROL_LANE = LaneLimits(
    connection=Share(calls=256, request_bytes=40 * _MIB, reply_bytes=64 * _MIB),
    host=Share(calls=1_024, request_bytes=60 * _MIB, reply_bytes=80 * _MIB),
    all=Share(calls=2_048, request_bytes=80 * _MIB, reply_bytes=96 * _MIB),
    patience_s=0.25,  # what members say is short
)

REPLY_BYTES = {
    "/koinon.v1.KeyValue/BatchGet": 1 * _MIB,
    "/koinon.v1.KeyValue/Scan": 1 * _MIB,
    "/koinon.v1.Bulk/ReadColumns": 4 * _MIB,
    "/koinon.v1.Replication/ReadPage": 2 * _MIB,
    "/koinon.v1.Replication/ReadKeys": 2 * _MIB,
}
"""What answers of a method count as until they are there: as much as is usual at most."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node process. Addresses are ``host:port``. ``weight`` is the node's share of partitions,
    relative to the others'. ``metrics_listen`` '': metrics are served nowhere; so with
    ``redis_listen``, the Redis protocol, which others find at ``redis_advertise``. ``pool``: the
    node takes replicas of the keyspaces of this pool.
    """

    node_id: str
    listen: str
    advertise: str
    coordinators: tuple[str, ...]
    store: StoreConfig
    rack: str = ""
    pool: str = ""
    weight: int = DEFAULT_WEIGHT
    metrics_listen: str = ""
    redis_listen: str = ""
    redis_advertise: str = ""
    listening: Listening = field(default_factory=Listening)
    audit: Audit = NO_AUDIT

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ConfigurationError(reason="id: must not be empty")
        if not self.coordinators:
            raise ConfigurationError(reason="coordinators: at least one address is needed")
        if not 1 <= self.weight <= MAX_WEIGHT:
            raise ConfigurationError(reason=f"weight {self.weight}: must be 1 to {MAX_WEIGHT}")
        for name, address in (
            ("listen", self.listen),
            ("advertise", self.advertise),
            *((("metrics-listen", self.metrics_listen),) if self.metrics_listen else ()),
            *((("redis-listen", self.redis_listen),) if self.redis_listen else ()),
            *((("redis-advertise", self.redis_advertise),) if self.redis_advertise else ()),
            *(("coordinators", address) for address in self.coordinators),
        ):
            check_address(name, address)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a node's queues and steps; beyond them callers get ResourceExhausted."""

    pending_rows: int = 262_144  # writes that are not durable yet
    pending_bytes: int = 96 * 1024 * 1024
    reading_rows: int = 524_288  # reads that have been admitted and not answered
    reading_bytes: int = 256 * 1024 * 1024  # what scans and batch reads hold for their answers
    group_rows: int = 16_384  # one transaction
    group_bytes: int = 16 * 1024 * 1024
    step_rows: int = 4_096  # of a batch, between two chances for others to run
    step_bytes: int = 2 * 1024 * 1024
    scan_rows: int = 4_096
    scan_bytes: int = 1024 * 1024
    write_timeout_ms: int = 5_000  # then a write that is not on all in-sync replicas is unknown
    stream_bytes: int = 64 * 1024 * 1024  # queued to a follower, or not acknowledged by it
    page_rows: int = 4_096  # looked at for one page of a pass
    page_bytes: int = 2 * 1024 * 1024  # read for it, unless it asks for less
    tombstone_ms: int = 600_000  # a tombstone is kept for so long
