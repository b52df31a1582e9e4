"""The options of a client at ``connect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from koinon_proto.contract.addresses import check_address
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MAX_BATCH_BYTES, MAX_BATCH_ROWS

Transport = Literal["auto", "grpc"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Settings of one client; checked at construction."""

    timeout_ms: int = 5_000
    """The deadline of every call that names none of its own."""
    retry_unknown: bool = False
    """Repeat unconditional writes whose fate is unknown, instead of raising."""
    max_pending: int = 20_000
    """Single operations under way or queued at once; beyond, ResourceExhaustedError at once."""
    batch_rows: int = 2_000
    """Rows of a ``*_many`` call that go to one node in one request."""
    batch_bytes: int = 4 * 1024 * 1024
    """Bytes of keys and values in one request."""
    batches_in_flight: int = 8
    """Chunks of one ``*_many`` call under way at once."""
    singles_in_flight: int = 1
    """Batches of coalesced single operations under way at once, per node and direction, where they
    go over gRPC.
    """
    transport: Transport = "auto"
    """How single operations go: over RESP where the node offers that, else over gRPC (``"auto"``);
    or always over gRPC. All else goes over gRPC.
    """

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            names = " or ".join(repr(name) for name in TRANSPORTS)
            raise ConfigurationError(reason=f"transport {self.transport!r}: must be {names}")
        for name in ("timeout_ms", "max_pending", "batches_in_flight", "singles_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"{name} {getattr(self, name)}: must be above 0")
        if not 1 <= self.batch_rows <= MAX_BATCH_ROWS:
            raise ConfigurationError(
                reason=f"batch_rows {self.batch_rows}: must be 1 to {MAX_BATCH_ROWS}"
            )
        if not 1 <= self.batch_bytes <= MAX_BATCH_BYTES:
            raise ConfigurationError(
                reason=f"batch_bytes {self.batch_bytes}: must be 1 to {MAX_BATCH_BYTES}"
            )


def parse_addresses(coordinators: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses in ``"host:port,host:port"``, or in a sequence of such.

    Raises:
        ConfigurationError: none is given, or one is not host:port.
    """
    parts = coordinators.split(",") if isinstance(coordinators, str) else list(coordinators)
    addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not addresses:
        raise ConfigurationError(reason="no coordinator address given; expected host:port")
    for address in addresses:
        check_address("address", address)
    return addresses
