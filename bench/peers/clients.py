"""Each system's Python client behind one face: what a row of the table asks of it.

A face has blocking methods and, with the same names and an ``a`` before, asyncio ones. Keys and
values are bytes. Every put returns when the system has acknowledged it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

PAGE_ROWS = 1_000
TIMEOUT_MS = 30_000
CONNECTIONS_MAX = 1_024  # of redis.asyncio to each server: 100 by default, and 256 tasks want more

Pairs = Sequence[tuple[bytes, bytes]]


class Face(ABC):
    """One client process's connections to one system."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None: ...
    @abstractmethod
    def put(self, key: bytes, value: bytes) -> None: ...
    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[Any]: ...
    @abstractmethod
    def put_many(self, pairs: Pairs) -> None: ...
    @abstractmethod
    def scan(self) -> Iterator[Any]:
        """Yield records with their values, all of them unless the caller stops."""

    @abstractmethod
    async def aopen(self) -> None:
        """Connect for asyncio, on the running loop."""

    @abstractmethod
    async def aclose(self) -> None: ...
    @abstractmethod
    async def aget(self, key: bytes) -> bytes | None: ...
    @abstractmethod
    async def aput(self, key: bytes, value: bytes) -> None: ...
    @abstractmethod
    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]: ...
    @abstractmethod
    async def aput_many(self, pairs: Pairs) -> None: ...


class KoinonFace(Face):
    """Koinon's clients; ``options`` are theirs."""

    def __init__(self, coordinators: str, **options: Any) -> None:
        import koinon

        self._coordinators = coordinators
        self._options = {"timeout_ms": TIMEOUT_MS, **options}
        self._client = koinon.connect(coordinators, **self._options)
        self._async: Any = None

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._client.get(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        self._client.put(key, value)

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        return list(self._client.get_many(keys))

    def put_many(self, pairs: Pairs) -> None:
        self._client.put_many(pairs).raise_for_errors()

    def scan(self) -> Iterator[Any]:
        return self._client.scan(page_rows=PAGE_ROWS)

    async def aopen(self) -> None:
        from koinon import aio

        self._async = await aio.connect(self._coordinators, **self._options)

    async def aclose(self) -> None:
        await self._async.close()

    async def aget(self, key: bytes) -> bytes | None:
        value: bytes | None = await self._async.get(key)
        return value

    async def aput(self, key: bytes, value: bytes) -> None:
        await self._async.put(key, value)

    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]:
        return list(await self._async.get_many(keys))

    async def aput_many(self, pairs: Pairs) -> None:
        (await self._async.put_many(pairs)).raise_for_errors()


class RedisFace(Face):
    """redis-py's cluster clients. ``wait``: how many replicas have to hold a put before it counts;
    the wait goes to the server that took the put, in the same pipeline where there is one.
    """

    def __init__(self, host: str, port: int, *, wait: int = 0) -> None:
        from redis.cluster import RedisCluster

        self._where = host, port
        self._wait = wait
        self._client: Any = RedisCluster(host=host, port=port)
        self._async: Any = None

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._client.get(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        self._client.set(key, value)
        if self._wait:
            node = self._client.get_node_from_key(key)
            self._check(self._client.wait(self._wait, TIMEOUT_MS, target_nodes=node))

    def _check(self, replicas: int) -> None:
        if replicas < self._wait:
            raise RuntimeError(f"{replicas} replicas have the write, not {self._wait}")

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        pipeline = self._client.pipeline()
        for key in keys:
            pipeline.get(key)
        return list(pipeline.execute())

    def put_many(self, pairs: Pairs) -> None:
        pipeline = self._client.pipeline()
        for key, value in pairs:
            pipeline.set(key, value)
        pipeline.execute()
        if self._wait:
            for node in self._client.get_primaries():
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

    async def aclose(self) -> None:
        await self._async.aclose()

    async def aget(self, key: bytes) -> bytes | None:
        value: bytes | None = await self._async.get(key)
        return value

    async def aput(self, key: bytes, value: bytes) -> None:
        await self._async.set(key, value)
        if self._wait:
            node = self._async.get_node_from_key(key)
            self._check(
                await self._async.execute_command("WAIT", self._wait, TIMEOUT_MS, target_nodes=node)
            )

    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]:
        pipeline = self._async.pipeline()
        for key in keys:
            pipeline.get(key)
        return list(await pipeline.execute())

    async def aput_many(self, pairs: Pairs) -> None:
        pipeline = self._async.pipeline()
        for key, value in pairs:
            pipeline.set(key, value)
        await pipeline.execute()
        if self._wait:
            for node in self._async.get_primaries():
                self._check(
                    await self._async.execute_command(
                        "WAIT", self._wait, TIMEOUT_MS, target_nodes=node
                    )
                )


