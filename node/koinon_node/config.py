"""The settings of a node process, checked against one another."""

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
"""The bytes that a method's answer counts as until it is there: the most that is usual."""


class RedisEndpoint(NamedTuple):
    """A port that serves clients of Redis in one keyspace, which it names: ``host:port`` as the
    node listens there, and as others reach it. Port 0 is one that the system chooses.
    """

    keyspace: str
    listen: str
    advertise: str

    def at_port(self, port: int) -> RedisEndpoint:
        """Return the endpoint as others reach it once it listens at this port."""
        host, _, known = self.advertise.rpartition(":")
        return self if known != "0" else self._replace(advertise=f"{host}:{port}")


def redis_endpoints(
    listens: Sequence[str], advertises: Sequence[str], host: str, own_host: str
) -> tuple[RedisEndpoint, ...]:
    """Return what the flags say, of which each is ``host:port`` for the keyspace ``default``, or
    ``keyspace=host:port``. What is not advertised is found at its port on ``host``. The keyspace
    ``default`` always has a port, which other nodes follow this one by: the data port. Without a
    flag the system chooses it, on ``own_host``.

    Raises:
        ConfigurationError: a keyspace comes twice, is no name of one, or is advertised only.
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
    resp_proxy: bool = False  # pass commands of Redis's clients on to the nodes that serve the keys
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
        """The ports at which others reach the other keyspaces by the Redis protocol."""
        others = (one for one in self.redis if one.keyspace != DEFAULT)
        return tuple(RedisPort(one.keyspace, one.advertise) for one in others)


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
