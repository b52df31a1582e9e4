"""Arguments of ``connect``: options as keywords and in URLs, addresses from the environment."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
import traceback
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import koinon
from koinon.options import Options, parse
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import ONLY_RESP


def test_keywords_of_connect_are_the_options_of_a_client() -> None:
    names = [field.name for field in fields(koinon.ClientOptions)]
    assert [*get_type_hints(Options)] == names
    for connect in (koinon.connect, koinon.aio.connect):
        parameters = inspect.signature(connect).parameters
        assert [*parameters] == ["coordinators", *names]
        assert parameters["timeout_ms"].default == koinon.ClientOptions().timeout_ms


@pytest.mark.parametrize("connect", [koinon.connect, koinon.aio.connect])
def test_wrong_option_is_refused_with_a_suggestion(connect: Any) -> None:
    with pytest.raises(TypeError, match="no option 'timeout': did you mean 'timeout_ms'") as caught:
        connect("127.0.0.1:9", timeout=5)
    assert "batch_bytes" in str(caught.value)
    with pytest.raises(TypeError, match=r"no option 'zzz'\. There are coordinators, timeout_ms, "):
        connect("127.0.0.1:9", zzz=5)
    with pytest.raises(TypeError, match="timeout_ms must be int, not str"):
        connect("127.0.0.1:9", timeout_ms="5")


@pytest.mark.parametrize("name", ["coordinator", "hosts", "bootstrap_servers", "url", "addresses"])
def test_wrong_option_that_says_where_the_cluster_is_suggests_coordinators(name: str) -> None:
    with pytest.raises(TypeError, match=f"no option '{name}': did you mean 'coordinators'"):
        koinon.connect(**{name: "127.0.0.1:9"})  # type: ignore[arg-type]


def test_url_gives_addresses_and_options() -> None:
    url = "koinon://a:1,[::1]:2/?timeout_ms=700&retry_unknown=true&transport=grpc"
    addresses, options = parse(url, {})
    assert addresses == ("a:1", "[::1]:2")
    assert options == koinon.ClientOptions(timeout_ms=700, retry_unknown=True, transport="grpc")
    assert parse(url, {"timeout_ms": 9})[1].timeout_ms == 9
    assert parse("koinon://a:1/orders", {})[1].keyspace == "orders"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://a:1", "'redis://a:1': must be koinon://host:port,host:port/keyspace?option"),
        ("koinon://me:secret@a:1", "'koinon://a:1': must be koinon://"),
        ("koinon://a:1/orders/old", "'/orders/old' is not the name of a keyspace"),
        ("koinon://a:1?timeout=5", "no option 'timeout': did you mean 'timeout_ms'?"),
        ("koinon://a:1?timeout_ms=5s", "timeout_ms=5s: must be a whole number"),
        ("koinon://a:1?retry_unknown=maybe", "retry_unknown=maybe: must be true or false"),
        ("koinon://a:1?timeout_ms=0", "timeout_ms 0: must be above 0"),
        ("koinon://a", "must be host:port"),
        ("koinon://", "no coordinator address given"),
        ("koinon://[::1:7400", "URL 'koinon://[::1:7400': Invalid IPv6 URL"),
        ("koinon://me:secret@[::1:7400", "URL 'koinon://[::1:7400': Invalid IPv6 URL"),
        ("koinon://a:1?observer=print", "observer is a function"),
        ("koinon://a:1/orders?keyspace=old", "keyspace is given twice"),
        ("koinon://a:1?timeout_ms=5&timeout_ms=6", "timeout_ms is given twice"),
    ],
)
def test_url_that_makes_no_sense_is_refused(url: str, text: str) -> None:
    with pytest.raises(koinon.ConfigurationError, match=re.escape(text)) as caught:
        parse(url, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("addresses", [b"a:1", ["a:1", 5]])
def test_address_that_is_no_text_is_refused(addresses: Any) -> None:
    with pytest.raises(TypeError, match="addresses must be a str or a sequence of such"):
        parse(addresses, {})


def test_connect_without_addresses_asks_the_environment(
    cluster: FakeCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KOINON_URL", raising=False)
    with pytest.raises(koinon.ConfigurationError, match="KOINON_URL"):
        connect(None)
    monkeypatch.setenv("KOINON_URL", f"koinon://{cluster.seeds}?timeout_ms=20000")
    assert connect(None).get(b"k") is None


def test_async_connect_is_a_context_with_await_and_without(cluster: FakeCluster) -> None:
    async def run() -> None:
        async with koinon.aio.connect(cluster.seeds) as client:
            await client.put(b"k", b"v")
        with pytest.raises(koinon.ClientClosedError):
            await client.get(b"k")
        async with await koinon.aio.connect(cluster.seeds) as client:
            assert await client.get(b"k") == b"v"
        client = await asyncio.create_task(koinon.aio.connect(cluster.seeds))
        assert await client.get(b"k") == b"v"
        await client.close()
        with pytest.raises(koinon.NobodyListensError):
            async with koinon.aio.connect("127.0.0.1:9"):
                pass
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(koinon.aio.connect(cluster.seeds), 0)

    asyncio.run(run())
    assert asyncio.run(_closed(koinon.aio.connect(cluster.seeds)))


async def _closed(connecting: Any) -> bool:
    async with connecting as client:
        return bool(await client.get(b"k") == b"v")


@ONLY_RESP
async def test_repr_says_where_a_client_is_connected(cluster: FakeCluster) -> None:
    with koinon.connect(cluster.seeds) as client:
        assert repr(client) == f"<koinon.Client of {cluster.seeds}: cluster fake, 2 nodes>"
    assert repr(client) == f"<koinon.Client of {cluster.seeds}, closed>"

    async with koinon.aio.connect(cluster.seeds) as connected:
        assert repr(connected).startswith("<koinon.AsyncClient of 127.0.0.1:")


def test_dir_shows_what_is_public() -> None:
    assert [name for name in dir(koinon) if not name.startswith("__")] == sorted(
        name for name in koinon.__all__ if not name.startswith("__")
    )


def test_public_classes_are_named_by_the_package() -> None:
    public = [getattr(koinon, name) for name in koinon.__all__]
    classes = [one for one in public if isinstance(one, type)]
    assert {one.__module__ for one in classes} == {"koinon"}
    assert all(pickle.loads(pickle.dumps(one)) is one for one in classes)
    error = koinon.ResourceExhaustedError(resource="room", limit=3)
    assert traceback.format_exception_only(error) == [
        "koinon.ResourceExhaustedError: overloaded: room is at its limit of 3\n"
    ]
