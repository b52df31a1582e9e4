"""The gRPC service of change feeds: checks a request and streams the feed's messages.

gRPC's flow control delays each message until the reader has room for it. A reader that accepts no
message for ``WRITE_S`` loses its stream, and may open another from its position.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Final

from koinon_node.core.formats.records import REST_BYTES_MAX
from koinon_node.grpc.scan_requests import refusals_to_proto
from koinon_node.partition.change_feeds import Advance, ChangeFeeds, Feed, FeedMessage, FeedRequest
from koinon_node.partition.change_feeds import Position as FeedPlace
from koinon_node.partition.request_limits import check_partitions, keyspace_of
from koinon_node.state import NodeState
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import InvalidArgumentError, UnavailableError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import MAX_KEY_BYTES
from koinon_proto.security.authorization import Caller, caller
from koinon_proto.server.admission import Places
from koinon_proto.server.rpc import typed_stream
from koinon_proto.v1 import feed_pb2, feed_pb2_grpc

FEEDS_MAX: Final = 256
"""The most feeds open at once: each consumer of a group has one at each node. A feed holds a
message and a page of a backfill, half a MiB each.
"""
_CONNECTION_MAX = 8  # feeds on one connection
WRITE_S: Final = 30.0
"""The longest time, in seconds, in which a reader must accept a message."""


class FeedService(feed_pb2_grpc.FeedServicer):
    """koinon.v1.Feed."""

    def __init__(self, feeds: ChangeFeeds, state: NodeState) -> None:
        self._feeds = feeds
        self._state = state
        self._places = Places(
            "change feeds",
            places=FEEDS_MAX,
            host=FEEDS_MAX // 2,
            connection=_CONNECTION_MAX,
        )

    @typed_stream
    async def Changes(self, request: feed_pb2.ChangesRequest, context: Any) -> None:  # noqa: N802
        keyspace = keyspace_of(self._state, request)
        wanted = feed_request_of(request, keyspace)
        _check_access(context, keyspace.keyspace_id, request.prefix)
        with self._places.place(context.peer()):
            feed = self._feeds.open(wanted)
            try:
                await self._serve(feed, request, context)
            finally:
                feed.close()

    async def _serve(self, feed: Feed, request: feed_pb2.ChangesRequest, context: Any) -> None:
        while (message := await feed.next()) is not None:
            keyspace_of(self._state, request)  # raises if the keyspace was dropped meanwhile
            _check_access(context, request.keyspace_id, request.prefix)
            try:
                async with asyncio.timeout(WRITE_S):
                    await context.write(reply_of(message))
            except TimeoutError:
                reason = f"the reader has accepted no message of its feed for {WRITE_S:.0f} s"
                raise UnavailableError(reason=reason) from None


def feed_request_of(request: feed_pb2.ChangesRequest, keyspace: Keyspace) -> FeedRequest:
    """Check a request and convert it.

    Raises:
        InvalidArgumentError: a field breaks a limit, the partitions do not ascend, or a partition
            is not the keyspace's.
    """
    places = [
        FeedPlace(p.partition_id, p.sequence, p.bound, p.after_key) for p in request.positions
    ]
    if len(request.prefix) > MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field="prefix",
            reason="longer than a key",
            limit=MAX_KEY_BYTES,
            actual=len(request.prefix),
        )
    check_positions(places, keyspace)
    return FeedRequest(positions=places, prefix=request.prefix, keys_only=request.keys_only)


def check_positions(places: Sequence[FeedPlace], keyspace: Keyspace) -> None:
    """Check positions of a request.

    Raises:
        InvalidArgumentError: the partitions do not ascend or are not the keyspace's, or a position
            contradicts itself.
    """
    wanted = [place.partition_id for place in places]
    if any(a >= b for a, b in itertools.pairwise(wanted)):
        raise InvalidArgumentError(field="positions", reason="partitions must ascend")
    check_partitions(keyspace, wanted)
    longest = max((len(place.after_key) for place in places), default=0)
    if longest > REST_BYTES_MAX:
        raise InvalidArgumentError(
            field="after_key", reason="longer than a key", limit=REST_BYTES_MAX, actual=longest
        )
    for place in places:
        if (place.bound and place.bound < place.sequence) or (place.after_key and not place.bound):
            raise InvalidArgumentError(
                field="positions",
                reason=f"the position of partition {place.partition_id} has a bound below its "
                "sequence, or an after_key without a bound",
            )


def _check_access(context: Any, keyspace_id: int, prefix: bytes) -> None:
    """Check that the caller may follow the keys with this prefix, by its present rights: the guard
    looks up the rights again while the stream lasts.
    """
    known: Caller | None = getattr(context, "caller", None)
    (known or caller.get()).check_prefix(Action.FEED, keyspace_id, prefix)


def reply_of(message: FeedMessage) -> feed_pb2.ChangesResponse:
    """Convert a feed's message to its protobuf form."""
    changes = [change for advance in message.advances for change in advance.changes]
    return feed_pb2.ChangesResponse(
        keys=[change.key for change in changes],
        values=[change.value or b"" for change in changes],
        versions=[change.sequence for change in changes],
        expires_at_ms=[change.expires_at_ms for change in changes],
        deletes=[row for row, change in enumerate(changes) if change.value is None],
        advances=list(map(_advance_to_proto, message.advances)),
        refusals=refusals_to_proto(message.refusals),
    )


def _advance_to_proto(advance: Advance) -> feed_pb2.FeedAdvance:
    position = advance.position
    return feed_pb2.FeedAdvance(
        position=feed_pb2.FeedPosition(
            partition_id=position.partition_id,
            sequence=position.sequence,
            bound=position.bound,
            after_key=position.after_key,
        ),
        rows=len(advance.changes),
        caught_up=advance.caught_up,
    )
