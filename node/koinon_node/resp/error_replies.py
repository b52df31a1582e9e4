"""Formats errors as replies: typed errors for Koinon's own clients, Redis's texts for all
others."""

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
    errors.UnavailableError: "TRYAGAIN",  # the command had no effect
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
    """Refuses a Redis client's command with this text, which begins with its error code."""

    reason: str


@dataclass(eq=False)
class ChangingHandsError(KoinonError):
    """The command was not executed, because its partition was without a primary for longer than a
    command is held. ``__cause__`` is the last refusal.
    """

    reason: str


def outcome_of(error: KoinonError) -> str:
    """Return the name of the error's outcome in metrics and logs."""
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
"""Redis's exact texts: clients and their tests depend on them."""


Fail = Callable[[KoinonError, str, str], bytes]
"""Formats an error as a reply. The arguments are the error, the request's id, and the target of a
redirection (``slot host:port``; '' if unknown or not wanted).
"""


def own(error: KoinonError, request_id: str, moved_to: str) -> bytes:
    """Format an error for a Koinon client: the typed error and the request's id. The error itself
    names another primary.
    """
    del moved_to
    whole = base64.b64encode(convert.error_to_proto(error).SerializeToString())
    return b"-KOINON %b %b\r\n" % (whole, request_id.encode())


def guest(error: KoinonError, request_id: str, moved_to: str) -> bytes:
    """Format an error for a Redis client."""
    if moved_to:
        return wire.error(f"MOVED {moved_to}")
    if isinstance(error, RefusedError):
        return wire.error(error.reason)
    if isinstance(error, errors.NotANumberError | errors.NumberOverflowError):
        return wire.error(_OF_NUMBERS[type(error), error.expected])
    word = "TRYAGAIN" if isinstance(error, ChangingHandsError) else _WORDS.get(type(error), "ERR")
    return wire.error(f"{word} {error} [request {request_id}]")
