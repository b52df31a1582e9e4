"""Faults of the network between hosts, as rules in the hosts' own network namespaces.

Packets are dropped where they arrive, by their sender's address: so one direction of a link fails
alone, and a sender sees what it would of a dead link, which is nothing. Loss is a share of all
packets that arrive. Delay is netem's where the kernel has it; else a narrow link (tbf), on which
packets queue behind one another for up to the delay that was asked for.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection

from tests.integration.hosts import Hosts
from tests.nemesis import means

NARROW_RATE = "400kbit"
_RULES = """table ip nemesis {{}}
flush table ip nemesis
table ip nemesis {{
chain input {{
type filter hook input priority 0
{drops}
}}
}}
"""


class Links:
    """Between all hosts of one cluster. Each call brings the kernel's rules up to date."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._blocked: dict[str, list[str]] = {}  # senders by receiver, once for each fault
        self._loss: dict[str, int] = {}  # percent of what arrives, by host
        self._delayed: set[str] = set()

    def block(self, senders: Collection[str], receivers: Collection[str]) -> None:
        """Let nothing through from any of these hosts to any of those."""
        for receiver in receivers:
            self._blocked.setdefault(receiver, []).extend(s for s in senders if s != receiver)
            self._apply(receiver)

    def unblock(self, senders: Collection[str], receivers: Collection[str]) -> None:
        """Take back one such ``block``."""
        for receiver in receivers:
            for sender in senders:
                if sender != receiver:
                    self._blocked[receiver].remove(sender)
            self._apply(receiver)

    def lose(self, host: str, percent: int) -> None:
        """Lose so much of what arrives at the host (0: nothing)."""
        self._loss[host] = percent
        self._apply(host)

    def delay(self, host: str, ms: int) -> None:
        """Let what the host sends arrive later, by up to twice this."""
        if host in self._delayed:
            return
        how = f"netem delay {ms}ms {ms // 2}ms"
        if means.missing(means.NETEM):
            how = f"tbf rate {NARROW_RATE} burst 8kb latency {2 * ms}ms"
        self._in(host, "tc", *f"qdisc add dev eth0 root {how}".split())
        self._delayed.add(host)

    def hasten(self, host: str) -> None:
        """Take back ``delay``."""
        if host in self._delayed:
            self._in(host, "tc", *("qdisc", "del", "dev", "eth0", "root"))
            self._delayed.remove(host)

    def _apply(self, host: str) -> None:
        drops = ""
        if senders := sorted(set(self._blocked.get(host, ()))):
            addresses = ", ".join(map(self._hosts.address, senders))
            drops += f"ip saddr {{ {addresses} }} drop\n"
        if percent := self._loss.get(host, 0):
            drops += f"numgen random mod 100 < {percent} drop\n"
        self._in(host, "nft", "-f", "-", text=_RULES.format(drops=drops))

    def _in(self, host: str, *command: str, text: str | None = None) -> None:
        enter = ["nsenter", f"--net=/run/netns/{self._hosts.space(host)}"]
        subprocess.run([*enter, *command], input=text, text=True, check=True, capture_output=True)
