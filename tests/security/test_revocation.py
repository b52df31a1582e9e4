"""Every node refuses what is revoked once the command has returned, even if the leader dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import koinon
from koinon.certs.authority import Authority, Identity
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon_proto.contract.access import Action, Effect, Grant, Role, User, make_token
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
)
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import dialing
from tests.conftest import ClusterFactory
from tests.kit.waiting import wait_until

FLAGS = ["--partitions", "16"]
KEYS = [b"app:%d" % n for n in range(24)]
"""So many that each node leads some of them."""
ROUNDS = 2


def test_token_that_is_revoked_while_the_leader_dies_is_refused_by_every_node(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=3, tls=True, setup=Setup(coordinator_flags=FLAGS))
    cluster.start()
    cluster.wait_ready()
    bundle = client_bundle(cluster, tmp_path)
    grant = Grant(effect=Effect.ALLOW, actions=(Action.READ, Action.WRITE), prefix=b"app:")
    with Admin(cluster.coordinators, timeout_ms=20_000, dialing=root(cluster)) as admin:
        admin.access.put_role(Role(name="app", grants=(grant,)))
        admin.access.put_user(User(name="app", roles=("app",)))
        for number in range(ROUNDS):
            token, text = make_token("app", created_s=1)
            admin.access.add_token(token)
            file = tmp_path / f"token{number}"
            file.write_text(text)
            with ExitStack() as stack:
                clients = [
                    stack.enter_context(
                        koinon.connect(
                            cluster.coordinators,
                            timeout_ms=60_000,
                            tls_bundle=str(bundle),
                            token_file=str(file),
                            transport=transport,
                        )
                    )
                    for transport in ("auto", "grpc")
                ]
                for client in clients:
                    for key in KEYS:  # at once: what is let in is let in by every node
                        client.put(key, b"x")
                readers = [Reader(client) for client in clients]
                for reader in readers:
                    stack.enter_context(reader.running())
                revoked_at = revoke(cluster, admin, token.id, kills_after_s=0.05 * number)
                for reader in readers:
                    reader.wait_for_more()
                    assert reader.let_in, "it read nothing before"
                    assert reader.last_let_in_at < revoked_at
        assert not admin.access.state().tokens


def root(cluster: LocalCluster) -> Any:
    return dialing(cluster.tls_bundle)


def client_bundle(cluster: LocalCluster, directory: Path) -> Path:
    path = directory / "client.pem"
    authority = Authority.open(Path(cluster.tls_bundle).parent)
    authority.issue(Identity(kind=Kind.CLIENT), path, now=datetime.now(UTC))
    return path


def revoke(cluster: LocalCluster, admin: Admin, token_id: str, *, kills_after_s: float) -> float:
    """Revoke the token while the coordinators' leader is killed; return when that was answered."""
    leader = next(c.member_id for c in admin.status().coordinators if c.leader)
    killing = threading.Timer(kills_after_s, cluster.kill, [leader])
    killing.start()

    def is_made() -> bool:
        """Again and again; one whose answer was lost may have been made."""
        try:
            admin.access.drop_token(token_id)
        except InvalidArgumentError:  # there is no such token: an earlier one dropped it
            admin.access.put_role(admin.access.state().roles[0])  # no news, but in force likewise
        except KoinonError:
            return False
        return True

    wait_until(is_made, "the token to be revoked")
    revoked_at = time.monotonic()
    killing.join()
    cluster.restart(leader)
    return revoked_at


class Reader:
    """Reads all keys again and again, and knows when it began the last read that was answered."""

    def __init__(self, client: koinon.Client) -> None:
        self._client = client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.let_in = self.rounds = 0
        self.last_let_in_at = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def wait_for_more(self) -> None:
        """Return when it has tried each key once more."""
        enough = self.rounds + 2
        wait_until(lambda: self.rounds >= enough, "it to try all keys")

    def _run(self) -> None:
        while not self._over.is_set():
            for key in KEYS:
                self._try(lambda key=key: self._client.get(key))  # type: ignore[misc]
            self.rounds += 1

    def _try(self, read: Callable[[], Any]) -> None:
        began_at = time.monotonic()
        try:
            read()
        except KoinonError:  # the call was not let in, or did not come to that
            return
        self.let_in += 1
        self.last_let_in_at = began_at