class EtcdFace(Face):
    """etcd's API by gRPC, the calls in turn over connections to all its servers."""

    def __init__(self, addresses: Sequence[str]) -> None:
        import grpc

        from bench.peers.etcd import MESSAGES, stub

        self._messages = MESSAGES
        self._addresses = list(addresses)
        options = [("grpc.max_receive_message_length", 64 << 20)]
        self._stubs = [stub(grpc.insecure_channel(a, options)) for a in addresses]
        self._async: list[dict[str, Any]] = []
        self._channels: list[Any] = []
        self._turn = 0

    def _next(self, stubs: list[dict[str, Any]], call: str) -> Any:
        self._turn += 1
        return stubs[self._turn % len(stubs)][call]

    def _range(self, key: bytes) -> Any:
        return self._messages["RangeRequest"](key=key)

    def _gets(self, keys: Sequence[bytes]) -> Any:
        operation = self._messages["RequestOp"]
        return self._messages["TxnRequest"](
            success=[operation(request_range=self._range(key)) for key in keys]
        )

    def _puts(self, pairs: Pairs) -> Any:
        operation, put = self._messages["RequestOp"], self._messages["PutRequest"]
        return self._messages["TxnRequest"](
            success=[operation(request_put=put(key=k, value=v)) for k, v in pairs]
        )

    @staticmethod
    def _value(reply: Any) -> bytes | None:
        return reply.kvs[0].value if reply.kvs else None

    def get(self, key: bytes) -> bytes | None:
        return self._value(self._next(self._stubs, "Range")(self._range(key)))

    def put(self, key: bytes, value: bytes) -> None:
        self._next(self._stubs, "Put")(self._messages["PutRequest"](key=key, value=value))

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        reply = self._next(self._stubs, "Txn")(self._gets(keys))
        return [self._value(response.response_range) for response in reply.responses]

    def put_many(self, pairs: Pairs) -> None:
        self._next(self._stubs, "Txn")(self._puts(pairs))

    def scan(self) -> Iterator[Any]:
        first = b"\0"
        while True:
            request = self._messages["RangeRequest"](key=first, range_end=b"\0", limit=PAGE_ROWS)
            page = self._next(self._stubs, "Range")(request).kvs
            for record in page:
                yield record.key, record.value
            if len(page) < PAGE_ROWS:
                return
            first = page[-1].key + b"\0"

    async def aopen(self) -> None:
        import grpc

        from bench.peers.etcd import stub

        options = [("grpc.max_receive_message_length", 64 << 20)]
        self._channels = [grpc.aio.insecure_channel(a, options) for a in self._addresses]
        self._async = [stub(channel) for channel in self._channels]

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def aget(self, key: bytes) -> bytes | None:
        return self._value(await self._next(self._async, "Range")(self._range(key)))

    async def aput(self, key: bytes, value: bytes) -> None:
        await self._next(self._async, "Put")(self._messages["PutRequest"](key=key, value=value))

    async def aget_many(self, keys: Sequence[bytes]) -> list[Any]:
        reply = await self._next(self._async, "Txn")(self._gets(keys))
        return [self._value(response.response_range) for response in reply.responses]

    async def aput_many(self, pairs: Pairs) -> None:
        await self._next(self._async, "Txn")(self._puts(pairs))


KINDS: dict[str, type[Face]] = {"koinon": KoinonFace, "redis": RedisFace, "etcd": EtcdFace}
