"""Addresses on this machine that nobody listens at."""

from __future__ import annotations

import contextlib
import socket


def free_addresses(count: int) -> list[str]:
    """Return so many, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def free_address() -> str:
    return free_addresses(1)[0]
