"""One Raft member as a process, for tests and benchmarks; see `processes` for the other end.

Requests come as JSON lines on stdin, answers and events go as JSON lines to stdout. Its state
machine keeps every command but those whose text begins with `rate` or `warm`: these are counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from koinon_coordinator.raft import RaftConfig, RaftMember, StreamRaftTransport
from koinon_proto.contract.errors import KoinonError
from koinon_proto.process.clock import boottime

from .framed import Listener

COUNTED_PREFIXES = (b"rate", b"warm")


class CommandList:
    """Keeps commands in order; `count` covers the uninteresting ones too."""

    group_id = ""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.count = 0

    def apply(self, index: int, command: bytes) -> object:
        if command == b"raise":
            raise RuntimeError("told to")
        self.count += 1
        if not command.startswith(COUNTED_PREFIXES):
            self.kept.append(command.rstrip(b".").decode())
        return index

    def capture(self) -> Callable[[], bytes]:
        count, kept = self.count, tuple(self.kept)
        return lambda: json.dumps([count, kept]).encode()

    def restore(self, snapshot: bytes) -> None:
        self.count, self.kept = json.loads(snapshot)


class Process:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.listen = settings.pop("listen")
        settings["data_dir"] = Path(settings["data_dir"])
        self.state = CommandList()
        self.serving_term: int | None = None
        self.transport = StreamRaftTransport()
        self.member = RaftMember(
            RaftConfig(**settings),
            self.state,
            self.transport,
            on_leader=self.on_leader,
            on_follower=self.on_follower,
        )
        self.acked: list[str] = []

    def on_leader(self, term: int) -> None:
        self.serving_term = term

    def on_follower(self, term: int, leader_id: str | None) -> None:
        self.serving_term = None

    async def run(self) -> None:
        server = await Listener(self.transport, self.listen).start()
        try:
            await self.member.start()
        except KoinonError as error:
            say({"event": "stopped", "error": type(error).__name__, "text": str(error)})
            await server.stop()
            return
        requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        threading.Thread(
            target=read_requests, args=(asyncio.get_running_loop(), requests), daemon=True
        ).start()
        say({"event": "started", "store_id": self.member.store_id})
        watcher = asyncio.create_task(self.watch())
        tasks: set[asyncio.Task[None]] = set()
        while (request := await requests.get()) is not None:
            task = asyncio.create_task(self.answer(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await self.member.stop()
        await watcher
        await server.stop()

    async def watch(self) -> None:
        try:
            await self.member.stopped()
        except Exception as error:
            say({"event": "stopped", "error": type(error).__name__, "text": str(error)})

    async def answer(self, request: dict[str, Any]) -> None:
        request_id, name = request.pop("id"), request.pop("op")
        try:
            result = await getattr(self, f"do_{name}")(**request)
            say({"id": request_id, "result": result})
        except Exception as error:
            say({"id": request_id, "error": type(error).__name__, "text": str(error)})

    # -- operations

    async def do_status(self) -> dict[str, Any]:
        status = self.member.status()
        return {
            "role": status.role.value,
            "term": status.term,
            "leader_id": status.leader_id,
            "serving_term": self.serving_term,
            "commit_index": status.commit_index,
            "applied_index": status.applied_index,
            "snapshot_index": status.snapshot_index,
            "voters": sorted(m for m, s in status.members.items() if s.is_voter),
            "learners": sorted(m for m, s in status.members.items() if not s.is_voter),
            "lag": {m: s.lag_entries for m, s in status.members.items()},
            "count": self.state.count,
        }

    async def do_propose(self, command: str) -> object:
        return await self.member.propose(command.encode())

    async def do_barrier(self) -> int:
        return await self.member.read_barrier()

    async def do_read_last(self) -> str | None:
        await self.member.read_barrier()
        return self.state.kept[-1] if self.state.kept else None

    async def do_contact(self) -> dict[str, float | None]:
        return {"contact_at": self.member.quorum_contact_at(), "now": boottime()}

    async def do_dump(self) -> list[str]:
        return self.state.kept

    async def do_add_learner(self, member_id: str, address: str) -> None:
        await self.member.add_learner(member_id, address)

    async def do_promote(self, member_id: str) -> None:
        await self.member.promote(member_id)

    async def do_remove(self, member_id: str) -> None:
        await self.member.remove_member(member_id)

    async def do_transfer(self, to: str | None) -> None:
        await self.member.transfer_leadership(to)

    async def do_load(
        self, proposers: int, seconds: float, size: int, tag: str, report: bool = False
    ) -> dict[str, float]:
        """Propose from `proposers` tasks for `seconds`, or until an error; with `report`, say
        what is acknowledged as it is."""
        began_at = time.monotonic()
        counts = [0] * proposers

        async def proposer(number: int) -> None:
            while time.monotonic() - began_at < seconds:
                name = f"{tag}{number}-{counts[number]}"
                await self.member.propose(name.encode().ljust(size, b"."))
                counts[number] += 1
                if report:
                    self.note_acknowledged(name)

        await asyncio.gather(*(proposer(number) for number in range(proposers)))
        return {"acknowledged": sum(counts), "seconds": time.monotonic() - began_at}

    def note_acknowledged(self, name: str) -> None:
        if not self.acked:
            asyncio.get_running_loop().call_later(0.005, self.say_acknowledged)
        self.acked.append(name)

    def say_acknowledged(self) -> None:
        say({"event": "acknowledged", "names": self.acked})
        self.acked = []


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read_requests(
    loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[dict[str, Any] | None]
) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(requests.put_nowait, None)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    uvloop.run(Process(json.loads(sys.argv[1])).run())
