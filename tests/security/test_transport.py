"""Ports and channels: which understand one another, who is let in, and how identities change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon.certs.authority import Identity
from koinon.driver.rpc.reachability import probe_address
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.security import sockets
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import ANY_SERVER, Kind, node_name
from koinon_proto.security.transport import PLAIN, Dialing, Listening, Mode, dialing, listening
from koinon_proto.server import metrics_server
from tests.kit.addresses import free_address
from tests.kit.waiting import until
from tests.scraping import scrape
from tests.security.servers import Identities

CALL_S = 30.0
MODES = tuple(Mode)


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def others(tmp_path: Path) -> Identities:
    """Identities of an authority that is not known here."""
    (tmp_path / "others").mkdir()
    return Identities(tmp_path / "others")


@contextlib.asynccontextmanager
async def echo(way: Listening) -> AsyncIterator[str]:
    """Run a server of gRPC that answers with what it was sent; gives its address."""

    async def answer(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = way.add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)
        await asyncio.to_thread(way.close)


async def answered(way: Dialing, address: str, name: str = ANY_SERVER, size: int = 5) -> bool:
    """Return whether a call over a new channel is answered."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with way.aio_channel(address, name, options) as channel:
        call: Any = channel.unary_unary("/test/Echo")
        try:
            return len(await call(b"x" * size, timeout=CALL_S)) == size
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


def neighbours() -> list[tuple[Mode, Mode]]:
    return [(a, b) for a in MODES for b in MODES if abs(MODES.index(a) - MODES.index(b)) <= 1]


@pytest.mark.parametrize(("one", "other"), neighbours())
async def test_servers_of_neighbouring_modes_understand_one_another(
    one: Mode, other: Mode, identities: Identities
) -> None:
    dials = identities.listening(Kind.NODE, "n2", one).dialing()
    async with echo(identities.listening(Kind.NODE, "n1", other)) as address:
        assert await answered(dials, address, node_name("n1"), size=1_000_000)


@pytest.mark.parametrize("mode", [Mode.ALLOW, Mode.PREFER])
async def test_a_port_of_both_kinds_takes_both_and_tells_hosts_apart(
    mode: Mode, identities: Identities
) -> None:
    async with echo(identities.listening(Kind.NODE, "n1", mode)) as address:
        user = identities.dialing(Kind.USER, "root")
        assert await asyncio.gather(*[answered(user, address) for _ in range(8)]) == [True] * 8
        assert await asyncio.gather(*[answered(PLAIN, address) for _ in range(8)]) == [True] * 8


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.REQUIRE])
@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "all_proxy"])
async def test_channels_go_to_their_address_whatever_proxy_the_environment_names(
    variable: str, mode: Mode, identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, f"http://{free_address()}")  # where nothing listens

    way = identities.listening(Kind.NODE, "n1", mode)
    async with echo(way) as address:
        assert await answered(way.dialing(), address)
        with way.dialing().channel(address, ANY_SERVER, ()) as blocking:
            call: Any = blocking.unary_unary("/test/Echo")
            assert await asyncio.to_thread(call, b"x", timeout=CALL_S) == b"x"


async def test_tls_alone_is_taken_where_it_is_required(identities: Identities) -> None:
    async with echo(identities.listening(Kind.NODE, "n1")) as address:
        assert not await answered(PLAIN, address)
        found = await probe_address(address)
        assert "it takes no plain connection" in found.said
        assert "KOINON_TLS_BUNDLE" in found.said


async def test_strangers_and_wrong_names_are_refused_and_it_is_said_why(
    identities: Identities, others: Identities
) -> None:
    user = identities.dialing(Kind.USER, "root")
    async with echo(identities.listening(Kind.NODE, "n1")) as address:
        assert await answered(user, address, node_name("n1"))
        assert not await answered(user, address, node_name("n2"))
        stranger = others.dialing(Kind.USER, "root")
        assert not await answered(stranger, address)
        assert (
            "unable to get local issuer certificate"
            in (await probe_address(address, stranger)).said
        )
    async with echo(others.listening(Kind.NODE, "n1")) as address:
        assert not await answered(user, address)
    async with echo(Listening()) as address:
        assert not await answered(user, address)
        assert "does not speak TLS" in (await probe_address(address, user)).said


async def test_a_user_cannot_act_as_a_server(identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match="is of user root; expected is one of a node"):
        listening(Mode.REQUIRE, str(identities.file(Kind.USER, "root")), Kind.NODE)

    way = Listening(Mode.REQUIRE, BundleFile(identities.file(Kind.USER, "root")))
    async with echo(way) as address:
        assert not await answered(identities.dialing(Kind.NODE, "n1"), address)


async def test_an_identity_that_is_over_is_refused(identities: Identities) -> None:
    path = identities.directory / "over.pem"
    before = datetime.now(UTC) - timedelta(days=3)
    identities.authority.issue(Identity(kind=Kind.USER, name="root"), path, now=before, days=1)

    async with echo(identities.listening(Kind.NODE, "n1")) as address:
        assert not await answered(Dialing(BundleFile(path)), address)


