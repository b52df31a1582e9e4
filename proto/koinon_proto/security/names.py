"""The names in certificates: a holder's identity (a URI), and the name by which a server is checked
(DNS).

Servers are dialled by address and checked by these names, so that a certificate outlives a change
of addresses. Both stand among a certificate's subject alternative names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from koinon_proto.contract.addresses import is_name

_SCHEME = "koinon"
ANY_SERVER = "server.koinon"
"""Each server's certificate has this name: for who knows an address and not who is there."""
COORDINATOR = "coordinator.koinon"
NODE = "node.koinon"


class Kind(StrEnum):
    """The kinds of holders that certificates have."""

    COORDINATOR = "coordinator"
    NODE = "node"
    USER = "user"
    CLIENT = "client"
    """Names no one: its holder shows a token."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who has shown who it is. ``serial`` is the certificate's, ``issued_at_s`` and
    ``valid_until_s`` are the unix times between which it holds; they are 0 and endless for who has
    shown a token.
    """

    kind: Kind
    name: str = ""
    serial: int = 0
    issued_at_s: int = 0
    valid_until_s: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else f"a {self.kind} without a token"

    def is_valid(self, now_s: float) -> bool:
        """Return whether its certificate is good at this unix time."""
        return self.issued_at_s <= now_s < self.valid_until_s


def node_name(node_id: str) -> str:
    """Return the name by which a node is checked."""
    return f"{node_id}.{NODE}".lower()


def member_name(member_id: str) -> str:
    """Return the name by which a coordinator is checked."""
    return f"{member_id}.{COORDINATOR}".lower()


def server_names(kind: Kind, name: str) -> tuple[str, ...]:
    """Return the DNS names of a server's certificate; none for users and clients."""
    match kind:
        case Kind.COORDINATOR:
            return member_name(name), COORDINATOR, ANY_SERVER
        case Kind.NODE:
            return node_name(name), NODE, ANY_SERVER
    return ()


def uri_of(kind: Kind, name: str = "") -> str:
    """Return the URI of a holder's identity."""
    return f"{_SCHEME}:{kind}:{name}" if name else f"{_SCHEME}:{kind}"


def who(uris: Iterable[str]) -> tuple[Kind, str] | None:
    """Return the kind and the name in a certificate's URIs; None if they have none, or more than
    one.
    """
    ours = [uri.split(":", 2) for uri in uris if uri.startswith(f"{_SCHEME}:")]
    if len(ours) != 1:
        return None
    kind, name = ours[0][1], ours[0][2] if len(ours[0]) > 2 else ""
    if kind not in _KINDS or bool(name) != (kind != Kind.CLIENT):
        return None
    if name and not is_name(name):
        return None
    return Kind(kind), name


_KINDS = frozenset(Kind)
