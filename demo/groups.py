"""The act of the demo about consumer groups: programs share the partitions, and some are killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from demo.consumer import SESSION_MS, Consumer
from demo.play import RIDE_TIMEOUT_MS, Play, wait
from demo.replicas import CATCH_UP_S, POLL_S, all_in_sync
from koinon.client import Client
from koinon.operate.wording import count, duration_text
from koinon_proto.contract.errors import KoinonError

PREFIX = b"demo/g/"
KEYS = 100
ROWS = 4  # of the picture
SHARED_S = 30.0
COLOURS = {"A": "cyan", "B": "yellow", "C": "magenta"}


class CountingWriter(threading.Thread):
    """Writes rising numbers to a few keys, and keeps the acknowledged ones."""

    def __init__(self, client: Client) -> None:
        super().__init__(name="counting-writer")
        self.acknowledged: dict[bytes, int] = {}
        self.writes = 0
        self._client = client
        self._stopped = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._stopped.wait(0.003):
            number += 1
            key = PREFIX + b"%d" % (number % KEYS)
            try:
                self._client.put(key, b"%d" % number, timeout_ms=RIDE_TIMEOUT_MS)
            except KoinonError:
                continue  # of unknown fate: a later write of the key counts
            self.acknowledged[key] = number
            self.writes += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def consumers_share(play: Play) -> None:
    """Two consumers share a group, a third joins, one is killed, a node is killed."""
    stage, cluster = play.stage, play.cluster
    stage.act("Programs share the changes as a group: one joins, one is killed, a node is killed")
    consumers: dict[str, Consumer] = {}

    def join(name: str) -> None:
        consumers[name] = Consumer(cluster.coordinators, "demo")
        play.finally_.callback(consumers[name].kill)

    for name in ("A", "B"):
        join(name)
    _wait_shared(play, consumers, "AB", f"A (pid {consumers['A'].pid}) and B share the partitions")
    writer = CountingWriter(play.client)
    play.finally_.callback(writer.stop)
    writer.start()
    before = {name: set(consumers[name].partitions) for name in "AB"}
    join("C")
    _wait_shared(play, consumers, "ABC", "C joins, and takes a third from the others")
    kept = all(consumers[name].partitions <= before[name] for name in "AB")
    stage.check(kept, "no partition moved between A and B meanwhile")
    consumers["B"].kill()
    stage.event(f"kill -9 B; its session lasts {duration_text(SESSION_MS / 1000)}")
    _wait_shared(play, consumers, "AC", "A and C have taken over what B had")
    victim = cluster.node_names[-1]
    cluster.kill(victim)
    stage.event(f"kill -9 {victim}, a node")
    wait(3.0)
    cluster.restart(victim)
    cluster.wait_for(all_in_sync, timeout_s=CATCH_UP_S, what="every copy is in sync")
    writer.stop()
    _compare(play, consumers, writer)


def _compare(play: Play, consumers: Mapping[str, Consumer], writer: CountingWriter) -> None:
    def is_complete() -> bool:
        seen = [consumer.values for consumer in consumers.values()]
        return all(
            max(values.get(key, 0) for values in seen) >= number
            for key, number in writer.acknowledged.items()
        )

    complete = _until(is_complete)
    changes = sum(consumer.changes for consumer in consumers.values())
    play.stage.check(
        complete and not any(consumer.disorders for consumer in consumers.values()),
        f"{writer.writes:,} writes were acknowledged meanwhile, and {count(changes, 'change')} "
        "told: the newest of each key was processed, and of each key in order",
    )
    for consumer in consumers.values():
        consumer.kill()
    play.acknowledged |= {key: b"%d" % number for key, number in writer.acknowledged.items()}


def _wait_shared(play: Play, consumers: Mapping[str, Consumer], names: str, what: str) -> None:
    """Wait until these consumers own all partitions in even shares; show who owns which."""
    total = play.client.table().cluster.partition_count
    began = time.monotonic()

    def is_shared() -> bool:
        shares = [set(consumers[name].partitions) for name in names]
        sizes = list(map(len, shares))
        whole = sum(sizes) == total == len(set().union(*shares))
        return whole and max(sizes) - min(sizes) <= 1

    shared = _until(is_shared)
    play.stage.check(shared, f"{what}: {duration_text(time.monotonic() - began)}")
    owners = {p: name for name in names for p in list(consumers[name].partitions)}
    for start in range(0, total, total // ROWS):
        lanes = (owners.get(p, "·") for p in range(start, start + total // ROWS))
        play.stage.say("".join(f"[{COLOURS.get(lane, 'dim')}]{lane}[/]" for lane in lanes))


def _until(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds; return whether it does in time."""
    deadline = time.monotonic() + SHARED_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        wait(POLL_S)
    return True
