"""The settings of a node process, with checks across fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from koinon_node.store_config import StoreConfig
from koinon_proto.contract.addresses import check_address
from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError
from koinon_proto.contract.keyspaces import DEFAULT, check_keyspace_name
from koinon_proto.contract.table import DEFAULT_WEIGHT, RedisPort
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.transport import Listening
from koinon_proto.server.admission import LaneLimits, Share

MAX_WEIGHT = 10_000
_MIB = 1024 * 1024
# A request or an answer takes about 2.3 times its size in memory: the message, its bytes, its rows.
# The sum of these limits is below 1.1 GB; a node's container has 2 GiB.
DATA_LANE = LaneLimits(
    connection=Share(calls=256, request_bytes=80 * _MIB, reply_bytes=64 * _MIB),
    host=Share(calls=1_024, request_bytes=120 * _MIB, reply_bytes=96 * _MIB),
    all=Share(calls=2_048, request_bytes=160 * _MIB, reply_bytes=128 * _MIB),
)
CONTROL_LANE = LaneLimits(
    connection=Share(calls=256, request_bytes=40 * _MIB, reply_bytes=64 * _MIB),
    host=Share(calls=1_024, request_bytes=60 * _MIB, reply_bytes=80 * _MIB),
    all=Share(calls=2_048, request_bytes=80 * _MIB, reply_bytes=96 * _MIB),
    patience_s=0.25,  # members' messages are short
)

REPLY_BYTES = {
    "/koinon.v1.KeyValue/BatchGet": 1 * _MIB,
    "/koinon.v1.KeyValue/Scan": 1 * _MIB,
    "/koinon.v1.Bulk/ReadColumns": 4 * _MIB,
    "/koinon.v1.Replication/ReadPage": 2 * _MIB,
    "/koinon.v1.Replication/ReadKeys": 2 * _MIB,
}
"""The assumed bytes of a method's answer until it exists: the usual maximum."""


class RedisEndpoint(NamedTuple):
    """A Redis port for one keyspace: ``host:port`` where the node listens, and where others reach
    it. Port 0: the system chooses one.
    """

    keyspace: str
    listen: str
    advertise: str

    def at_port(self, port: int) -> RedisEndpoint:
        """Return the endpoint with the actual port for others."""
        host, _, known = self.advertise.rpartition(":")
        return self if known != "0" else self._replace(advertise=f"{host}:{port}")


def redis_endpoints(
    listens: Sequence[str], advertises: Sequence[str], host: str, own_host: str
) -> tuple[RedisEndpoint, ...]:
    """Return the endpoints of the flags. Each flag is ``host:port`` for the keyspace ``default``,
    or ``keyspace=host:port``. Without an advertised address others use the port on ``host``. The
    keyspace ``default`` always has a port, the data port, which followers connect to. Without a
    flag the system chooses it, on ``own_host``.

    Raises:
        ConfigurationError: a keyspace has two addresses, has no valid name, or is only advertised.
    """
    listened = _by_keyspace("redis-listen", listens)
    advertised = _by_keyspace("redis-advertise", advertises)
    if strange := min(advertised.keys() - listened.keys(), default=None):
        raise ConfigurationError(
            reason=f"redis-advertise: nothing listens for keyspace {strange!r} (redis-listen)"
        )
    listened = {DEFAULT: f"{own_host}:0", **listened}
    return tuple(
        RedisEndpoint(
            keyspace, listen, advertised.get(keyspace, f"{host}:{listen.rpartition(':')[2]}")
        )
        for keyspace, listen in listened.items()
    )


def _by_keyspace(flag: str, values: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in filter(None, values):
        keyspace, is_named, address = value.rpartition("=")
        if is_named:
            try:
                check_keyspace_name(keyspace)
            except InvalidArgumentError as error:
                raise ConfigurationError(reason=f"{flag} {value}: {error}") from None
        keyspace = keyspace if is_named else DEFAULT
        if keyspace in found:
            raise ConfigurationError(reason=f"{flag}: keyspace {keyspace!r} has two addresses")
        found[keyspace] = address
    return found


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node process. Addresses are ``host:port``. ``weight`` is the node's share of partitions,
    relative to the others'. ``metrics_listen`` '': metrics are served nowhere. ``redis``: where the
    node speaks the Redis protocol, one entry for each keyspace, ``default`` among them. ``pool``:
    the node takes replicas of the keyspaces of this pool. ``pid_file`` holds the process id while
    the node listens at all of its addresses.
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
    redis: tuple[RedisEndpoint, ...] = ()
    resp_proxy: bool = False  # pass Redis clients' commands on to the nodes that serve the keys
    listening: Listening = field(default_factory=Listening)
    audit: Audit = NO_AUDIT
    pid_file: Path | None = None

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
            *(
                pair
                for endpoint in self.redis
                for pair in (
                    ("redis-listen", endpoint.listen),
                    ("redis-advertise", endpoint.advertise),
                )
                if not endpoint.listen.endswith(":0")
            ),
            *(("coordinators", address) for address in self.coordinators),
        ):
            check_address(name, address)

    @property
    def redis_address(self) -> str:
        """The address of the data port: the keyspace ``default`` by the Redis protocol, and streams
        to followers. '' if there is none.
        """
        return next((one.advertise for one in self.redis if one.keyspace == DEFAULT), "")

    @property
    def redis_ports(self) -> tuple[RedisPort, ...]:
        """The Redis ports of the other keyspaces, as others reach them."""
        others = (one for one in self.redis if one.keyspace != DEFAULT)
        return tuple(RedisPort(one.keyspace, one.advertise) for one in others)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a node's queues and steps; beyond them callers get ResourceExhausted."""

    pending_rows: int = 262_144  # of writes that are not complete yet
    pending_bytes: int = 96 * 1024 * 1024
    reading_rows: int = 524_288  # of reads that are admitted and not answered
    reading_bytes: int = 256 * 1024 * 1024  # of unfinished answers of scans and batch reads
    group_rows: int = 16_384  # of one commit group
    group_bytes: int = 16 * 1024 * 1024
    step_rows: int = 4_096  # of a batch, between two yields to the event loop
    step_bytes: int = 2 * 1024 * 1024
    scan_rows: int = 4_096
    scan_bytes: int = 1024 * 1024
    write_timeout_ms: int = 5_000  # for all in-sync replicas; later the write's fate is unknown
    stream_bytes: int = 64 * 1024 * 1024  # sent to a follower and not acknowledged
    page_rows: int = 4_096  # read for one page of a pass
    page_bytes: int = 2 * 1024 * 1024  # of one page, unless the request asks for less
    tombstone_ms: int = 600_000  # the retention time of tombstones
