"""Forwards commands of Redis clients to the nodes that serve their keys (``--resp-proxy``), for
clients that know a single server.

    client --SET k v--> n1 (does not lead k) --KOINON.PASSED user SET k v--> n2 (leads k)
           <---+OK---                        <--------- bulk: +OK ----------

This node tries each command itself first. If another node leads the key, the refusal shows that the
command had no effect, and this node passes it on to the node that the table names. The receiving
node never passes a command on again, so nodes whose tables differ cannot send it in a circle: the
first node retries by its own table, for ``HOLD_S`` at most. Both nodes check the rights of the
client's user. Commands on one partition are sent one after the other, in their order; commands on
different partitions are sent concurrently.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis
from google.protobuf.message import DecodeError

from koinon_node.resp import wire
from koinon_node.resp.commands.spec import Spec
from koinon_node.resp.error_replies import ChangingHandsError, RefusedError
from koinon_node.resp.hand_over_waits import HOLD_S
from koinon_node.resp.outcomes import Arguments
from koinon_node.resp.service import Answer
from koinon_node.resp.session import Session
from koinon_node.state import NodeState
from koinon_proto.contract import convert
from koinon_proto.contract.access import ROOT
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    NotPrimaryError,
    PartitionOfflineError,
    PermissionDeniedError,
    ResourceExhaustedError,
    TableBehindError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import NodeInfo
from koinon_proto.security.names import node_name
from koinon_proto.security.transport import Dialing
from koinon_proto.v1 import errors_pb2

PASSED: Final = b"KOINON.PASSED"
HELD_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most bytes of passed-on commands without an answer. The budget of all connections does not
count these copies."""
CONNECTIONS_MAX: Final = 16
"""The most connections to one node for one keyspace. Commands prefer an idle connection."""
_ANSWER_S: Final = 5.0  # timeout of a reply
_CONNECT_S: Final = 1.0  # timeout of connecting and KOINON.HELLO
_PAUSE_S: Final = 0.02  # between two tries
_AGAIN: Final = (
    *(LeaseExpiredError, NotPrimaryError, PartitionOfflineError),
    *(TableBehindError, UnavailableError),
)
"""Errors of commands without an effect, after which the table may soon name another node."""
_WATCH: Final = "ERR a key that another node serves cannot be watched: use a client of clusters"
Place = tuple[str, int]
"""A node's address, and a keyspace's id."""


