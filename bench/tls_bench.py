"""Measures what TLS and knowing the caller cost: a plain cluster and one with TLS, in turns.

    python -m bench.tls_bench [--rounds 3] [--seconds 1.5] [--nodes 1] [--records 100000] [--json]

One client process. Each figure is the median of the rounds; the ratio is that of the medians. With
TLS the client's user has a role, once with one grant and once with ten thousand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import koinon
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

Step = Callable[[koinon.Client, float], float]


def key(number: int) -> bytes:
    return b"key:%012d" % number


def lone(operation: Callable[[koinon.Client, int], Any]) -> Step:
    """Return a step that carries out one operation after the other: how many a second."""

    def step(client: koinon.Client, seconds: float) -> float:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            operation(client, done)
            done += 1
        return done / (time.perf_counter() - began)

    return step


def batches(operation: Callable[[koinon.Client, list[int]], Any]) -> Step:
    """Return a step of batches of 1,000, one after the other: rows a second."""

    def step(client: koinon.Client, seconds: float) -> float:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            operation(client, list(range(done, done + BATCH_ROWS)))
            done += BATCH_ROWS
        return done / (time.perf_counter() - began)

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
def clients(nodes: int, records: int) -> Iterator[dict[str, koinon.Client]]:
    """Run a plain cluster and one with TLS; give a client of each kind, on equal records."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(LocalCluster(nodes=nodes, coordinators=1))
        secure = stack.enter_context(LocalCluster(nodes=nodes, coordinators=1, tls=True))
        found = {"plain": stack.enter_context(koinon.connect(plain.coordinators, tls_bundle=""))}
        for label, file in user_files(secure).items():
            connected = koinon.connect(secure.coordinators, tls_bundle=file)
            found[f"TLS, {label}"] = stack.enter_context(connected)
        fill(found["plain"], records)
        fill(found["TLS, one grant"], records)
        yield found


def measure(rounds: int, seconds: float, nodes: int, records: int) -> dict[str, dict[str, float]]:
    """Return the medians by step and kind of client."""
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with clients(nodes, records) as found:
        for _ in range(rounds):
            for name, step in steps(records).items():
                for kind, client in found.items():
                    taken[name][kind].append(step(client, seconds))
    return {
        name: {kind: statistics.median(rates) for kind, rates in kinds.items()}
        for name, kinds in taken.items()
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each step")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    report = measure(options.rounds, options.seconds, options.nodes, options.records)
    if options.json:
        print(json.dumps(report))
        return
    for name, kinds in report.items():
        print(name)
        for kind, rate in kinds.items():
            print(f"  {kind:<20} {rate:>12,.0f}/s  {rate / kinds['plain']:.2f} of plain")


if __name__ == "__main__":
    main()
