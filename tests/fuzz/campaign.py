"""A cluster under fire: what is sent to it, and what must hold meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from koinon.local import LocalCluster, Setup
from koinon.local.processes import ProcessState
from koinon_proto.contract.errors import InternalError
from koinon_proto.contract.table import NodeStatus
from koinon_proto.server.rpc import error_of
from tests.fuzz.messages import OWN_PREFIX, PARTITIONS, Method, is_harmless, raw_messages

GROWTH_MIB_MAX = 250
_TIMEOUT_S = 0.5
_UNTYPED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


class Beside:
    """A client that writes and reads keys of its own, and knows what they must be.

    It repeats a write of unknown fate: on a machine that is short of CPU a lease ends now and then
    by itself. That a message ended one shows as another epoch of the node.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._client = cluster.client(timeout_ms=15_000)
        self._model: dict[bytes, bytes] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self.failures: list[str] = []
        self.operations = 0
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(0.005):
            key, value = OWN_PREFIX + b"%d" % (number % 97), b"%d" % number
            try:
                self._client.put(key, value, retry_unknown=True)
                self._model[key] = value
                looked = OWN_PREFIX + b"%d" % (number * 31 % 97)
                found, expected = self._client.get(looked), self._model.get(looked)
                if found != expected:
                    self.failures.append(f"{looked!r}: {found!r} is not {expected!r}")
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            number += 1
            self.operations += 2

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(30)
        self._client.close()


class Watch:
    """Knows a cluster's processes as they were, and says when they are not what they should be."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._pids = {name: cluster.pid(name) for name in cluster.names}
        self._table = self._nodes()
        self._memory = {name: self._resident_mib(name) for name in cluster.names}
        self._logs = dict.fromkeys(cluster.names, 0)
        self._is_first = True

    def check(self) -> None:
        """Raise AssertionError if a process has stopped, was fenced, or has logged a traceback.
        What was logged before the first call does not count.
        """
        for name, state in self._cluster.states.items():
            assert state is ProcessState.RUNNING, (name, state, self._log(name)[-3_000:])
            assert self._cluster.pid(name) == self._pids[name], name
            log = self._log(name)
            fresh, self._logs[name] = log[self._logs[name] :], len(log)
            assert "Traceback" not in fresh or self._is_first, (name, fresh[-3_000:])
        self._is_first = False
        assert self._nodes() == self._table

    def check_memory(self) -> None:
        """Raise AssertionError if a process has grown by much."""
        for name, before in self._memory.items():
            assert self._resident_mib(name) < before + GROWTH_MIB_MAX, name

    def _nodes(self) -> dict[str, tuple[int, NodeStatus]]:
        table = self._cluster.status().table
        assert table is not None
        return {n.node_id: (n.node_epoch, n.status) for n in table.nodes.values()}

    def _log(self, name: str) -> str:
        return self._cluster.log_path(name).read_text(errors="replace")

    def _resident_mib(self, name: str) -> int:
        lines = Path(f"/proc/{self._cluster.pid(name)}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


class Campaign:
    """Sends what it is given to all servers of a cluster of its own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._watch = Watch(cluster)
        self._channels = {
            name: grpc.insecure_channel(cluster.address(name)) for name in cluster.names
        }
        self.beside = Beside(cluster)
        self.sent = 0
        self.check()  # what was logged before is not the fuzzer's

    def fuzz(self, method: Method, examples: int, number: int) -> None:
        """Send the method so many messages; the same ones for the same number."""
        servers = [name for name in self._cluster.names if name[0] in method.servers]

        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(servers), st.lists(raw_messages(method), min_size=1, max_size=3))
        def send(server: str, raws: list[bytes]) -> None:
            harmless = [raw for raw in raws if is_harmless(method, raw)]
            if harmless:
                self.sent += 1
                self._send(self._channels[server], method, harmless)

        send()

    def check(self) -> None:
        """Raise AssertionError if a process has stopped, was fenced, or has logged a traceback,
        and the client beside has seen what it wrote.
        """
        self._watch.check()
        assert not self.beside.failures, self.beside.failures[:5]

    def check_memory(self) -> None:
        """Raise AssertionError if a process has grown by much."""
        self._watch.check_memory()

    def close(self) -> None:
        self.beside.close()
        for channel in self._channels.values():
            channel.close()

    def _send(self, channel: Any, method: Method, raws: list[bytes]) -> None:
        """Send one call; what comes back must be an answer or a typed error."""
        descriptor: Any = method.descriptor
        try:
            if descriptor.client_streaming:
                answers: Any = channel.stream_stream(method.path)(iter(raws), timeout=_TIMEOUT_S)
            else:
                answers = channel.unary_stream(method.path)(raws[0], timeout=_TIMEOUT_S)
            with contextlib.closing(_Cancelling(answers)):
                next(answers, None)
        except grpc.RpcError as failure:
            code, typed = failure.code(), error_of(failure)
            if isinstance(typed, InternalError) or (typed is None and code in _UNTYPED):
                raise AssertionError(f"{method.path} {raws}: {failure}") from None


class _Cancelling:
    """Cancels a call when it is closed."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()


@contextlib.contextmanager
def running() -> Iterator[Campaign]:
    """A campaign against three coordinators and three nodes."""
    flags = ["--partitions", str(PARTITIONS)]
    with LocalCluster(setup=Setup(coordinator_flags=flags)) as cluster:
        campaign = Campaign(cluster)
        try:
            yield campaign
        finally:
            campaign.close()
