"""The act of the demo in which a client of Redis Cluster connects, beside Koinon's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import redis

from demo.play import Play
from koinon.operate.wording import count

INCREMENTS = 200
GETS = 500


def redis_client_comes_in(play: Play) -> None:
    """Let two clients read each other's writes, and increment the same record without a lost
    count.
    """
    stage, client = play.stage, play.client
    stage.act("A client of Redis Cluster comes in, as it is")
    host, _, port = play.cluster.redis_address("n1").rpartition(":")
    with redis.RedisCluster(host=host, port=int(port)) as guest:
        guest.set("demo/guest", "written by redis-py")
        client.put(b"demo/host", b"written by Koinon's client")
        stage.check(
            client.get(b"demo/guest") == b"written by redis-py"
            and guest.get("demo/host") == b"written by Koinon's client",
            f"redis-py, sent to {host}:{port}, and Koinon's client read what the other wrote",
        )
        for _ in range(INCREMENTS):
            guest.incr("demo/visits")
            client.increment(b"demo/visits")
        stage.check(
            client.get(b"demo/visits") == b"%d" % (2 * INCREMENTS),
            f"both counted on one record, {count(INCREMENTS, 'time')} each: "
            f"it is at {2 * INCREMENTS}",
        )
        theirs = _median_us(lambda: guest.get("demo/guest"))
    ours = _median_us(lambda: client.get(b"demo/guest"))
    stage.say(f"a lone get, median: redis-py {theirs:.0f} µs, Koinon's client {ours:.0f} µs")


def _median_us(get: Callable[[], object]) -> float:
    times = []
    for _ in range(GETS):
        began = time.perf_counter()
        get()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
