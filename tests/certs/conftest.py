"""An authority, and identities of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from koinon.certs.authority import Authority, Identity
from koinon_proto.security.names import Kind

NOW = datetime.now(UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", now=NOW)


def issued(
    authority: Authority,
    kind: Kind,
    name: str = "",
    *,
    days: int = 825,
    now: datetime = NOW,
    hosts: tuple[str, ...] = (),
) -> Path:
    """Return a new identity file beside the authority."""
    identity = Identity(kind=kind, name=name, hosts=hosts)
    path = authority.directory / identity.file_name
    authority.issue(identity, path, now=now, days=days)
    return path
