"""Decides who may see the console: by the request's Host and Origin, and by a code. Pure but for
the randomness of codes.

Pages of other sites can make a browser send requests to this console. So the Host must be one of
the console's own names (otherwise a site could point its own name here), an Origin must be the
console itself, and every request other than a plain GET must have an Origin.

Whoever shows the code, or the token of a user of the cluster, gets a session, which the browser
keeps in a cookie that scripts cannot read. No code is required where the cluster has no TLS and the
address is loopback: every program of the machine can reach the cluster as well.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

SESSION_S_MAX = 12 * 3600
SESSIONS_MAX = 1_000
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
CODE_CHARS_MAX = 512


def new_code() -> str:
    """Return a new random code, in characters that are valid in a URL."""
    return secrets.token_urlsafe(24)


@dataclass(kw_only=True, slots=True)
class _Session:
    ends_s: float  # Unix seconds
    token: str  # token of the cluster user that logged in; '': login by the code


class Gate:
    """The access rules and the open sessions."""

    def __init__(self, *, names: Iterable[str], code: str) -> None:
        """``names``: the hosts by which browsers call the console, beside loopback names. ``code``:
        the code that browsers must show; '': none is required.
        """
        self._names = LOOPBACK | {name.lower() for name in names}
        self._code = code
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # by the value of the cookie

    @property
    def asks(self) -> bool:
        """True if a code is required."""
        return bool(self._code)

    def fault(self, method: str, scheme: str, host: str, origin: str | None) -> str:
        """Return why a request is refused, whatever its session; '' if it is allowed. ``origin`` is
        None if the browser sent none.
        """
        name = host.rpartition(":")[0] if _has_port(host) else host
        if name.lower() not in self._names:
            return f"this console is not called {printable_host(host)}: start it with --host-name"
        if origin is None:
            return "" if method in ("GET", "HEAD") else "the request has no Origin header"
        return (
            ""
            if origin.lower() == f"{scheme}://{host}".lower()
            else "the request comes from another site"
        )

    def is_code(self, shown: str) -> bool:
        """Return whether the text is this console's code."""
        return self.asks and hmac.compare_digest(shown.encode(), self._code.encode())

    def open_session(self, now_s: float, token: str = "") -> str:
        """Open a session, for the user with this token or ('') for a person with the code; return
        its cookie's value.
        """
        session = secrets.token_urlsafe(32)
        self._sessions[session] = _Session(ends_s=now_s + SESSION_S_MAX, token=token)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session

    def lets_in(self, session: str, now_s: float) -> bool:
        """Return whether a request with this session ('': none) may see the cluster."""
        if not self.asks:
            return True
        known = self._sessions.get(session)
        return known is not None and known.ends_s > now_s

    @property
    def tokens(self) -> set[str]:
        """The tokens of the cluster users with open sessions."""
        return {session.token for session in self._sessions.values() if session.token}

    def end_sessions_of(self, token: str) -> None:
        """End the sessions of the user with this token, who may no longer view the cluster."""
        ended = [name for name, session in self._sessions.items() if session.token == token]
        for name in ended:
            del self._sessions[name]


def _has_port(host: str) -> bool:
    port = host.rpartition(":")[2]
    return port.isdecimal()


def printable_host(host: str) -> str:
    """Return a Host for a message, shortened and without harmful characters."""
    return "".join(c for c in host[:64] if c.isalnum() or c in ".-:[]") or "so"
