"""Writers whose rows tell what was acknowledged before they were sent."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterable

from koinon.local import LocalCluster
from koinon_proto.contract.errors import KoinonError
from tests.kit.threads import Beside

WRITERS = 4
NUMBERS = struct.Struct(f"<{WRITERS}I")


def key_of(writer: int, number: int) -> bytes:
    return b"chain/%d/%07d" % (writer, number)


def latest_of(writer: int) -> bytes:
    return b"latest/%d" % writer


class CausalWriters(Beside):
    """Each writes one row after the other, numbered from 1, each once the one before was
    acknowledged. A row holds the newest number that the writer knew of each writer: of itself as it
    was told, of the others as it has read it. So all rows up to these numbers were acknowledged
    before the row was sent. Rows lie in whatever partition their keys have.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.acknowledged = [0] * WRITERS
        self.errors: list[KoinonError] = []
        self._clients = [cluster.client(timeout_ms=30_000) for _ in range(WRITERS)]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(writer,)) for writer in range(WRITERS)
        ]

    def _close(self) -> None:
        for client in self._clients:
            client.close()

    def _write(self, writer: int) -> None:
        client, rng = self._clients[writer], random.Random(writer)
        seen = [0] * WRITERS
        while not self._stop.is_set():
            number = seen[writer] + 1
            other = rng.randrange(WRITERS)
            try:
                if other != writer and (said := client.get(latest_of(other))) is not None:
                    seen[other] = max(seen[other], int(said))
                client.put(key_of(writer, number), NUMBERS.pack(*seen))
                seen[writer] = self.acknowledged[writer] = number
                client.put(latest_of(writer), b"%d" % number)
            except KoinonError as error:
                self.errors.append(error)
                if not error.retriable:
                    return  # of unknown fate: this chain has ended


def faults_of(rows: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the missing rows: each was acknowledged before a row that is there was sent."""
    newest = [0] * WRITERS  # that must be there, of each writer
    held: list[set[int]] = [set() for _ in range(WRITERS)]
    for key, value in rows:
        if key.startswith(b"chain/"):
            _, writer, number = key.split(b"/")
            held[int(writer)].add(int(number))
            for other, seen in enumerate(NUMBERS.unpack(value)):
                newest[other] = max(newest[other], seen)
        elif key.startswith(b"latest/"):
            writer = key.removeprefix(b"latest/")
            newest[int(writer)] = max(newest[int(writer)], int(value))
    return [
        f"writer {writer}: {number} of {newest[writer]}"
        for writer in range(WRITERS)
        for number in range(1, newest[writer] + 1)
        if number not in held[writer]
    ]
