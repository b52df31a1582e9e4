"""The errors that the error lines of a node stand for."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from koinon.core import resp
from koinon.core.exchange import Exchange, PendingMessage
from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError, UnsupportedVersionError
from koinon_proto.v1 import errors_pb2


def error_of(line: str, to: Exchange) -> KoinonError:
    """Return the error that the node answered with to a command. A node that does not know the
    command of a message answers UnsupportedVersionError: all know the others.

    Raises:
        ValueError: there is none in the line: the two sides do not understand one another.
    """
    if type(to) is PendingMessage and resp.is_not_known(line):
        return UnsupportedVersionError(what=to.command.value.decode(), version=0, supported=1)
    try:
        return convert.error_from_proto(errors_pb2.Error.FromString(resp.refusal_of(line)))
    except DecodeError as failure:
        raise ValueError(f"not an error of ours: {failure}") from failure
