"""Free addresses on this machine: no process listens at them, and no other test is given them."""

from __future__ import annotations

from collections import deque

from koinon.local import cluster_files as files

_KEPT_MAX = 100
_kept: deque[files.PortClaims] = deque()
"""Claims of the last ones: their servers may start late, or again."""


def free_addresses(count: int) -> list[str]:
    """Return so many, all different. Their ports are none that the system gives to outgoing
    connections: such a one may be in use when a server wants it.
    """
    claims = files.PortClaims()
    _kept.append(claims)
    if len(_kept) > _KEPT_MAX:
        _kept.popleft().release()
    return files.choose_addresses(count, 0, claims=claims)


def free_address() -> str:
    return free_addresses(1)[0]
