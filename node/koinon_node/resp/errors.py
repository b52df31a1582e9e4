"""Errors as replies: whole for Koinon's own clients, in Redis's words for all others."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from koinon_node.core.updates import A_NUMBER, AN_INTEGER
from koinon_node.resp import wire
from koinon_proto.contract import convert, errors
from koinon_proto.contract.errors import KoinonError
from koinon_proto.server import rpc

_WORDS: dict[type[KoinonError], str] = {
    errors.LeaseExpiredError: "TRYAGAIN",
    errors.TableBehindError: "TRYAGAIN",
    errors.NotPrimaryError: "CLUSTERDOWN",
    errors.PartitionOfflineError: "CLUSTERDOWN",
    errors.ClusterNotReadyError: "CLUSTERDOWN",
    errors.NotEnoughReplicasError: "NOREPLICAS",
    errors.StorageFullError: "OOM",
    errors.ResourceExhaustedError: "BUSY",
    errors.QuotaExceededError: "BUSY",
    errors.UnknownFateError: "UNKNOWNFATE",
    errors.UnauthenticatedError: "NOAUTH",
    errors.PermissionDeniedError: "NOPERM",
}


@dataclass(eq=False)
class RefusedError(KoinonError):
    """A command of a client of Redis is refused with these words; they begin with their kind."""

    reason: str


def outcome_of(error: KoinonError) -> str:
    """Return what metrics and logs call a command that ended with the error."""
    if isinstance(error, RefusedError):
        cause = error.__cause__
        error = cause if isinstance(cause, KoinonError) else _REFUSED
    return rpc.outcome_of(error)


_REFUSED = errors.InvalidArgumentError(field="arguments", reason="refused")
CROSS_SLOT = "CROSSSLOT Keys in request don't hash to the same slot"
NOT_AN_INTEGER = "ERR value is not an integer or out of range"
_OF_NUMBERS: dict[tuple[type[KoinonError], str], str] = {
    (errors.NotANumberError, AN_INTEGER): NOT_AN_INTEGER,
    (errors.NotANumberError, A_NUMBER): "ERR value is not a valid float",
    (errors.NumberOverflowError, AN_INTEGER): "ERR increment or decrement would overflow",
    (errors.NumberOverflowError, A_NUMBER): "ERR increment would produce NaN or Infinity",
}
"""Clients and their tests know these by heart."""


def own(error: KoinonError, request_id: str, moved_to: str) -> bytes:
    """Return the reply to one of Koinon's own clients: the error whole, and the request's id. Where
    else the key is served the error says itself.
    """
    del moved_to
    whole = base64.b64encode(convert.error_to_proto(error).SerializeToString())
    return b"-KOINON %b %b\r\n" % (whole, request_id.encode())


def guest(error: KoinonError, request_id: str, moved_to: str) -> bytes:
    """Return the reply to a client of Redis."""
    if moved_to:
        return wire.error(f"MOVED {moved_to}")
    if isinstance(error, RefusedError):
        return wire.error(error.reason)
    if isinstance(error, errors.NotANumberError | errors.NumberOverflowError):
        return wire.error(_OF_NUMBERS[type(error), error.expected])
    return wire.error(f"{_WORDS.get(type(error), 'ERR')} {error} [request {request_id}]")
