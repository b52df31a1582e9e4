"""Replies that redis-server gave, compared with a node's.

``redis_replies.jsonl`` has a sequence of commands a line, each with its reply; bytes are written as
Latin-1. To write the replies anew, or those of commands that were added with any reply:
``python -m tests.node.resp.test_redis_replies PORT``, with the port of an empty redis-server 7.0.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest

from tests.kit.addresses import free_address
from tests.node.kit.resp_client import RespClient
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import running_node

RECORDED = Path(__file__).with_name("redis_replies.jsonl")
SEQUENCES: list[list[tuple[list[str], Any]]] = [
    json.loads(line) for line in RECORDED.read_text().splitlines()
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, data = free_address(), tmp_path_factory.mktemp("replies") / "n1"
    with (
        ScriptedCoordinator(Script(partitioner="crc16")) as coordinator,
        running_node(data, coordinator, "--redis-listen", port),
    ):
        yield port


def test_node_answers_as_redis_server_did(address: str) -> None:
    began = time.monotonic()
    differences = [
        f"{command} after {[c for c, _ in sequence[:at]][-5:]}: {reply!r}, not {expected!r}"
        for sequence in SEQUENCES
        for at, (command, expected), reply in _replies(address, sequence)
        if reply != expected and not _is_less_by_the_time(command, reply, expected, began)
    ]
    assert not differences, "\n".join(differences)


def _is_less_by_the_time(command: list[str], reply: Any, expected: Any, began: float) -> bool:
    """Return whether the reply is a key's time to live, and only the time since ``began`` (seconds
    of the monotonic clock) has gone from the expected one.
    """
    if command[0].upper() != "TTL" or not isinstance(reply, int) or reply < 0:
        return False
    return bool(0 <= expected - reply <= time.monotonic() - began + 1)


def _replies(
    address: str, sequence: list[tuple[list[str], Any]]
) -> Iterator[tuple[int, tuple[list[str], Any], Any]]:
    """Yield each command's place, the command with its expected reply, and the reply."""
    with RespClient(address) as client:
        keys = {word for command, _ in sequence for word in command if word.startswith("{t}")}
        client.call("DEL", "{t}", *keys)
        for at, (command, expected) in enumerate(sequence):
            words = [word.encode("latin-1") for word in command]
            yield at, (command, expected), _plain(client.call(*words))


def _plain(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        return {"error": str(reply)}
    if isinstance(reply, list):
        return [_plain(part) for part in reply]
    return reply.decode("latin-1") if isinstance(reply, bytes) else reply


def record(port: str) -> None:
    """Write the replies of the server at this port of 127.0.0.1."""
    address = f"127.0.0.1:{port}"
    lines = [
        json.dumps([(command, reply) for _, (command, _), reply in _replies(address, sequence)])
        for sequence in SEQUENCES
    ]
    RECORDED.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    record(sys.argv[1])
