"""Only the modules of security open ports, or channels to other processes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENING = re.compile(
    r"\b(insecure_channel|secure_channel|add_insecure_port|add_secure_port|create_connection"
    r"|create_server|start_server|open_connection)\("
)
ELSEWHERE = {
    "coordinator/koinon_coordinator/coordinator.py": "looks whether an address is listened at",
    "client/koinon/driver/rpc/reachability.py": "looks why a server cannot be talked to",
    "client/koinon/web_console/web_server.py": "serves browsers, by rules of its own (gate.py)",
}
"""Other modules that do, and why."""


def test_ports_and_channels_are_opened_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("proto", "coordinator", "node", "client")
        for path in (ROOT / package).rglob("*.py")
        if not path.name.endswith("_pb2_grpc.py") and OPENING.search(path.read_text("utf-8"))
    }
    assert {name for name in found if not name.startswith("proto/koinon_proto/security/")} == set(
        ELSEWHERE
    )


ASKING = re.compile(r"\bpermissions\.(allows|first_refused|in_keyspace)|\bin_keyspace\(")


def test_permissions_are_asked_in_one_place() -> None:
    """There each check is given the keyspace that the keys lie in."""
    found = {
        str(path.relative_to(ROOT))
        for package in ("proto", "coordinator", "node")
        for path in (ROOT / package).rglob("*.py")
        if ASKING.search(path.read_text("utf-8"))
    }
    assert found == {
        "proto/koinon_proto/security/authorization.py",
        "proto/koinon_proto/contract/access.py",  # which defines it
    }
