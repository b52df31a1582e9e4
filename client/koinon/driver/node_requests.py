"""Requests of one message and one reply to a node: reads and writes of rows, batches, pages.

Reads of rows and pages of scans go by RESP, which costs a third of the CPU. Everything else goes by
gRPC, and so do they while no RESP connection is available; gRPC also reports why a node cannot be
reached. An address known only from a refusal has no known RESP listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from koinon.core.cursor_rows import CursorAction
from koinon.core.exchange import Command, PendingMessage
from koinon.core.operations import attempt_timeout_s
from koinon.core.routing import Routing
from koinon.driver import request_ids
from koinon.driver.cluster_access import ClusterAccess
from koinon.driver.resp.link import RespLink
from koinon.driver.resp.replies import reply_of
from koinon_proto.contract.errors import KoinonError, NotSentError
from koinon_proto.v1 import groups_pb2, kv_pb2


@dataclass(frozen=True, slots=True)
class Method:
    """A method of ``KeyValue`` or ``Cursors``. ``command`` is its RESP command; None: none."""

    name: str
    reply: type[Message]
    command: Command | None = None
    write: bool = False


READ = Method("batch_get", kv_pb2.BatchGetResponse, Command.GET_MANY)
SCAN = Method("scan", kv_pb2.ScanResponse, Command.SCAN)
WRITE = Method("batch_write", kv_pb2.BatchWriteResponse, write=True)
COMMIT = Method("commit_batch", kv_pb2.CommitBatchResponse, write=True)
COMMIT_WITH_CURSOR = Method("commit_with_cursor", kv_pb2.CommitBatchResponse, write=True)
CURSORS = {
    CursorAction.CLAIM: Method("claim_cursors", groups_pb2.ClaimCursorsResponse, write=True),
    CursorAction.COMMIT: Method("commit_cursors", groups_pb2.CommitCursorsResponse, write=True),
    CursorAction.READ: Method("read_cursors", groups_pb2.ReadCursorsResponse),
}

RespLinkOf = Callable[[str, int, Routing], RespLink | None]
"""Returns the RESP link to an address, for operations in the keyspace of this id, or None."""


class NodeRequests:
    """Sends the requests of one client, each once. It keeps no state."""

    def __init__(self, access: ClusterAccess, resp_link: RespLinkOf) -> None:
        self._access = access
        self._resp_link = resp_link

    async def send(self, method: Method, address: str, request: Any, deadline: float) -> Any:
        """Send a request; return the reply message or the error. It takes at most the share of the
        time until ``deadline`` that ``attempt_timeout_s`` gives to one attempt.
        """
        access = self._access
        if method.command is not None and (left_s := deadline - access.now()) > 0:
            resp_link = self._resp_link(address, request.keyspace_id, access.routing())
            if resp_link is not None:
                message = message_of(method.command, request, deadline, round(left_s * 1000))
                await resp_link.ask(message, attempt_timeout_s(left_s, write=False))
                if (outcome := reply_of(message, method.reply, address)) is not None:
                    return outcome
        link = access.link(address)
        if not link.ready():
            try:
                async with asyncio.timeout_at(deadline):
                    connected = await link.connect_soon()
            except TimeoutError:
                connected = False
            if not connected:
                return link.not_sent()
        left_s = deadline - access.now()
        if left_s <= 0:
            return NotSentError(reason="the deadline passed before the request was sent")
        access.watch_answers()
        timeout_s = attempt_timeout_s(left_s, write=method.write)
        return await link.call(method.name, request, timeout_s, write=method.write)


def message_of(
    command: Command,
    request: Message,
    deadline: float,
    timeout_ms: int,
    request_id: request_ids.RequestId | None = None,
) -> PendingMessage:
    """Return an attempt to send a request by RESP, under ``request_id`` or else the task's own."""
    return PendingMessage(
        command=command,
        deadline=deadline,
        timeout_ms=timeout_ms,
        value=request.SerializeToString(),
        request=request_id or request_ids.given(),
    )


def outcome_as(convert: Callable[[Any], Any], outcome: Any) -> Any:
    """Convert a reply for the core; return an error unchanged."""
    return outcome if isinstance(outcome, KoinonError) else convert(outcome)
