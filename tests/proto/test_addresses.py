"""Addresses: what is one, and who says so how."""

from __future__ import annotations

import pytest

from koinon_proto.contract.addresses import check_address, is_address
from koinon_proto.contract.errors import ConfigurationError


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "10.0.0.1:65535", "node-1.a_b.example:07400", "[::1]:7400", "[fe80::1%eth0]:1"],
)
def test_address_of_a_name_or_a_number_passes(address: str) -> None:
    assert is_address(address)
    check_address("listen", address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        ":7400",
        "h:",
        "h:0",
        "h:65536",
        "h:-1",
        "h:+1",
        "h: 1",
        "h:1\n",
        "h:1_0",
        "h:²",
        "h:٣",
        "h:" + "1" * 5_000,  # more digits than int() takes
        "h" * 254 + ":1",
        "two words:1",
        "::1:7400",  # without brackets it is not clear where the port begins
        "[::1]",
        "[]:1",
        "[h]:1",
        "http://h:1",
    ],
)
def test_address_of_another_shape_is_a_configuration_error_naming_the_field(address: str) -> None:
    assert not is_address(address)
    with pytest.raises(ConfigurationError, match=r"^listen '"):
        check_address("listen", address)
