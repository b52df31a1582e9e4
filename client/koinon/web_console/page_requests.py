"""Parses the page's requests: JSON of bounded size, whose values are checked one by one. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES

BODY_BYTES_MAX = 256 * 1024
KEYS_MAX = 100
HOT_SECONDS_MAX = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WhereRequest:
    """The keys whose partitions are asked for, and their keyspace ('': default)."""

    keyspace: str
    keys: tuple[bytes, ...]


def object_in(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        InvalidArgumentError: it is no JSON object, or too long.
    """
    if len(body) > BODY_BYTES_MAX:
        raise InvalidArgumentError(
            field="body", reason="too long", limit=BODY_BYTES_MAX, actual=len(body)
        )
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidArgumentError(field="body", reason="must be JSON") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(field="body", reason="must be a JSON object")
    return found


def where_request(body: bytes) -> WhereRequest:
    """Parse the request ``{"keyspace": TEXT, "keys": [{"text": TEXT} or {"hex": TEXT}, …]}``.

    Raises:
        InvalidArgumentError: it is malformed; ``field`` names the key by its index, from 0.
    """
    asked = object_in(body)
    keyspace, keys = asked.get("keyspace", ""), asked.get("keys")
    if not isinstance(keyspace, str):
        raise InvalidArgumentError(field="keyspace", reason="must be text")
    if not isinstance(keys, list):
        raise InvalidArgumentError(field="keys", reason="must be a list")
    if len(keys) > KEYS_MAX:
        raise InvalidArgumentError(
            field="keys", reason="too many", limit=KEYS_MAX, actual=len(keys)
        )
    found = tuple(_key(key, f"keys[{place}]") for place, key in enumerate(keys))
    return WhereRequest(keyspace=keyspace, keys=found)


def hot_seconds(body: bytes) -> float:
    """Parse the request ``{"seconds": NUMBER}``; return the time in which keys are sampled.

    Raises:
        InvalidArgumentError: it is malformed.
    """
    seconds = object_in(body).get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgumentError(field="seconds", reason="must be a number")
    if not 0.1 <= seconds <= HOT_SECONDS_MAX:
        raise InvalidArgumentError(
            field="seconds", reason=f"must be from 0.1 to {HOT_SECONDS_MAX:g}"
        )
    return float(seconds)


def _key(key: Any, field: str) -> bytes:
    if not isinstance(key, dict):
        raise InvalidArgumentError(field=field, reason="must be an object")
    text, digits = key.get("text"), key.get("hex")
    if isinstance(text, str) and digits is None:
        try:
            found = text.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(field=field, reason="must be Unicode text") from None
    elif isinstance(digits, str) and text is None:
        try:
            found = bytes.fromhex(digits)
        except ValueError:
            raise InvalidArgumentError(
                field=field, reason="must be pairs of hexadecimal digits"
            ) from None
    else:
        raise InvalidArgumentError(field=field, reason="must have either text or hex, a string")
    if not 1 <= len(found) <= MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field=field, reason="bytes of a key", limit=MAX_KEY_BYTES, actual=len(found)
        )
    return found
