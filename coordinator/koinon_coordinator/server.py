"""The coordinator's process: one gRPC server, one coordinator, and a clean shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from koinon_coordinator.config import CONTROL_LANE, DATA_LANE, MESSAGE_BYTES_MAX, CoordinatorConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.metrics import coordinator_metrics
from koinon_coordinator.raft import RAFT_COMMAND, StreamRaftTransport, TransportConfig
from koinon_coordinator.services.cluster_services import (
    SERVICES,
    MembershipService,
    add_services,
    heartbeat_in,
)
from koinon_coordinator.services.peer_port import FramedMethod, PeerPort
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process import stopping
from koinon_proto.process.pid_file import pid_file
from koinon_proto.security import method_permissions
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.exposure import warn_of_strangers
from koinon_proto.security.trust import Trust
from koinon_proto.server.aio_server import GuardedServer
from koinon_proto.server.framed_greeting import FIRST_HEARTBEAT_BYTES_MAX, HEARTBEATS_COMMAND
from koinon_proto.server.guard import Guard
from koinon_proto.server.metrics_server import MetricsEndpoint
from koinon_proto.server.rpc import (
    SERVER_OPTIONS,
    add_health_and_reflection,
    raise_descriptor_limit,
)
from koinon_proto.v1.raft_pb2 import RaftBatch

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
HELLO_BYTES_MAX = 16 * 1024
_OPTIONS = (
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)


async def serve(config: CoordinatorConfig) -> None:
    """Run a coordinator until SIGTERM, SIGINT or SIGQUIT.

    Raises:
        KoinonError: it cannot start, or cannot go on; the error says why.
    """
    stop = asyncio.Event()
    stopping.on_signal(stop.set, (config.listening.read_again, config.audit.reopen))
    async with running(config) as coordinator:
        signalled = asyncio.ensure_future(stop.wait())
        ended = asyncio.ensure_future(coordinator.stopped())
        await asyncio.wait([signalled, ended], return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if ended.done():
            ended.result()
        ended.cancel()
        log.info("coordinator stopping id=%s", config.member_id)
    log.info("coordinator stopped id=%s", config.member_id)


@contextlib.asynccontextmanager
async def running(config: CoordinatorConfig) -> AsyncIterator[Coordinator]:
    """Start a coordinator with its server; stop both at the end."""
    descriptors = raise_descriptor_limit()
    endpoint = MetricsEndpoint(config.metrics_listen, config.listening)
    transport = StreamRaftTransport(
        config.listening.dialing(), TransportConfig.of(config.timing.raft_heartbeat_ms)
    )
    coordinator = Coordinator(config, transport=transport)
    guard = _guard_of(config, coordinator)
    server = GuardedServer(guard, _OPTIONS)
    members = add_services(coordinator, server, guard.control.trust_host)
    methods = _framed_methods(transport, members)
    peer_port = PeerPort(methods, config.listening, guard.gate, config.audit)
    guard.look_at_callers.append(peer_port.look_at_callers)
    health = await add_health_and_reflection(server, SERVICES)
    try:
        _bind(server, config)
    except ConfigurationError:
        endpoint.close()
        raise
    guard.floods.ports |= config.listening.grpc_ports
    try:
        await peer_port.start(config.peer_address)
        coordinator.peer_port = peer_port.port
        await _start(coordinator, config)
        await server.start()
        endpoint.start(coordinator_metrics(coordinator, guard, taken=peer_port.streams))
        addresses = {
            "--listen": config.listen,
            "--peer-listen": config.peer_address,
            "--metrics-listen": config.metrics_listen,
        }
        coordinator.open_addresses = warn_of_strangers(config.listening, addresses)
        log.info(
            "coordinator started id=%s listen=%s peer_port=%d advertise=%s data=%s descriptors=%d",
            config.member_id,
            config.listen,
            peer_port.port,
            config.advertise,
            config.data,
            descriptors,
        )
        with pid_file(config.pid_file):
            yield coordinator
    finally:
        await asyncio.to_thread(endpoint.close)
        await health.enter_graceful_shutdown()
        await coordinator.stop()
        await peer_port.stop()
        await server.stop(STOP_GRACE_S)
        config.listening.close()
        await asyncio.to_thread(config.audit.close)


def _guard_of(config: CoordinatorConfig, coordinator: Coordinator) -> Guard:
    gate = Authenticator(
        lambda: coordinator.access,
        takes_tls=config.listening.takes_tls,
        trust=Trust(config.listening.bundle),
        table=lambda: coordinator.table(),
    )
    return Guard(DATA_LANE, CONTROL_LANE, gate=gate, audit=config.audit)


def _framed_methods(
    transport: StreamRaftTransport, members: MembershipService
) -> dict[bytes, FramedMethod]:
    """Return the methods of the peer port, by the command that opens a stream."""
    return {
        RAFT_COMMAND: FramedMethod(
            path=method_permissions.RAFT_MESSAGES,
            parse=RaftBatch.FromString,
            serve=transport.serve_stream,
            first_bytes_max=HELLO_BYTES_MAX,
            message_bytes_max=MESSAGE_BYTES_MAX,
        ),
        HEARTBEATS_COMMAND: FramedMethod(
            path=method_permissions.HEARTBEATS,
            parse=heartbeat_in,
            serve=members.serve_heartbeats,
            first_bytes_max=FIRST_HEARTBEAT_BYTES_MAX,
            message_bytes_max=MESSAGE_BYTES_MAX,
            received_bytes_max=FIRST_HEARTBEAT_BYTES_MAX,
        ),
    }


def _bind(server: GuardedServer, config: CoordinatorConfig) -> None:
    """Raise ConfigurationError if the address cannot be bound."""
    try:
        config.listening.add_port(server, config.listen)
    except RuntimeError as error:
        raise ConfigurationError(
            reason=f"listen {config.listen}: cannot be bound ({error})"
        ) from error


async def _start(coordinator: Coordinator, config: CoordinatorConfig) -> None:
    """Start the coordinator. A directory that the system refuses is reported like a damaged one."""
    try:
        await coordinator.start()
    except OSError as error:
        raise DataDirectoryError(
            path=str(error.filename or config.data), reason=error.strerror or str(error)
        ) from error
