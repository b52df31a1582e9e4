"""The in-memory twins of a member's storage and transport; both pass the same tests as the real
ones. Members are on one event loop, with faults on request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence

from koinon_coordinator.core.raft import (
    Configuration,
    Entry,
    HardState,
    LogPosition,
    Message,
    RestoredState,
    Snapshot,
    SnapshotWrite,
)
from koinon_coordinator.raft.errors import MemberStoppedError
from koinon_coordinator.raft.peer_stream import RaftEndpoint


class MemoryRaftStorage:
    """The in-memory twin: `save` is as durable as the object."""

    def __init__(self, configuration: Configuration) -> None:
        self._store_id = uuid.uuid4().hex
        self._hard_state = HardState()
        self._snapshot = Snapshot.of(0, 0, configuration, b"")
        self._base = LogPosition(0, 0)
        self._entries: dict[int, Entry] = {}
        self._pins: dict[str, str] = {}

    @property
    def store_id(self) -> str:
        return self._store_id

    def load(self) -> RestoredState:
        return RestoredState(
            hard_state=self._hard_state,
            snapshot=self._snapshot,
            base=self._base,
            entries=tuple(self._entries[index] for index in sorted(self._entries)),
        )

    def save(
        self,
        *,
        hard_state: HardState | None,
        snapshot_write: SnapshotWrite | None,
        entries: Sequence[Entry],
    ) -> None:
        if snapshot_write is not None:
            first = self._base.index + 1
            self._snapshot, self._base = snapshot_write.snapshot, snapshot_write.base
            if snapshot_write.installed:
                self._entries.clear()
            for index in range(first, self._base.index + 1):
                self._entries.pop(index, None)
        if entries:
            index = entries[0].index
            while self._entries.pop(index, None) is not None:
                index += 1
            self._entries.update((entry.index, entry) for entry in entries)
        if hard_state is not None:
            self._hard_state = hard_state

    def pinned_stores(self) -> dict[str, str]:
        return dict(self._pins)

    def pin_store(self, member_id: str, store_id: str) -> None:
        self._pins[member_id] = store_id

    def close(self) -> None:
        pass


class MemoryRaftNetwork:
    """A network in memory that joins all members of a group: it knows who can reach whom."""

    def __init__(self) -> None:
        self.blocked: set[tuple[str, str]] = set()  # (sender, receiver)
        self._transports: dict[str, MemoryRaftTransport] = {}

    def transport(self, address: str) -> MemoryRaftTransport:
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

    def at(self, address: str) -> MemoryRaftTransport | None:
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

    def open_streams(self) -> int:
        return 0

    async def receive(self, source: MemoryRaftTransport, message: Message) -> None:
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
