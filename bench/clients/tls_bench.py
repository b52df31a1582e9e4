"""Measures what TLS and knowing the caller cost: a plain cluster and one with TLS, in turns.

    python -m bench.clients.tls_bench [--rounds 24] [--seconds 0.4] [--nodes 1] [--records 100000]
        [--only batches] [--json]

One client process. Rounds are short and many; each figure is that of their quietest quarter, and
ratios are of these. With TLS the client's user has a role, once with one grant and once with ten
thousand. Beside the rate stands the CPU that client and nodes used for an operation (a row, of
batches), and the rate that it comes to, of plain: where other work goes on, that is what can be
compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import koinon
from bench.peers.systems import cpu_s, node_pids
from koinon.certs.authority import Authority, Identity
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon_proto.contract.access import Action, Effect, Grant, Role, User
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import dialing

BATCH_ROWS = 1_000
VALUE = b"v" * 100
HEARD_S = 1.0  # nodes hear of users with their next heartbeat
GRANTS = {"one grant": 1, "10,000 grants": 10_000}

Step = Callable[[koinon.Client, float], int]
"""Works for so many seconds; returns how many operations, or rows, it has carried out."""


class Figure(NamedTuple):
    """``cpu_us``: of client and nodes, for one operation."""

    rate: float
    cpu_us: float


class Measured(NamedTuple):
    """A client, and the processes of the nodes that serve it."""

    client: koinon.Client
    pids: list[int]

    def figure(self, step: Step, seconds: float) -> Figure:
        """Carry out the step."""
        step(self.client, 0.05)  # it connects
        before, began = cpu_s([os.getpid(), *self.pids]), time.perf_counter()
        done = max(step(self.client, seconds), 1)
        elapsed_s = time.perf_counter() - began
        used_s = cpu_s([os.getpid(), *self.pids]) - before
        return Figure(done / elapsed_s, 1e6 * used_s / done)


def key(number: int) -> bytes:
    return b"key:%012d" % number


def lone(operation: Callable[[koinon.Client, int], Any]) -> Step:
    """Return a step that carries out one operation after the other."""

    def step(client: koinon.Client, seconds: float) -> int:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            operation(client, done)
            done += 1
        return done

    return step


def batches(operation: Callable[[koinon.Client, list[int]], Any]) -> Step:
    """Return a step of batches of 1,000, one after the other."""

    def step(client: koinon.Client, seconds: float) -> int:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            operation(client, list(range(done, done + BATCH_ROWS)))
            done += BATCH_ROWS
        return done

    return step


def steps(records: int) -> dict[str, Step]:
    return {
        "lone get": lone(lambda c, n: c.get(key(n * 7919 % records))),
        "lone put": lone(lambda c, n: c.put(key(n * 7919 % records), VALUE)),
        "get, batches": batches(lambda c, ns: c.get_many([key(n % records) for n in ns])),
        "put, batches": batches(lambda c, ns: c.put_many([(key(n % records), VALUE) for n in ns])),
    }


def fill(client: koinon.Client, records: int) -> None:
    for first in range(0, records, 10_000):
        rows = range(first, min(first + 10_000, records))
        client.put_many([(key(n), VALUE) for n in rows])


def user_files(cluster: LocalCluster) -> dict[str, str]:
    """Make a user for each number of grants; return their identity files."""
    root = Path(cluster.tls_bundle)
    authority, now = Authority.open(root.parent), datetime.now(UTC)
    files = {}
    with Admin(cluster.coordinators, dialing=dialing(str(root))) as admin:
        for label, count in GRANTS.items():
            name = f"bench-{count}"
            actions = (Action.READ, Action.WRITE, Action.SCAN)
            grants = [Grant(effect=Effect.ALLOW, actions=actions, prefix=b"key:")]
            grants += [
                Grant(effect=Effect.DENY, actions=actions, prefix=b"key:x%06d" % n)
                for n in range(count - 1)
            ]
            admin.access.put_role(Role(name=name, grants=tuple(grants)))
            admin.access.put_user(User(name=name, roles=(name,)))
            path = root.parent / f"{name}.pem"
            authority.issue(Identity(kind=Kind.USER, name=name), path, now=now)
            files[label] = str(path)
    time.sleep(HEARD_S)
    return files


@contextlib.contextmanager
def clients(nodes: int, records: int) -> Iterator[dict[str, Measured]]:
    """Run a plain cluster and one with TLS; give a client of each kind, on equal records."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(LocalCluster(nodes=nodes, coordinators=1))
        secure = stack.enter_context(LocalCluster(nodes=nodes, coordinators=1, tls=True))
        client = stack.enter_context(koinon.connect(plain.coordinators, tls_bundle=""))
        found = {"plain": Measured(client, node_pids(plain))}
        for label, file in user_files(secure).items():
            client = stack.enter_context(koinon.connect(secure.coordinators, tls_bundle=file))
            found[f"TLS, {label}"] = Measured(client, node_pids(secure))
        fill(found["plain"].client, records)
        fill(found["TLS, one grant"].client, records)
        yield found


def measure(
    rounds: int, seconds: float, nodes: int, records: int, only: str = ""
) -> dict[str, dict[str, Figure]]:
    """Return figures by step and kind of client; of steps whose names have ``only`` in them."""
    taken: dict[str, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    wanted = {name: step for name, step in steps(records).items() if only in name}
    with clients(nodes, records) as found:
        kinds = deque(found)
        for _ in range(rounds):
            for name, step in wanted.items():
                for kind in kinds:
                    taken[name][kind].append(found[kind].figure(step, seconds))
                kinds.rotate()  # so that none always comes after the same one
    return {
        name: {
            kind: Figure(
                statistics.quantiles([f.rate for f in figures], n=4)[2],
                statistics.quantiles([f.cpu_us for f in figures], n=4)[0],
            )
            for kind, figures in kinds.items()
        }
        for name, kinds in taken.items()
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each step")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--only", default="", help="steps with this in their names")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    report = measure(options.rounds, options.seconds, options.nodes, options.records, options.only)
    if options.json:
        print(json.dumps({n: {k: f._asdict() for k, f in ks.items()} for n, ks in report.items()}))
        return
    for name, kinds in report.items():
        print(name)
        plain = kinds["plain"]
        for kind, (rate, cpu_us) in kinds.items():
            print(
                f"  {kind:<20} {rate:>12,.0f}/s  {rate / plain.rate:.2f} of plain"
                f"  {cpu_us:>8,.1f} us of CPU  {plain.cpu_us / cpu_us:.2f}"
            )


if __name__ == "__main__":
    main()
