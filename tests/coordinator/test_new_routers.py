"""Routers from elsewhere: what the first cluster or keyspace with one asks of it."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from koinon_coordinator import __main__ as coordinator
from koinon_coordinator.core.cluster.commands import CreateKeyspace
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.keyspace_requests import decide_creation
from koinon_proto import routers
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.partitioner import partitioner, partitioner_of, sure_partitioner
from koinon_proto.process import logs
from koinon_proto.routers import KeyRouter
from koinon_proto.server import requests
from koinon_proto.v1 import table_pb2
from tests.coordinator.kit.states import row_of
from tests.coordinator.kit.support import bootstrapped, host_everything

BARE, TOLD = "bare", "told"
PROCESS_WIDE = (
    (coordinator, "protect_streams"),
    (coordinator, "only_for_owner"),
    (logs, "configure_logging"),
    (requests, "log_slow_after"),
    (coordinator, "collect_rarely"),
)
"""Settings of a coordinator's process that are not to be those of the tests'."""


class BareRouter(KeyRouter):
    """Names no examples."""

    text = BARE

    def routing_bytes(self, key: bytes) -> bytes:
        return key[:5] if key.startswith(b"shop7/") else key


class ToldRouter(BareRouter):
    text = TOLD
    examples = (b"shop7/1",)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {BARE: BareRouter, TOLD: ToldRouter}

    def found(*, group: str, name: str) -> list[Any]:
        kind = made.get(name)
        return [] if kind is None else [SimpleNamespace(load=lambda: lambda _parameters: kind())]

    monkeypatch.setattr(routers, "entry_points", found)
    routers.router.cache_clear()
    sure_partitioner.cache_clear()


def keyspace(router: str) -> Keyspace:
    message = table_pb2.Keyspace(name="vip", partition_count=4, partitioner=f"murmur2({router})")
    return convert.KEYSPACE.decode(message)


def state() -> ClusterState:
    made = bootstrapped([(1, 2), (2, 1)], nodes=3)
    host_everything(made)
    return made


def test_keyspace_with_a_router_that_names_no_examples_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"'bare' names no examples.*`examples`"):
        decide_creation(state(), keyspace(BARE))
    assert isinstance(decide_creation(state(), keyspace(TOLD)), CreateKeyspace)


def test_keyspace_that_was_made_with_such_a_router_before_goes_on() -> None:
    made = state()
    command = decide_creation(made, keyspace(TOLD))
    assert isinstance(command, CreateKeyspace)
    known = partitioner(f"murmur2({BARE})", 4)
    fingerprint = known.fingerprint
    before = replace(command.keyspace, partitioner=known.name, partitioner_fingerprint=fingerprint)
    made.apply(replace(command, keyspace=before))
    there = made.keyspaces.named("vip")
    assert partitioner_of(there).router is known.router
    assert decide_creation(made, keyspace(BARE)) == there
    assert row_of(made, there.base)


@pytest.mark.parametrize("router", [BARE, TOLD])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "there before"])
def test_coordinator_asks_for_examples_at_its_first_start_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    router: str,
    is_new: bool,
) -> None:
    begun = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        begun.append(serving)

    monkeypatch.setattr("uvloop.run", run)
    for module, name in PROCESS_WIDE:
        monkeypatch.setattr(module, name, lambda *_given, **_named: None)
    flags = ["--id", "c1", "--listen", "127.0.0.1:1", "--data", str(tmp_path / "c1")]
    flags += ["--members", "c1=127.0.0.1:1", "--router", router]
    monkeypatch.setattr(sys, "argv", ["koinon coordinator", *flags])
    if not is_new:
        (tmp_path / "c1").mkdir()
        (tmp_path / "c1" / "data.mdb").touch()
    if router == BARE and is_new:
        with pytest.raises(SystemExit) as ended:
            coordinator.main()
        assert ended.value.code == coordinator.EXIT_CONFIGURATION
        assert "router 'bare' names no examples" in capsys.readouterr().err
        assert not begun
    else:
        coordinator.main()
        assert len(begun) == 1
