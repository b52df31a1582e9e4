"""Checks the numbers of messages that enter a process against the bounds of the .proto files.

``check`` is for what comes from outside: requests, as ``rpc.typed_errors`` takes them, and the
messages of streams. ``check_reply`` is for what a server answered. ``v1/options.proto`` has the
bounds and their reasons. Enumerations have none: the code that reads one says what an unknown value
means.
"""

from __future__ import annotations

from google.protobuf.message import Message

from koinon_proto.contract.bounds_gen import CHECKS
from koinon_proto.contract.errors import InvalidArgumentError, UnavailableError


def check(message: Message) -> None:
    """Check every number of the message, those of the messages in it included.

    Raises:
        InvalidArgumentError: a number is beyond its bound; the field is named.
    """
    check_numbers = CHECKS.get(message.DESCRIPTOR.full_name)
    if check_numbers is not None:
        check_numbers(message)


def check_reply(message: Message) -> None:
    """Check what a server answered, as ``check`` does.

    Raises:
        UnavailableError: a number is beyond its bound; another server may answer.
    """
    try:
        check(message)
    except InvalidArgumentError as error:
        name = message.DESCRIPTOR.name
        raise UnavailableError(reason=f"an answer makes no sense: {name}: {error}") from error
