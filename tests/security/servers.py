"""A coordinator and a node with TLS, of a test's own, in threads' event loops of one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from koinon.certs.authority import Authority, Identity
from koinon.operate.admin import Admin
from koinon_coordinator.config import BootstrapConfig, CoordinatorConfig, TimingConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.decide.load_requests import LoadWish
from koinon_coordinator.server import running
from koinon_node.config import NodeConfig, RedisEndpoint
from koinon_node.node import Node
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.access import Access
from koinon_proto.contract.bulk_loads import LoadMode
from koinon_proto.contract.keyspaces import DEFAULT, Keyspace, KeyspaceId
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import Dialing, Listening, Mode, listening
from tests.kit.addresses import free_addresses
from tests.kit.waiting import wait_until

PARTITIONS = 8
PATIENT = TimingConfig(lease_ms=10_000, session_timeout_ms=15_000)
"""What is asked without trying again is to find a lease, on a busy machine too."""


class Identities:
    """An authority, and identity files of it, made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority.create(directory / "ca", now=datetime.now(UTC))

    def file(self, kind: Kind, name: str = "", *, days: int = 825) -> Path:
        identity = Identity(kind=kind, name=name)
        path = self.directory / identity.file_name
        if not path.exists():
            self.authority.issue(identity, path, now=datetime.now(UTC), days=days)
        return path

    def dialing(self, kind: Kind, name: str = "", token: str = "") -> Dialing:
        return Dialing(BundleFile(self.file(kind, name)), token)

    def listening(self, kind: Kind, name: str, mode: Mode = Mode.REQUIRE) -> Listening:
        return listening(mode, str(self.file(kind, name)), kind)


class Servers:
    """c1 and n1, one loop for both. Addresses: ``coordinator``, ``node``, ``redis``."""

    def __init__(
        self,
        directory: Path,
        identities: Identities,
        audit: Audit = NO_AUDIT,
        coordinators_audit: Audit = NO_AUDIT,
    ) -> None:
        self.identities = identities
        self.coordinator, self.node, self.redis = free_addresses(3)
        self._configs = (
            CoordinatorConfig(
                member_id="c1",
                listen=self.coordinator,
                advertise=self.coordinator,
                data=directory / "c1",
                members={"c1": self.coordinator},
                bootstrap=BootstrapConfig(partition_count=PARTITIONS),
                timing=PATIENT,
                listening=identities.listening(Kind.COORDINATOR, "c1"),
                audit=coordinators_audit,
            ),
            NodeConfig(
                node_id="n1",
                listen=self.node,
                advertise=self.node,
                coordinators=(self.coordinator,),
                store=StoreConfig(directory=directory / "n1", map_size_bytes=16 << 20),
                redis=(RedisEndpoint(DEFAULT, self.redis, self.redis),),
                listening=identities.listening(Kind.NODE, "n1"),
                audit=audit,
            ),
        )
        self.process_of_node: Node | None = None
        self.process_of_coordinator: Coordinator | None = None
        self.access = Access()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="servers")

    def bundles(self) -> list[BundleFile]:
        """Return the identities of both."""
        return [config.listening.bundle for config in self._configs if config.listening.bundle]

    def start(self) -> None:
        """Return once the node serves."""
        self._thread.start()

        def serves() -> bool:
            if self._failure is not None:
                raise self._failure
            node = self.process_of_node
            return node is not None and node.state.serving() and any(node.state.served.led)

        wait_until(serves, "the node to serve")

    def create_keyspace(self, name: str, partition_count: int) -> Keyspace:
        """Create a keyspace as root; return once the node serves all of it."""
        root = self.identities.dialing(Kind.USER, "root")
        with Admin(self.coordinator, dialing=root, timeout_ms=30_000) as admin:
            made = admin.keyspaces.create(name, partition_count=partition_count).keyspace
        node = self.process_of_node
        assert node is not None
        wait_until(
            lambda: {*made.partition_ids} <= {*np.flatnonzero(node.state.served.epochs).tolist()},
            "the node to serve the keyspace",
        )
        return made

    def open_load(self, job_id: str, keyspace_id: KeyspaceId) -> int:
        """Open a load that has no owner, as without users; return once the node knows it."""
        node, coordinator = self.process_of_node, self.process_of_coordinator
        assert node is not None
        assert coordinator is not None
        wish = LoadWish(job_id=job_id, mode=LoadMode.APPEND, keyspace_id=keyspace_id)

        async def opened() -> int:
            return (await coordinator.serving.loading.open(wish, "")).load_id

        load_id = asyncio.run_coroutine_threadsafe(opened(), self._loop).result(timeout=60)
        wait_until(
            lambda: any(load.load_id == load_id for load in node.state.table().loads),
            "the node to know the load",
        )
        return load_id

    def stop(self) -> None:
        if self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def set_access(self, access: Access) -> None:
        """Have both go by this access state."""
        node, coordinator = self.process_of_node, self.process_of_coordinator
        assert node is not None
        assert coordinator is not None
        coordinator.state._data.access = access.state  # as a command would
        node.state.access = self.access = access

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as failure:
            self._failure = failure

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        coordinator, node = self._configs
        async with running(coordinator) as self.process_of_coordinator:
            self.process_of_node = Node(node)
            serving = asyncio.create_task(self.process_of_node.run())
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
            self.process_of_node.stop()
            await serving


@contextmanager
def serving(
    directory: Path, audit: Audit = NO_AUDIT, coordinators_audit: Audit = NO_AUDIT
) -> Iterator[Servers]:
    """Run the servers inside the block; ``audit`` is the node's."""
    servers = Servers(directory, Identities(directory / "identities"), audit, coordinators_audit)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
