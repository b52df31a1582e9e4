"""The settings of a node's store, for the node and its writer process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from koinon_proto.contract.errors import ConfigurationError

Durability = Literal["commit", "interval"]

MIN_MAP_SIZE_BYTES = 1024 * 1024
DEFAULT_MAP_SIZE_BYTES = 64 * 1024**3
KEPT_BYTES = 64 * 1024 * 1024
"""Freed memory that each process of a node keeps: a few commit groups."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The directory that a node stores in, and how it stores.

    ``map_size_bytes`` is what puts may fill. The file is sparse and may grow an eighth (at least
    32 MiB) beyond it: that room is kept for deletes and metadata. ``write_ahead_log``: writes are
    made durable in a log in front of the store.
    """

    directory: Path
    map_size_bytes: int = DEFAULT_MAP_SIZE_BYTES
    durability: Durability = "commit"
    sync_interval_ms: int = 100
    write_ahead_log: bool = False

    def __post_init__(self) -> None:
        if self.map_size_bytes < MIN_MAP_SIZE_BYTES:
            raise ConfigurationError(
                reason=f"map-size-bytes {self.map_size_bytes}: "
                f"must be at least {MIN_MAP_SIZE_BYTES}"
            )
        if self.durability not in ("commit", "interval"):
            raise ConfigurationError(
                reason=f"durability {self.durability!r}: must be commit or interval"
            )
        if not 1 <= self.sync_interval_ms <= 60_000:
            raise ConfigurationError(
                reason=f"sync-interval-ms {self.sync_interval_ms}: must be 1 to 60000"
            )

    @property
    def mapped_bytes(self) -> int:
        """The size of the memory map: the part that puts may fill, and the reserve."""
        return self.map_size_bytes + max(self.map_size_bytes // 8, 32 * 1024 * 1024)
