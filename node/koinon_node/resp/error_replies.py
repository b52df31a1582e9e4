"""Errors as replies: whole for Koinon's own clients, in Redis's words for all others."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass

from koinon_node.core.writes.updates import A_NUMBER, AN_INTEGER
from koinon_node.resp import wire
from koinon_proto.contract import convert, errors
from koinon_proto.contract.errors import KoinonError
from koinon_proto.server import rpc

_WORDS: dict[type[KoinonError], str] = {
    errors.LeaseExpiredError: "TRYAGAIN",
    errors.TableBehindError: "TRYAGAIN",
    errors.UnavailableError: "TRYAGAIN",  # nothing was done
    errors.NotPrimaryError: "CLUSTERDOWN",
    errors.PartitionOfflineError: "CLUSTERDOWN",
    errors.ClusterNotReadyError: "LOADING",
    errors.NotEnoughReplicasError: "NOREPLICAS",
    errors.StorageFullError: "OOM",
    errors.ResourceExhaustedError: "BUSY",
    errors.QuotaExceededError: "BUSY",
    errors.UnknownFateError: "UNKNOWNFATE",
    errors.CertificateNotValidError: "NOAUTH",
    errors.UnauthenticatedError: "NOAUTH",
    errors.PermissionDeniedError: "NOPERM",
}


@dataclass(eq=False)
class RefusedError(KoinonError):
    """A command of a client of Redis is refused with these words; they begin with their kind."""

    reason: str


@dataclass(eq=False)
class ChangingHandsError(KoinonError):
    """The command was not carried out, because its partition changed hands for longer than a
    command is held. Its cause says what the partition waits for.
    """

    reason: str


def outcome_of(error: KoinonError) -> str:
    """Return what metrics and logs call a command that ended with the error."""
    if isinstance(error, RefusedError | ChangingHandsError):
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


Fail = Callable[[KoinonError, str, str], bytes]
"""Makes the reply of an error, of its request's id, and of the place where the key is served, as a
redirection names it: ``slot host:port``; '' if that is not known, or not asked for.
"""


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
    word = "TRYAGAIN" if isinstance(error, ChangingHandsError) else _WORDS.get(type(error), "ERR")
    return wire.error(f"{word} {error} [request {request_id}]")
