"""Looks of a leader at an address before it adds a coordinator there."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest

from koinon_coordinator.coordinator import check_listens
from koinon_proto.contract.cluster_errors import MembershipChangeError


@pytest.mark.parametrize(
    ("address", "why", "timeout_s"),
    [("127.0.0.1:9", "connection refused", 0.5), ("a..b:7400", "label empty", 60.0)],  # at once
)
def test_address_where_nothing_can_listen_is_refused_with_the_reason(
    address: str, why: str, timeout_s: float
) -> None:
    said = rf"nothing listens at {re.escape(address)} \(.*{why}.*start c9 there with --join"
    with pytest.raises(MembershipChangeError, match=said):
        asyncio.run(check_listens("c9", address, timeout_s))


def test_address_where_something_listens_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(check_listens("c9", f"127.0.0.1:{server.getsockname()[1]}", 60.0))
