"""A coordinator's settings, with checks across fields at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from koinon_coordinator.core.decide.admin_requests import REPLICATION_FACTOR_MAX
from koinon_coordinator.core.decide.host_commands import HostingTimes
from koinon_coordinator.core.decide.sessions import SessionTimes
from koinon_proto.contract.addresses import check_address, check_name
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.keyspaces import half_of
from koinon_proto.contract.table import (
    MAX_BATCH_BYTES,
    ClusterConfig,
    partition_count_fault,
)
from koinon_proto.partitioner import canonical_name, partitioner
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.transport import Listening
from koinon_proto.server.admission import LaneLimits, Share

_MIB = 1024 * 1024
MESSAGE_BYTES_MAX = 8 * _MIB
"""The gRPC message bound of a coordinator: several times its largest command."""
# A request or an answer takes about 2.3 times its size in memory. The sum of these limits is below
# 400 MB; a coordinator's container has 512 MiB.
DATA_LANE = LaneLimits(
    connection=Share(calls=256, request_bytes=16 * _MIB, reply_bytes=8 * _MIB),
    host=Share(calls=1_024, request_bytes=32 * _MIB, reply_bytes=24 * _MIB),
    all=Share(calls=2_048, request_bytes=40 * _MIB, reply_bytes=32 * _MIB),
    message_bytes=MESSAGE_BYTES_MAX,
)
CONTROL_LANE = LaneLimits(
    connection=Share(calls=256, request_bytes=24 * _MIB, reply_bytes=8 * _MIB),
    host=Share(calls=1_024, request_bytes=48 * _MIB, reply_bytes=24 * _MIB),
    all=Share(calls=2_048, request_bytes=64 * _MIB, reply_bytes=32 * _MIB),
    message_bytes=MESSAGE_BYTES_MAX,
    patience_s=0.25,  # members' messages are short
)
REPLICATION_FACTOR_DEFAULT = 3  # where there are nodes enough
REPLICATED_TIMES = (
    "heartbeat_interval_ms",
    "session_timeout_ms",
    "lease_ms",
    "check_quorum_ms",
    "replica_timeout_ms",
    "rereplicate_after_ms",
)
_FEW_COPIES = {
    1: "every partition has one copy: it cannot be served while its node is down, and is lost with "
    "that node's disk. Bootstrap with three nodes for three copies, or add nodes and raise it",
    2: "every partition has two copies: one node may fail, and writes then go on with a single "
    "copy, which is all there is. Bootstrap with three nodes for three copies, or add one and "
    "raise it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingConfig:
    """The times of leases (which their safety depends on), of replication, and of Raft.

    ``REPLICATED_TIMES`` are replicated when the cluster is created: leaders with different session
    times could each judge their own leases correctly, and misjudge another leader's.
    ``rereplicate_after_ms`` 0: a node that stays away keeps its replicas.
    """

    heartbeat_interval_ms: int = 200
    session_timeout_ms: int = 1500
    lease_ms: int = 1000
    check_quorum_ms: int = 400
    replica_timeout_ms: int = 1000
    rereplicate_after_ms: int = 600_000
    election_timeout_ms: int = 300
    raft_heartbeat_ms: int = 75

    def __post_init__(self) -> None:
        for name in TimingConfig.__slots__:
            value, least = getattr(self, name), 0 if name == "rereplicate_after_ms" else 1
            _require(value >= least, f"{_flag(name)} {value} must be at least {least}")
        self._require_below("heartbeat_interval_ms", "lease_ms")
        self._require_below("lease_ms", "session_timeout_ms")
        self._require_below("raft_heartbeat_ms", "election_timeout_ms")
        total = self.check_quorum_ms + self.lease_ms
        _require(
            total < self.session_timeout_ms,
            f"check-quorum-ms {self.check_quorum_ms} + lease-ms {self.lease_ms} = {total} "
            f"must be below session-timeout-ms {self.session_timeout_ms}",
        )
        _require(
            2 * self.raft_heartbeat_ms < self.check_quorum_ms,
            f"twice raft-heartbeat-ms {self.raft_heartbeat_ms} must be below "
            f"check-quorum-ms {self.check_quorum_ms}",
        )

    def _require_below(self, low: str, high: str) -> None:
        low_ms, high_ms = getattr(self, low), getattr(self, high)
        _require(low_ms < high_ms, f"{_flag(low)} {low_ms} must be below {_flag(high)} {high_ms}")

    @property
    def tick_s(self) -> float:
        """Seconds between ticks. Two ticks pass between the end of a session and the fence, a part
        of every failover.
        """
        return min(self.heartbeat_interval_ms / 4, 20) / 1000

    @property
    def resting_tick_s(self) -> float:
        """Seconds between ticks while no session is about to end: short enough that two late ticks
        do not look like a pause of this process.
        """
        return max(self.tick_s, 0.4 * self.session_times().pause_s)

    def session_times(self) -> SessionTimes:
        return SessionTimes(
            heartbeat_interval_s=self.heartbeat_interval_ms / 1000,
            session_timeout_s=self.session_timeout_ms / 1000,
            lease_s=self.lease_ms / 1000,
            check_quorum_s=self.check_quorum_ms / 1000,
            pause_s=max(5 * self.tick_s, 1.25 * self.heartbeat_interval_ms / 1000),
        )

    def in_force(self, cluster: ClusterConfig) -> TimingConfig:
        """Return these times with the replicated times put in.

        Raises:
            ConfigurationError: the replicated times contradict this member's own times.
        """
        return replace(self, **{name: getattr(cluster, name) for name in REPLICATED_TIMES})

    def hosting_times(self) -> HostingTimes:
        return HostingTimes(
            first_retry_s=2 * self.heartbeat_interval_ms / 1000,
            last_retry_s=20 * self.heartbeat_interval_ms / 1000,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BootstrapConfig:
    """The settings with which the first leader of a new group creates the cluster. They are then
    replicated.

    ``replication_factor`` None: as many copies as there are nodes at bootstrap, three at most.
    ``partitioner`` may include a router, or ``router`` names it; after construction ``partitioner``
    includes it.
    """

    bootstrap_nodes: int = 1
    replication_factor: int | None = None
    partition_count: int = 1024
    partitioner: str = "murmur2"
    router: str = ""
    max_value_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        named = canonical_name(self.partitioner, self.router)
        object.__setattr__(self, "partitioner", named)
        fault = partition_count_fault(named, self.partition_count)
        _require(not fault, f"partitions {self.partition_count} {fault}")
        _require(self.bootstrap_nodes >= 1, f"bootstrap-nodes {self.bootstrap_nodes} must be >= 1")
        _require(
            1 <= self.copies <= REPLICATION_FACTOR_MAX,
            f"replication-factor {self.copies} must be from 1 to {REPLICATION_FACTOR_MAX}",
        )
        _require(
            self.copies <= self.bootstrap_nodes,
            f"replication-factor {self.copies} is above bootstrap-nodes {self.bootstrap_nodes}",
        )
        _require(
            1 <= self.max_value_bytes <= MAX_BATCH_BYTES // 2,
            f"max-value-bytes {self.max_value_bytes} must be from 1 to {MAX_BATCH_BYTES // 2}, "
            "half of the bound of a batch",
        )

    @property
    def copies(self) -> int:
        """The replication factor, chosen or by default."""
        if self.replication_factor is not None:
            return self.replication_factor
        return min(REPLICATION_FACTOR_DEFAULT, self.bootstrap_nodes)

    def few_copies_warning(self) -> str:
        """Return a warning about too few copies; '' if there are enough or the operator chose the
        number.
        """
        return "" if self.replication_factor is not None else _FEW_COPIES.get(self.copies, "")

    def cluster(self, cluster_id: str, timing: TimingConfig) -> ClusterConfig:
        """Return the replicated form. At least half of the replicas, rounded up, must be in
        sync.
        """
        return ClusterConfig(
            cluster_id=cluster_id,
            partitioner=self.partitioner,
            partitioner_fingerprint=partitioner(self.partitioner, 1).fingerprint,
            partition_count=self.partition_count,
            replication_factor=self.copies,
            min_in_sync=half_of(self.copies),
            bootstrap_nodes=self.bootstrap_nodes,
            max_value_bytes=self.max_value_bytes,
            **{name: getattr(timing, name) for name in REPLICATED_TIMES},
        )

    def differences(
        self, timing: TimingConfig, replicated: ClusterConfig
    ) -> dict[str, tuple[object, object]]:
        """Return the settings that differ from the replicated ones, as (own, replicated).

        An operator may have changed the replication factor: it is compared only if it was given.
        """
        ours = self.cluster(replicated.cluster_id, timing)
        changeable = {"min_in_sync"}
        if ours.partitioner != replicated.partitioner or not replicated.partitioner_fingerprint:
            changeable.add("partitioner_fingerprint")  # the name says it, or it was not recorded
        if self.replication_factor is None:
            changeable.add("replication_factor")
        return {
            name: (getattr(ours, name), getattr(replicated, name))
            for name in ClusterConfig.__slots__
            if name not in changeable and getattr(ours, name) != getattr(replicated, name)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """One coordinator process.

    ``members`` are the first voters of a new group, including this coordinator; empty to join an
    existing group (or to restart a coordinator, whose data directory knows the members).
    ``metrics_listen`` '': no metrics are served. ``peer_listen`` is the address for Raft's messages
    and nodes' heartbeats; '': the host of ``listen`` with a port that the system chooses.
    ``pid_file`` holds the process id while the coordinator listens.
    """

    member_id: str
    listen: str
    advertise: str
    data: Path
    members: Mapping[str, str] = field(default_factory=dict)
    join: bool = False
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    metrics_listen: str = ""
    peer_listen: str = ""
    listening: Listening = field(default_factory=Listening)
    audit: Audit = NO_AUDIT
    pid_file: Path | None = None

    def __post_init__(self) -> None:
        check_name("id", self.member_id)
        check_address("listen", self.listen)
        check_address("advertise", self.advertise)
        if self.metrics_listen:
            check_address("metrics-listen", self.metrics_listen)
        if self.peer_listen:
            check_address("peer-listen", self.peer_listen)
        if self.join:
            _require(not self.members, "--join and --members exclude each other")
            return
        _require(
            bool(self.members),
            "either --members (a fresh group, this member among them) or --join is needed",
        )
        for member_id, address in self.members.items():
            check_name("members", member_id)
            check_address("members", address)
        _require(
            len(self.members) % 2 == 1,
            f"members: {len(self.members)} coordinators tolerate no more failures than "
            f"{len(self.members) - 1}; their number must be odd",
        )
        _require(
            len(set(self.members.values())) == len(self.members),
            "members: two coordinators have the same address",
        )
        own = self.members.get(self.member_id)
        _require(own is not None, f"id {self.member_id!r} is not among --members")
        _require(
            own == self.advertise,
            f"--members says {own} for {self.member_id!r}, it advertises {self.advertise}",
        )

    @property
    def peer_address(self) -> str:
        """The address of the peer port; port 0: the system chooses one."""
        return self.peer_listen or f"{self.listen.rpartition(':')[0]}:0"


def parse_members(text: str) -> dict[str, str]:
    """Return ``{id: address}`` of ``c1=host:port,c2=host:port``.

    Raises:
        ConfigurationError: an item is not id=host:port, or an id appears twice.
    """
    members: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        member_id, separator, address = item.partition("=")
        _require(bool(separator), f"members: {item!r} is not id=host:port")
        _require(member_id not in members, f"members: {member_id!r} is named twice")
        members[member_id] = address
    return members


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ConfigurationError(reason=reason)
