"""Parses a node's RESP replies: error lines become errors, bulks become messages."""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from koinon.core import resp
from koinon.core.exchange import PendingMessage
from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError, UnknownFateError, UnsupportedVersionError
from koinon_proto.v1 import errors_pb2


def error_of(line: str) -> KoinonError:
    """Parse an error line. A node that does not know the command is of another version:
    UnsupportedVersionError.

    Raises:
        ValueError: the line holds no Koinon error.
    """
    if resp.is_not_known(line):
        return UnsupportedVersionError(what=f"RESP ({line})", version=0, supported=1)
    try:
        return convert.error_from_proto(errors_pb2.Error.FromString(resp.refusal_of(line)))
    except DecodeError as failure:
        raise ValueError(f"not an error of ours: {failure}") from failure


def reply_of(
    message: PendingMessage, kind: type[Message], address: str
) -> Message | KoinonError | None:
    """Return the reply or the error of a message to this address; None: it was not sent."""
    if message.result is None:
        return message.error
    try:
        return kind.FromString(message.result)
    except DecodeError:
        what = kind.DESCRIPTOR.name
        return UnknownFateError(reason=f"{address} sent an invalid reply: no {what}")
