"""Messages of strangers to running coordinators, which go on as if nothing had been said."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

from koinon_proto.v1 import admin_pb2
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply, RaftHello, RaftMessage
from tests.kit.waiting import until
from tests.raft.framed import refusal_of

from .test_processes import Processes, living

STRANGERS_TERM = 10**6
STRANGERS_WORDS = (
    RaftMessage(
        term=STRANGERS_TERM,
        heartbeat_request=RaftMessage.HeartbeatRequest(commit_index=10**9, round_id=1),
    ),
    RaftMessage(term=(1 << 64) - 1, vote_request=RaftMessage.VoteRequest(transfer=True)),
    RaftMessage(
        term=STRANGERS_TERM,
        vote_request=RaftMessage.VoteRequest(
            last_index=1 << 40, last_term=STRANGERS_TERM, transfer=True
        ),
    ),
    RaftMessage(term=STRANGERS_TERM, timeout_now=RaftMessage.TimeoutNow()),
)


def test_coordinators_that_strangers_talk_to_stay_up_and_keep_their_leader(tmp_path: Path) -> None:
    async def say(processes: Processes, member_id: str, group: str, address: str) -> None:
        """Send all messages, in the group's own name too."""
        await until(lambda: " peer_port=" in processes.log(member_id))  # a majority is enough
        (*_, number) = re.findall(r" peer_port=(\d+)", processes.log(member_id))
        for stranger, message in enumerate(STRANGERS_WORDS):
            hello = RaftHello(
                protocol_version=1,
                group=group,
                member_id=f"stranger-{stranger}",
                store_id="theirs",
                receiver_id=member_id,
                address=address,
            )
            reply = await refusal_of(int(number), RaftBatch(hello=hello, messages=[message]))
            assert reply.refusal == RaftExchangeReply.REFUSAL_NOT_MEMBER

    async def test() -> None:
        processes = Processes(tmp_path)
        for member_id in processes.addresses:
            processes.start(member_id)
        try:
            with socket.socket() as dialled:
                dialled.bind(("127.0.0.1", 0))
                dialled.listen()
                dialled.setblocking(False)
                address = f"127.0.0.1:{dialled.getsockname()[1]}"
                async with living(processes):
                    leader = await processes.leader()
                    admin = processes.callers[leader].admin
                    before = await admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
                    for group in ("", before.table.cluster.cluster_id):
                        for member_id in processes.addresses:
                            await say(processes, member_id, group, address)
                    assert all(p.poll() is None for p in processes.running.values())
                    # One of their own may have been late; what strangers say are other terms.
                    admin = processes.callers[await processes.leader()].admin
                    after = await admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
                    assert before.term <= after.term < STRANGERS_TERM
                    try:
                        dialled.accept()
                        raise AssertionError("a stranger was dialled")
                    except BlockingIOError:
                        pass
        finally:
            await processes.close()

    asyncio.run(test())
