"""Connections that stand, when the authority of who opened them is trusted no more."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

import koinon
from koinon.certs import identity_files as files
from koinon.certs.authority import Authority, Identity
from koinon_proto.contract.access import Access, AccessState, User
from koinon_proto.security import authentication
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.security.trust import Trust, _path_end_s, verified_chain
from koinon_proto.v1 import table_pb2
from tests.kit.waiting import wait_until
from tests.security.servers import Servers, serving
from tests.security.test_grants import Resp

CALL_S = 60.0
GET_TABLE = "/koinon.v1.TableService/GetTable"
WATCH = "/koinon.v1.TableService/WatchTable"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with serving(tmp_path) as found:
        yield found


class Successor:
    """Another authority, which takes the place of the first one."""

    def __init__(self, servers: Servers, directory: Path) -> None:
        self._identities = servers.identities
        self._authority = Authority.create(directory / "next", now=datetime.now(UTC))

    def issue(self, kind: Kind, name: str, *, trusts_both: bool) -> None:
        """Replace an identity file, as a rotation of the authority does."""
        path = self._identities.file(kind, name)
        made = path.with_suffix(".next")
        bundle = self._authority.issue(
            Identity(kind=kind, name=name), made, now=datetime.now(UTC), overwrite=True
        )
        if trusts_both:
            both = (*bundle.authorities, *self._identities.authority.trusted)
            files.write_bundle(made, files.Bundle(
                key=bundle.key, certificate=bundle.certificate, authorities=both))  # fmt: skip
        made.rename(path)


SERVERS = ((Kind.COORDINATOR, "c1"), (Kind.NODE, "n1"))


def rotate(servers: Servers, directory: Path, *, users: tuple[str, ...] = ()) -> None:
    """Have the servers and these users go over to another authority."""
    successor = Successor(servers, directory)
    bundles = servers.bundles()
    for both in (True, False):
        before = [bundle.version for bundle in bundles]
        for kind, name in (*SERVERS, *((Kind.USER, user) for user in users)):
            successor.issue(kind, name, trusts_both=both)
        wait_until(
            lambda before=before: all(  # type: ignore[misc]
                bundle.current() and bundle.version > was
                for bundle, was in zip(bundles, before, strict=True)
            ),
            "the servers to look at their files",
        )
        time.sleep(1.2)  # others look twice a second


async def test_streams_end_and_calls_are_refused(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "PATIENCE_S", 0.0)
    dialing = servers.identities.dialing(Kind.USER, "root")
    async with dialing.aio_channel(servers.coordinator, ANY_SERVER, ()) as channel:
        watch: Any = channel.unary_stream(WATCH)
        watching = watch(b"", timeout=60.0)
        assert await watching.read() is not grpc.aio.EOF
        get: Any = channel.unary_unary(GET_TABLE)
        await get(b"", timeout=CALL_S)
        resp = Resp(servers, Kind.USER, "root")
        assert resp("PING") == b"PONG"
        assert resp("DBSIZE") == 0
        await asyncio.to_thread(rotate, servers, tmp_path)
        with suppress(grpc.aio.AioRpcError):
            while await watching.read() is not grpc.aio.EOF:
                pass  # the status comes only behind the messages
        assert await watching.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError, match="trusted no more") as refused:
            await get(b"", timeout=CALL_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(resp, "DBSIZE")
        resp.close()


def test_calls_go_on_for_a_while_and_clients_with_new_files_for_ever(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams do not go on, of which attendance is one: so clients connect anew in time."""
    monkeypatch.setattr(authentication, "PATIENCE_S", 5.0)
    dialing = servers.identities.dialing(Kind.USER, "other")
    servers.set_access(Access(AccessState(version=1, users=(User(name="other"),))))
    bundle = str(servers.identities.file(Kind.USER, "root"))
    with (
        dialing.channel(servers.coordinator, ANY_SERVER, ()) as channel,
        koinon.connect(servers.coordinator, tls_bundle=bundle) as by_redis,
        koinon.connect(servers.coordinator, tls_bundle=bundle, transport="grpc") as by_grpc,
    ):
        get: Any = channel.unary_unary(GET_TABLE)
        get(b"", timeout=CALL_S)
        by_grpc.put(b"k", b"v")
        rotate(servers, tmp_path, users=("root",))
        assert table_pb2.TableUpdate.FromString(get(b"", timeout=CALL_S)).table_version
        watch: Any = channel.unary_stream(WATCH)
        watching = watch(b"", timeout=CALL_S)
        with pytest.raises(grpc.RpcError) as refused:
            next(watching)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

        def is_refused() -> bool:
            assert by_redis.get(b"k") == by_grpc.get(b"k") == b"v"
            try:
                get(b"", timeout=CALL_S)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        wait_until(is_refused, "calls to be refused")
        assert by_redis.get(b"k") == by_grpc.get(b"k") == b"v"


def test_certificates_by_way_of_another_are_trusted_with_the_authority(tmp_path: Path) -> None:
    assert Trust().valid_until_s(b"anything") == math.inf
    assert verified_chain(None) == b""
    root, leaf, between = chain_of()
    text = {name: one.public_bytes(Encoding.PEM) for name, one in
            (("root", root), ("leaf", leaf), ("between", between))}  # fmt: skip
    other = Authority.create(tmp_path / "other", now=datetime.now(UTC))
    others = b"".join(one.public_bytes(Encoding.PEM) for one in other.trusted)
    assert _path_end_s(text["leaf"], text["leaf"] + text["between"], text["root"])
    assert _path_end_s(leaf.public_bytes(Encoding.DER), text["between"], others + text["root"])
    assert not _path_end_s(text["leaf"], b"", text["root"])
    assert not _path_end_s(text["leaf"], text["between"], others)
    assert not _path_end_s(b"nonsense", b"", others)


def chain_of(
    days: tuple[int, int, int] = (1, 1, 1),
) -> tuple[x509.Certificate, x509.Certificate, x509.Certificate]:
    """Return an authority, a certificate, and the one that is between the two. ``days``: for which
    the authority, the one between and the certificate are good.
    """
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("r", "b", "l")]
    now, made = datetime.now(UTC), []
    for at, by in ((0, 0), (1, 0), (2, 1)):
        builder = x509.CertificateBuilder(
            issuer_name=names[by],
            subject_name=names[at],
            public_key=keys[at].public_key(),
            serial_number=at + 1,
            not_valid_before=now,
            not_valid_after=now + timedelta(days=days[at]),
        )
        made.append(builder.sign(keys[by], hashes.SHA256()))
    root, between, leaf = made
    return root, leaf, between