async def test_identities_are_read_again_by_servers_and_by_who_connects(
    identities: Identities, others: Identities
) -> None:
    """Both go over to another authority, while a connection that stands goes on."""
    served, used = identities.file(Kind.NODE, "n1"), identities.file(Kind.USER, "root")
    way, user = listening("", str(served), Kind.NODE), Dialing(BundleFile(used))
    async with echo(way) as address, user.aio_channel(address, ANY_SERVER, ()) as standing:
        call: Any = standing.unary_unary("/test/Echo")
        await call(b"before", timeout=CALL_S)
        version = user.version
        others.file(Kind.NODE, "n1").replace(served)
        others.file(Kind.USER, "root").replace(used)
        await until(lambda: user.version > version)
        while not await answered(user, address):  # noqa: ASYNC110 (the server looks now and then)
            await asyncio.sleep(0.01)
        assert not await answered(identities.dialing(Kind.USER, "app"), address)
        assert await call(b"after", timeout=CALL_S) == b"after"


def test_an_identity_file_that_is_damaged_changes_nothing(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    path = identities.file(Kind.NODE, "n1")
    whole = path.read_bytes()
    file = BundleFile(path)
    bundle = file.current()
    for damaged in (b"", whole[:700], whole.replace(b"CERTIFICATE", b"TEXT")):
        path.write_bytes(damaged)
        file._look_at = 0.0
        assert file.current() is bundle
        with pytest.raises(ConfigurationError, match=re.escape(str(path))):
            BundleFile(path)
    assert caplog.text.count("identity file unusable") == 3
    assert "PRIVATE" not in caplog.text
    assert file.version == 1


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


WORDS = b"word" * 4
"""As long as the head of a TLS record: a port of TLS that waited for the rest would end at its
time-out.
"""


async def said(address: str, context: ssl.SSLContext | None) -> bytes:
    """Return what the port answers to a word; nothing if it does not let this caller in."""
    host, _, port = address.rpartition(":")
    name = ANY_SERVER if context else None
    try:
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=name
        )
        writer.write(WORDS)
        async with asyncio.timeout(CALL_S):
            return await reader.read(4)
    except (OSError, TimeoutError):
        return b""


@pytest.mark.parametrize("mode", MODES)
async def test_ports_of_sockets_take_what_their_mode_says(
    mode: Mode, identities: Identities, others: Identities
) -> None:
    way, address = identities.listening(Kind.NODE, "n1", mode), free_address()
    server = await sockets.serve(address, Echo, way)
    try:
        tls = identities.dialing(Kind.USER, "app").context()
        assert (await said(address, None) == b"word") is way.takes_plain
        assert (await said(address, tls) == b"word") is way.takes_tls
        assert await said(address, others.dialing(Kind.USER, "app").context()) == b""
        # Who shows no certificate is let in there, to show a token.
        nameless = ssl.create_default_context(cadata=BundleFile(
            identities.file(Kind.CLIENT)).current().trusted.decode())  # fmt: skip
        assert (await said(address, nameless) == b"word") is way.takes_tls
    finally:
        server.close()


async def test_noise_on_a_port_of_tls_ends_nothing(identities: Identities) -> None:
    way = identities.listening(Kind.NODE, "n1")
    address = free_address()
    server = await sockets.serve(address, Echo, way)
    async with echo(way) as door:
        for target in (address, door):
            host, _, port = target.rpartition(":")
            for noise in (b"", b"\x16", b"\x16\x03\x01\xff\xff" + os.urandom(500), b"PING\r\n"):
                with socket.create_connection((host, int(port))) as sock:
                    sock.sendall(noise)
        assert await answered(identities.dialing(Kind.USER, "app"), door)
        context = identities.dialing(Kind.USER, "app").context()
        assert await said(address, context) == b"word"
    server.close()


async def test_strangers_that_begin_and_say_nothing_keep_nobody_out(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKES_MAX", 8)
    monkeypatch.setattr(metrics_server, "_BEGINNING_MAX", 8)
    context = identities.dialing(Kind.USER, "app").context()
    assert context is not None

    way = identities.listening(Kind.NODE, "n1")
    address, metrics = free_address(), free_address()
    server = await sockets.serve(address, Echo, way)
    endpoint = metrics_server.MetricsEndpoint(metrics, way)
    endpoint.start(metrics_server.Metrics("node"))
    with contextlib.ExitStack() as strangers:
        for target in (address, metrics):
            host, _, port = target.rpartition(":")
            for _ in range(20):
                sock = socket.create_connection((host, int(port)))
                strangers.enter_context(sock).sendall(b"\x16\x03\x01")
        assert await said(address, context) == b"word"
        context.check_hostname = False
        found = await asyncio.to_thread(scrape, metrics, 10.0, context)
        assert found.text
    server.close()
    await asyncio.to_thread(endpoint.close)


def test_settings_that_contradict_one_another_are_refused(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="needs an identity file"):
        listening("require", "", Kind.NODE)
    with pytest.raises(ConfigurationError, match="must be off, allow, prefer or require"):
        listening("on", "", Kind.NODE)
    assert not listening("off", str(identities.file(Kind.NODE, "n1")), Kind.NODE).takes_tls
    with pytest.raises(ConfigurationError, match="No such file"):
        listening("", str(tmp_path / "none.pem"), Kind.NODE)
    token = tmp_path / "token"
    token.write_text("koinon_abc_def\n")
    with pytest.raises(ConfigurationError, match="a token is sent by TLS only"):
        dialing("", str(token))
    monkeypatch.setenv("KOINON_TLS_BUNDLE", str(identities.file(Kind.CLIENT)))
    monkeypatch.setenv("KOINON_TOKEN", "koinon_x_y")
    assert dialing().token == "koinon_x_y"
    assert dialing("", str(token)).token == "koinon_abc_def"
    token.write_text("two words")
    with pytest.raises(ConfigurationError, match="holds no token"):
        dialing("", str(token))
