"""The compared systems, and the failures that an acknowledged put of each survives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class System:
    """One column. Systems with the same ``servers`` share them; ``kind`` is the client's."""

    name: str
    servers: str
    kind: str
    durability: str
    options: dict[str, Any] = field(default_factory=dict)  # of the client


_ONE, _THREE, _GRPC = "sync on one node", "sync on three nodes", {"transport": "grpc"}
_AOF = "appendfsync always on one server"
SYSTEMS = {
    name: System(name=name, servers=servers, kind=kind, durability=durability, options=options)
    for name, servers, kind, durability, options in (
        ("k1", "koinon-1", "koinon", _ONE, {}),
        ("k3", "koinon-3", "koinon", _THREE, {}),
        ("k1-grpc", "koinon-1", "koinon", f"{_ONE}, over gRPC", _GRPC),
        ("k3-grpc", "koinon-3", "koinon", f"{_THREE}, over gRPC", _GRPC),
        ("k1-tls", "koinon-tls", "koinon", f"{_ONE}, TLS", {}),
        ("guest", "koinon-guest", "redis", f"{_ONE}, redis-py on Koinon", {}),
        ("redis", "redis", "redis", "memory of one server", {}),
        ("aof", "redis-aof", "redis", _AOF, {}),
        ("wait", "redis-wait", "redis", f"{_AOF}, and memory of a replica (WAIT 1)", {"wait": 1}),
        ("etcd", "etcd", "etcd", "sync on two of three servers", {}),
    )
}
DEFAULT = tuple(name for name in SYSTEMS if name != "k1-tls")