class Passing:
    """Passes commands on, over connections that it keeps. Belongs to the event loop."""

    def __init__(self, state: NodeState, dialing: Dialing) -> None:
        self._state = state
        self._dialing = dialing
        self._links: dict[Place, list[_Link]] = {}
        self._held_bytes = 0

    def concerns(self, spec: Spec, answer: Answer) -> bool:
        """Return whether the command had no effect because another node serves its key."""
        if spec.is_own or not spec.names_keys or not isinstance(answer, KoinonError):
            return False
        return isinstance(answer, NotPrimaryError) or isinstance(answer.__cause__, NotPrimaryError)

    async def answers(
        self, session: Session, commands: Sequence[tuple[Spec, Arguments]]
    ) -> list[Answer]:
        """Pass the commands on; return their answers in the same order."""
        answers: list[Answer] = [b""] * len(commands)
        chains: dict[int, list[int]] = {}
        for at, (spec, arguments) in enumerate(commands):
            key = spec.keys_in(arguments)[0]
            chains.setdefault(session.served.partitioner().partition_of(key), []).append(at)

        async def pass_on(chain: list[int]) -> None:
            for at in chain:
                answers[at] = await self._answer_one(session, *commands[at])

        async with asyncio.TaskGroup() as group:
            for chain in chains.values():
                group.create_task(pass_on(chain))
        return answers

    async def _answer_one(self, session: Session, spec: Spec, arguments: Arguments) -> Answer:
        if spec.name == "WATCH":
            return RefusedError(_WATCH)
        if spec.name == "EVALSHA":
            source = session.service.scripts.source(arguments[1])
            arguments = [b"EVAL", source, *arguments[2:]]
        try:
            return await self._send_with_retries(
                session,
                spec.keys_in(arguments)[0],
                arguments,
                is_read="readonly" in spec.flags,
            )
        except KoinonError as error:
            return error

    async def transaction(self, session: Session, key: bytes, queued: Sequence[Arguments]) -> bytes:
        """Pass a transaction on to the node that serves its key; return the reply of EXEC.

        Raises:
            UnknownFateError: the transaction may have been executed.
            KoinonError: the transaction had no effect.
        """
        words = [word for command in queued for word in (b"%d" % len(command), *command)]
        return await self._send_with_retries(session, key, [b"EXEC", *words], is_read=False)

    async def _send_with_retries(
        self, session: Session, key: bytes, arguments: Arguments, *, is_read: bool
    ) -> bytes:
        principal = session.caller.principal if session.gate is not None else None
        user = principal.name if principal is not None else ""
        if user == ROOT:  # no node may speak for root
            raise PermissionDeniedError(
                principal="user root", action="reach", what="other nodes through a proxy"
            )
        command = wire.bulks([PASSED, user.encode(), *arguments])
        if self._held_bytes + len(command) > HELD_BYTES_MAX:
            raise ResourceExhaustedError(
                resource="bytes of commands that are passed on", limit=HELD_BYTES_MAX
            )
        self._held_bytes += len(command)
        until = asyncio.get_running_loop().time() + HOLD_S
        try:
            while True:
                try:
                    return await self._send_once(session, key, command)
                except _AGAIN as error:
                    last: KoinonError = error
                except UnknownFateError as error:
                    if not is_read:
                        raise
                    last = error
                if asyncio.get_running_loop().time() >= until:
                    raise ChangingHandsError(reason=str(last)) from last
                await asyncio.sleep(_PAUSE_S)
        finally:
            self._held_bytes -= len(command)

    async def _send_once(self, session: Session, key: bytes, command: bytes) -> bytes:
        """Send the command once to the node that the table names now; return its reply."""
        partition_id = session.served.partitioner().partition_of(key)
        primary = self._state.table().primary_of(partition_id)
        if primary is None or not primary.redis_address:
            raise PartitionOfflineError(partition_id=partition_id, reason="no node serves it")
        link = await self._link(primary, session.served.keyspace_id)
        return await link.ask(command)

    async def _link(self, node: NodeInfo, keyspace_id: int) -> _Link:
        """Return a connection to the node: an idle one, else a new one, else the one with the
        fewest unanswered commands.

        Raises:
            UnavailableError: the node cannot be reached.
        """
        place = node.redis_address, keyspace_id
        version = self._dialing.version
        links = self._links[place] = [
            link for link in self._links.get(place, ()) if link.is_open and link.version == version
        ]
        least = min(links, key=lambda link: link.load, default=None)
        if least is not None and (not least.load or len(links) >= CONNECTIONS_MAX):
            return least
        link = _Link(node.node_id, version)
        links.append(link)  # before the connect, so that concurrent calls count it
        hello = (b"KOINON.HELLO", b"2", self._cluster_id, b"%d" % keyspace_id)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._dialing.connect(
                    lambda: link, node.redis_address, node_name(node.node_id)
                )
                await link.ask(wire.bulks(hello))
        except (OSError, TimeoutError, ValueError, UnknownFateError) as error:
            link.close()
            raise UnavailableError(reason=f"{node.node_id} cannot be reached: {error}") from error
        except BaseException:
            link.close()
            raise
        return link

    @property
    def _cluster_id(self) -> bytes:
        return self._state.table().cluster.cluster_id.encode()

    def close(self) -> None:
        """Close all connections. Unanswered commands end with UnknownFateError."""
        for links in self._links.values():
            for link in links:
                link.close()


class _Link(asyncio.Protocol):
    """One connection to another node. Replies come in the order of the commands."""

    def __init__(self, node_id: str, version: int) -> None:
        self._node_id = node_id
        self.version = version  # of the identity with which it was opened
        self._transport: asyncio.Transport | None = None
        self._reader: Any = hiredis.Reader()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._has_ended = False
        self._is_draining = False  # the other node announced its stop: send it no more commands

    @property
    def is_open(self) -> bool:
        """True while the connection accepts commands."""
        return not (self._has_ended or self._is_draining)

    @property
    def load(self) -> int:
        """The number of unanswered commands; 1 while the connection is being opened."""
        return len(self._waiting) if self._transport is not None else 1

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._has_ended:
            transport.abort()

    async def ask(self, command: bytes) -> bytes:
        """Send a command; return its reply.

        Raises:
            UnavailableError: the command was not sent.
            UnknownFateError: no reply came.
            KoinonError: the reply is an error.
        """
        if self._transport is None or not self.is_open:
            raise UnavailableError(reason=f"the connection to {self._node_id} has ended")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        self._transport.write(command)
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await reply
        except TimeoutError:
            self.close()
            raise UnknownFateError(reason=f"{self._node_id} has not answered in time") from None
        if isinstance(answer, hiredis.ReplyError):
            raise _error_of(str(answer))
        return bytes(answer)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.PushNotification):
                    self._is_draining = True
                elif not (waiting := self._waiting.popleft()).done():
                    waiting.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self.close()
        if self._is_draining and not self._waiting:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection at once. Unanswered commands end with UnknownFateError."""
        self._has_ended = True
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(
                    UnknownFateError(reason=f"the connection to {self._node_id} was lost")
                )


def _error_of(line: str) -> KoinonError:
    """Parse the error line that answers a Koinon command. The command had no effect."""
    kind, _, rest = line.partition(" ")
    try:
        whole = b64decode(rest.partition(" ")[0], validate=True) if kind == "KOINON" else b""
        return convert.error_from_proto(errors_pb2.Error.FromString(whole))
    except (ValueError, DecodeError):
        return UnavailableError(reason=line)
