"""Messages of the command line for errors."""

from __future__ import annotations

import pytest

from koinon.cli.console.session import message_of
from koinon_proto.contract.errors import KoinonError, StorageFullError, UnavailableError


@pytest.mark.parametrize(
    "error", [StorageFullError(node_id="n1", reason="full"), UnavailableError(reason="nobody")]
)
def test_error_is_told_with_the_id_of_its_request_once(error: KoinonError) -> None:
    assert "[request" not in message_of(error)
    error.request_id = "5f0c9a1e-2b"
    assert message_of(error).endswith(" [request 5f0c9a1e-2b]")
    assert message_of(error).count("5f0c9a1e-2b") == 1
