"""The keys that an atomic batch may hold: those that have the same routing bytes, so that they lie
in one partition whatever the number of partitions is. The partitioner's router (``routers``) says
which bytes of a key these are.
"""

from __future__ import annotations

from collections.abc import Iterable

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.partitioner import Partitioner


def check_together(partitioner: Partitioner, first: bytes, keys: Iterable[bytes]) -> None:
    """Check that all keys have the routing bytes of the first.

    Raises:
        InvalidArgumentError: one has others; it is named.
    """
    expected = partitioner.routing_bytes(first)
    for key in keys:
        if key != first and (own := partitioner.routing_bytes(key)) != expected:
            raise InvalidArgumentError(
                field="key",
                reason=f"{key!r} is routed by {own!r}, the batch by {expected!r}: an atomic batch "
                "holds keys with the same routing bytes",
            )
