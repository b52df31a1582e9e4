"""Checks the numbers of messages that enter a process against the bounds of the .proto files.

``check`` is for requests (``rpc.typed_errors`` calls it) and the messages of streams,
``check_reply`` for a server's replies. ``v1/options.proto`` has the bounds and their reasons.
Enumerations have none: the code that reads an enumeration decides what an unknown value means.
"""

from __future__ import annotations

from google.protobuf.message import Message

from koinon_proto.contract.bounds_gen import CHECKS
from koinon_proto.contract.errors import InvalidArgumentError, UnavailableError


def check(message: Message) -> None:
    """Check every number of the message, also in nested messages.

    Raises:
        InvalidArgumentError: a number is beyond its bound; the field is named.
    """
    check_numbers = CHECKS.get(message.DESCRIPTOR.full_name)
    if check_numbers is not None:
        check_numbers(message)


def check_reply(message: Message) -> None:
    """Check a server's reply, as ``check`` does.

    Raises:
        UnavailableError: a number is beyond its bound; another server may answer.
    """
    try:
        check(message)
    except InvalidArgumentError as error:
        name = message.DESCRIPTOR.name
        raise UnavailableError(reason=f"an answer makes no sense: {name}: {error}") from error
