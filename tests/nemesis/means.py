"""Finds out what this machine lets the nemesis do: each means is tried once, and named.

``missing`` is what is said of a fault that is left out. Nothing stays behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.nemesis.disks import Disk

NAMESPACES, FILTER, NETEM, NARROW, MOUNTS = "netns", "nft", "netem", "tbf", "loop mounts"
FREEZE, SHUTDOWN, TIME = "fsfreeze", "ext4 shutdown", "time namespaces"
_QDISC = ("tc", "qdisc", "add", "dev", "lo", "root")


@functools.cache
def missing(means: str) -> str:
    """Return why the means is not there; "" if it is."""
    if os.geteuid() != 0:
        return "needs root"
    return _PROBES[means]()


def _runs(*command: str, text: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"{' '.join(command[:3])}: {said[0] if said else f'exit code {done.returncode}'}"


def _namespaces() -> str:
    name = f"kmeans{os.getpid()}"
    why = _runs("ip", "netns", "add", name)
    if not why:
        why = _runs("nsenter", f"--net=/run/netns/{name}", "true")
        _runs("ip", "netns", "del", name)
    return why


def _in_a_namespace(*command: str, text: str | None = None) -> str:
    name = f"kmeans{os.getpid()}"
    if why := _namespaces():
        return why
    _runs("ip", "netns", "add", name)
    try:
        return _runs("nsenter", f"--net=/run/netns/{name}", *command, text=text)
    finally:
        _runs("ip", "netns", "del", name)


def _filter() -> str:
    if shutil.which("nft") is None:
        return "nft is not installed"
    rules = "table ip probe {\nchain input {\ntype filter hook input priority 0\n"
    rules += "ip saddr { 10.0.0.1 } drop\nnumgen random mod 100 < 5 drop\n}\n}\n"
    return _in_a_namespace("nft", "-f", "-", text=rules)


def _netem() -> str:
    return _in_a_namespace(*_QDISC, "netem", "delay", "5ms")


def _narrow() -> str:
    limits = ("rate", "1mbit", "burst", "10kb", "latency", "500ms")
    return _in_a_namespace(*_QDISC, "tbf", *limits)


def _on_a_disk(use: Callable[[Disk], None]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory), "probe")
        try:
            disk.make()
            use(disk)
        except (OSError, subprocess.CalledProcessError) as error:
            return str(getattr(error, "stderr", None) or error).strip()
        finally:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                disk.unmount()
    return ""


def _freeze(disk: Disk) -> None:
    disk.freeze()
    disk.thaw()


_PROBES: dict[str, Callable[[], str]] = {
    NAMESPACES: _namespaces,
    FILTER: _filter,
    NETEM: _netem,
    NARROW: _narrow,
    MOUNTS: lambda: _on_a_disk(lambda disk: None),
    FREEZE: lambda: _on_a_disk(_freeze),
    TIME: lambda: _runs("unshare", "--time", "--boottime", "90", "--monotonic", "90", "true"),
    SHUTDOWN: lambda: _on_a_disk(Disk.shut_down),
}
