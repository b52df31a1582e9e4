"""Loads Redis from Spark for comparison: as users do it, and as fast as we could.

A job takes a DataFrame of two binary columns, key and value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

PIPELINE_ROWS = 1_000
MSET_ROWS = 1_000
MSETS_IN_FLIGHT = 4


def load_by_pipelines(frame: Any, host: str, port: int) -> None:
    """The usual job: each partition's rows, one by one, into pipelines of the cluster's client."""

    def write(rows: Iterable[Any]) -> None:
        from redis.cluster import RedisCluster

        with RedisCluster(host=host, port=port) as client:
            pipeline = client.pipeline()
            waiting = 0
            for row in rows:
                pipeline.set(bytes(row.key), bytes(row.value))
                waiting += 1
                if waiting == PIPELINE_ROWS:
                    pipeline.execute()
                    waiting = 0
            pipeline.execute()

    frame.foreachPartition(write)


def load_by_arrow(frame: Any, host: str, port: int) -> None:
    """The fastest job that we could write: it turns Arrow batches into MSETs of 1,000 rows, and
    sends several of them to one server before it reads the first answer.
    """

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import redis

        connection: Any = redis.Connection(host=host, port=port)  # type: ignore[no-untyped-call]
        connection.connect()
        in_flight = 0
        try:
            for batch in batches:
                keys, values = batch.column(0).to_pylist(), batch.column(1).to_pylist()
                for start in range(0, len(keys), MSET_ROWS):
                    pairs: list[bytes] = [b"MSET"] * (2 * len(keys[start : start + MSET_ROWS]) + 1)
                    pairs[1::2] = keys[start : start + MSET_ROWS]
                    pairs[2::2] = values[start : start + MSET_ROWS]
                    connection.send_packed_command(_packed(pairs))
                    in_flight += 1
                    if in_flight == MSETS_IN_FLIGHT:
                        connection.read_response()
                        in_flight -= 1
                yield batch.slice(0, 0)
            while in_flight:
                connection.read_response()
                in_flight -= 1
        finally:
            connection.disconnect()

    frame.mapInArrow(write, frame.schema).count()


def _packed(arguments: list[bytes]) -> list[bytes]:
    """Return a command in the server's protocol: each argument behind its length."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
    return [b"".join(parts)]
