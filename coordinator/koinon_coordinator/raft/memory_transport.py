"""The in-memory twin of the gRPC transport: members on one event loop, faults on request."""

import asyncio
from collections.abc import Mapping, Sequence

from koinon_coordinator.core.raft import Message
from koinon_coordinator.raft.errors import MemberStoppedError
from koinon_coordinator.raft.transport import RaftEndpoint


class MemoryRaftNetwork:
    """Who can reach whom. One of these joins all members of a group."""

    def __init__(self) -> None:
        self.blocked: set[tuple[str, str]] = set()  # (sender, receiver)
        self._transports: dict[str, MemoryRaftTransport] = {}

    def transport(self, address: str) -> "MemoryRaftTransport":
        """The transport of the member that listens at `address`."""
        transport = self._transports[address] = MemoryRaftTransport(self, address)
        return transport

    def isolate(self, *member_ids: str) -> None:
        """Cut these members off from all others, both ways."""
        everyone = [t.endpoint.member_id for t in self._transports.values() if t.endpoint]
        for one in member_ids:
            for other in everyone:
                if other not in member_ids:
                    self.blocked |= {(one, other), (other, one)}

    def at(self, address: str) -> "MemoryRaftTransport | None":
        return self._transports.get(address)


class MemoryRaftTransport:
    """Delivers in the next turn of the event loop. Peers' store ids are checked as on the wire."""

    def __init__(self, network: MemoryRaftNetwork, address: str) -> None:
        self.endpoint: RaftEndpoint | None = None
        self._network = network
        self._address = address
        self._peers: dict[str, str] = {}
        self._learned: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, endpoint: RaftEndpoint) -> None:
        self.endpoint = endpoint

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        self._peers = dict(addresses)

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            address = self._peers.get(message.to) or self._learned.get(message.to)
            target = self._network.at(address) if address else None
            if target is not None and (message.sender, message.to) not in self._network.blocked:
                task = asyncio.get_running_loop().create_task(target.receive(self, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def receive(self, source: "MemoryRaftTransport", message: Message) -> None:
        sender, receiver = source.endpoint, self.endpoint
        if sender is None or receiver is None or len({sender.group, receiver.group} - {""}) > 1:
            return
        if not receiver.listens_to(sender.member_id, sender.group):
            return
        try:
            known = await receiver.is_known_store(sender.member_id, sender.store_id)
        except MemberStoppedError:
            return
        if not known:
            sender.on_store_refused(receiver.member_id)
            return
        self._learned[sender.member_id] = source._address
        receiver.on_messages([message])

    async def close(self) -> None:
        self.endpoint = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
