"""Runs in a container of the cluster's network, for ``containers_bench``: writes to some
partitions, one write after the other, and notes the longest time that a write to each took.

It answers questions, a line of JSON each: ``{"do": "begin", "partitions": n}`` once its writes have
been under way for a moment, and ``{"do": "end", "seconds": s}`` after so many seconds more, with
``{"longest_s": {partition: seconds}, "failed": n}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from koinon import aio
from koinon_proto.contract.errors import KoinonError
from koinon_proto.partitioner import partitioner

QUIET_S = 1.5
PAUSE_S = 0.1
TIMEOUT_MS = 20_000


class Probes:
    """The writes."""

    def __init__(self, client: aio.AsyncClient) -> None:
        self._client = client
        self._longest_s: dict[int, float] = {}
        self._failed = 0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, partitions: int) -> dict[str, Any]:
        config = (await self._client.table()).cluster
        partition_of = partitioner(config.partitioner, config.partition_count).partition_of
        keys: dict[int, bytes] = {}
        number = 0
        while len(keys) < partitions:
            key = b"probe/%d" % number
            keys.setdefault(partition_of(key), key)
            number += 1
        self._stopping, self._failed = False, 0
        self._tasks = [asyncio.create_task(self._probe(p, key)) for p, key in keys.items()]
        await asyncio.sleep(QUIET_S)
        self._longest_s = dict.fromkeys(keys, 0.0)
        return {}

    async def end(self, seconds: float) -> dict[str, Any]:
        await asyncio.sleep(seconds)
        self._stopping = True
        await asyncio.gather(*self._tasks)
        return {"longest_s": self._longest_s, "failed": self._failed}

    async def _probe(self, partition_id: int, key: bytes) -> None:
        while not self._stopping:
            began_at = time.monotonic()
            try:
                await self._client.put(key, b"v", retry_unknown=True, timeout_ms=TIMEOUT_MS)
            except KoinonError:
                self._failed += 1
            took_s = time.monotonic() - began_at
            self._longest_s[partition_id] = max(took_s, self._longest_s.get(partition_id, 0.0))
            await asyncio.sleep(PAUSE_S)


async def main() -> None:
    loop = asyncio.get_running_loop()
    async with await aio.connect(os.environ["KOINON_COORDINATORS"]) as client:
        probes = Probes(client)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            question = json.loads(line)
            asked: dict[str, Any] = {"begin": probes.begin, "end": probes.end}
            print(json.dumps(await asked[question.pop("do")](**question)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
