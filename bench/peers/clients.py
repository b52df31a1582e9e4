"""Each system's Python client behind one interface, with the calls of the table's rows.

An interface has ``get``, ``put``, ``get_many``, ``put_many`` and ``scan``; asyncio methods with the
same names and a prefix ``a``; ``aopen`` and ``aclose`` around these. Keys and values are bytes. A
put returns when the system has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from bench.peers.servers import MESSAGES, stub

PAGE_ROWS = 1_000
TIMEOUT_MS = 30_000
# redis.asyncio's connections to each server: 100 by default, too few for 256 tasks
CONNECTIONS_MAX = 1_024

Face = Any
Pairs = Sequence[tuple[bytes, bytes]]


class KoinonFace:
    """Koinon's clients; ``options`` are those of ``connect``."""

    def __init__(self, coordinators: str, **options: Any) -> None:
        import koinon

        self._coordinators = coordinators
        self._options = {"timeout_ms": TIMEOUT_MS, **options}
        self._client = koinon.connect(coordinators, **self._options)
        self._async: Any = None
        self.get, self.put = self._client.get, self._client.put

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        return list(self._client.get_many(keys))

    def put_many(self, pairs: Pairs) -> None:
        self._client.put_many(pairs).raise_for_errors()

    def scan(self) -> Iterator[Any]:
        return self._client.scan(page_rows=PAGE_ROWS)

    async def aopen(self) -> None:
        from koinon import aio

        self._async = await aio.connect(self._coordinators, **self._options)
        self.aget, self.aput = self._async.get, self._async.put

    async def aclose(self) -> None:
        await self._async.close()

    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]:
        return list(await self._async.get_many(keys))

    async def aput_many(self, pairs: Pairs) -> None:
        (await self._async.put_many(pairs)).raise_for_errors()


class RedisFace:
    """redis-py's cluster clients. ``wait``: the number of replicas that must hold a put."""

    def __init__(self, host: str, port: int, *, wait: int = 0) -> None:
        from redis.cluster import RedisCluster

        self._where = host, port
        self._wait = wait
        self._client: Any = RedisCluster(host=host, port=port)
        self._async: Any = None
        self.get = self._client.get

    def put(self, key: bytes, value: bytes) -> None:
        self._client.set(key, value)
        if self._wait:
            node = self._client.get_node_from_key(key)
            self._check(self._client.wait(self._wait, TIMEOUT_MS, target_nodes=node))

    def _check(self, replicas: int) -> None:
        if replicas < self._wait:
            raise RuntimeError(f"{replicas} replicas have the write, not {self._wait}")

    @staticmethod
    def _filled(pipeline: Any, keys: Sequence[bytes], pairs: Pairs) -> Any:
        for key in keys:
            pipeline.get(key)
        for key, value in pairs:
            pipeline.set(key, value)
        return pipeline

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        return list(self._filled(self._client.pipeline(), keys, ()).execute())

    def put_many(self, pairs: Pairs) -> None:
        self._filled(self._client.pipeline(), (), pairs).execute()
        for node in self._client.get_primaries() if self._wait else ():
            self._check(self._client.wait(self._wait, TIMEOUT_MS, target_nodes=node))

    def scan(self) -> Iterator[Any]:
        keys = self._client.scan_iter(count=PAGE_ROWS)
        while page := list(islice(keys, PAGE_ROWS)):
            yield from zip(page, self.get_many(page), strict=True)

    async def aopen(self) -> None:
        from redis.asyncio.cluster import RedisCluster

        host, port = self._where
        self._async = RedisCluster(host=host, port=port, max_connections=CONNECTIONS_MAX)
        await self._async.initialize()
        self.aget = self._async.get

    async def aclose(self) -> None:
        await self._async.aclose()

    async def _await_replicas(self, node: Any) -> None:
        command = ("WAIT", self._wait, TIMEOUT_MS)
        self._check(await self._async.execute_command(*command, target_nodes=node))

    async def aput(self, key: bytes, value: bytes) -> None:
        await self._async.set(key, value)
        if self._wait:
            await self._await_replicas(self._async.get_node_from_key(key))

    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]:
        return list(await self._filled(self._async.pipeline(), keys, ()).execute())

    async def aput_many(self, pairs: Pairs) -> None:
        await self._filled(self._async.pipeline(), (), pairs).execute()
        for node in self._async.get_primaries() if self._wait else ():
            await self._await_replicas(node)


