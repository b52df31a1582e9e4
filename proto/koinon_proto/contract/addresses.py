"""Checks addresses and names: one rule for settings, for requests, for certificates and for the
client's ``connect``.
"""

from __future__ import annotations

import re

from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError

NAME_CHARS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADDRESS = re.compile(
    r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,15})?\]):([0-9]{1,5})"
)


def is_address(address: str) -> bool:
    """Return whether the text is ``host:port``: a name, an IPv4 address or a bracketed IPv6
    address, and a port from 1 to 65535 in ASCII digits.
    """
    match = _ADDRESS.fullmatch(address)
    return match is not None and 1 <= int(match[1]) <= 65_535


def check_address(field: str, address: str) -> None:
    """Check a setting.

    Raises:
        ConfigurationError: it is not an address; ``field`` names the setting.
    """
    if not is_address(address):
        raise ConfigurationError(
            reason=f"{field} {address!r}: must be host:port, an IPv6 host in brackets, "
            "the port from 1 to 65535"
        )


def is_name(name: str) -> bool:
    """Return whether the text can name a process or a user: letters, digits, ``.``, ``_`` and
    ``-``.
    """
    return len(name) <= NAME_CHARS_MAX and _NAME.fullmatch(name) is not None


def check_name(field: str, name: str) -> None:
    """Raise InvalidArgumentError unless ``name`` can name a process or a user."""
    if len(name) > NAME_CHARS_MAX:
        raise InvalidArgumentError(
            field=field, reason="too long", limit=NAME_CHARS_MAX, actual=len(name)
        )
    if not is_name(name):
        raise InvalidArgumentError(
            field=field, reason=f"{name!r} must be letters, digits, '.', '_' or '-'"
        )