class EtcdFace:
    """etcd's API over gRPC; calls alternate between connections to all its servers."""

    def __init__(self, addresses: Sequence[str]) -> None:
        import grpc

        self._addresses = list(addresses)
        self._stubs = [stub(grpc.insecure_channel(a, self._options())) for a in addresses]
        self._async: list[dict[str, Any]] = []
        self._channels: list[Any] = []
        self._turn = 0

    @staticmethod
    def _options() -> list[tuple[str, int]]:
        return [("grpc.max_receive_message_length", 64 << 20)]

    def _next(self, stubs: list[dict[str, Any]], call: str) -> Any:
        self._turn += 1
        return stubs[self._turn % len(stubs)][call]

    @staticmethod
    def _gets(keys: Sequence[bytes]) -> Any:
        ranges = [MESSAGES["RangeRequest"](key=key) for key in keys]
        return MESSAGES["TxnRequest"](
            success=[MESSAGES["RequestOp"](request_range=one) for one in ranges]
        )

    @staticmethod
    def _puts(pairs: Pairs) -> Any:
        puts = [MESSAGES["PutRequest"](key=key, value=value) for key, value in pairs]
        return MESSAGES["TxnRequest"](
            success=[MESSAGES["RequestOp"](request_put=one) for one in puts]
        )

    @staticmethod
    def _value(reply: Any) -> bytes | None:
        return reply.kvs[0].value if reply.kvs else None

    def _values(self, reply: Any) -> list[Any]:
        return [self._value(response.response_range) for response in reply.responses]

    def get(self, key: bytes) -> bytes | None:
        return self._value(self._next(self._stubs, "Range")(MESSAGES["RangeRequest"](key=key)))

    def put(self, key: bytes, value: bytes) -> None:
        self._next(self._stubs, "Put")(MESSAGES["PutRequest"](key=key, value=value))

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        return self._values(self._next(self._stubs, "Txn")(self._gets(keys)))

    def put_many(self, pairs: Pairs) -> None:
        self._next(self._stubs, "Txn")(self._puts(pairs))

    def scan(self) -> Iterator[Any]:
        first = b"\0"
        while True:
            request = MESSAGES["RangeRequest"](key=first, range_end=b"\0", limit=PAGE_ROWS)
            page = self._next(self._stubs, "Range")(request).kvs
            for record in page:
                yield record.key, record.value
            if len(page) < PAGE_ROWS:
                return
            first = page[-1].key + b"\0"

    async def aopen(self) -> None:
        import grpc

        self._channels = [grpc.aio.insecure_channel(a, self._options()) for a in self._addresses]
        self._async = [stub(channel) for channel in self._channels]

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def aget(self, key: bytes) -> bytes | None:
        request = MESSAGES["RangeRequest"](key=key)
        return self._value(await self._next(self._async, "Range")(request))

    async def aput(self, key: bytes, value: bytes) -> None:
        await self._next(self._async, "Put")(MESSAGES["PutRequest"](key=key, value=value))

    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]:
        return self._values(await self._next(self._async, "Txn")(self._gets(keys)))

    async def aput_many(self, pairs: Pairs) -> None:
        await self._next(self._async, "Txn")(self._puts(pairs))


KINDS: dict[str, Face] = {"koinon": KoinonFace, "redis": RedisFace, "etcd": EtcdFace}
