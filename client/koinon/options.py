"""The options of ``connect`` and its addresses, given separately or in a URL."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from koinon.types import Observer
from koinon_proto.contract.addresses import check_address
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MAX_BATCH_BYTES, MAX_BATCH_ROWS

Transport = Literal["auto", "grpc"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Settings of one client; checked at construction."""

    timeout_ms: int = 5_000
    """The default timeout of calls."""
    retry_unknown: bool = False
    """Repeat unconditional writes of unknown fate instead of raising."""
    max_pending: int = 20_000
    """The limit of single operations in flight or queued; further ones raise ResourceExhaustedError
    at once.
    """
    batch_rows: int = 2_000
    """The limit of rows of a ``*_many`` call in one request."""
    batch_bytes: int = 4 * 1024 * 1024
    """The limit of keys' and values' bytes in one request."""
    batches_in_flight: int = 8
    """Chunks of one ``*_many`` call in flight at once."""
    singles_in_flight: int = 1
    """Batches of coalesced single operations in flight at once over gRPC, for each node and
    direction.
    """
    transport: Transport = "auto"
    """The protocol of single operations: RESP if the node offers it, else gRPC (``"auto"``); or
    always gRPC. All other requests go over gRPC.
    """

    keyspace: str = ""
    """The keyspace of the client's operations; by default ``default``. In a URL it is the path:
    ``koinon://host:port/vip``.
    """
    tls_bundle: str = ""
    """The identity file for TLS; by default the one that the environment names
    (``KOINON_TLS_BUNDLE``); without either the client connects without TLS.
    """
    token_file: str = ""
    """The file with the user's token; by default the one that the environment names
    (``KOINON_TOKEN_FILE``, or a token itself in ``KOINON_TOKEN``).
    """

    observer: Observer | None = None
    """Called with each operation (``koinon.Observation``) once it has ended, for metrics."""

    def __post_init__(self) -> None:
        if not (self.observer is None or callable(self.observer)):
            raise TypeError(f"observer must be callable, not {type(self.observer).__name__}")
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if field.name != "observer" and type(value) is not kind:
                raise TypeError(f"{field.name} must be {kind.__name__}, not {type(value).__name__}")
        if self.transport not in TRANSPORTS:
            names = " or ".join(repr(name) for name in TRANSPORTS)
            raise ConfigurationError(reason=f"transport {self.transport!r}: must be {names}")
        for name in ("timeout_ms", "max_pending", "batches_in_flight", "singles_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"{name} {getattr(self, name)}: must be above 0")
        if not 1 <= self.batch_rows <= MAX_BATCH_ROWS:
            raise ConfigurationError(
                reason=f"batch_rows {self.batch_rows}: must be 1 to {MAX_BATCH_ROWS}"
            )
        if not 1 <= self.batch_bytes <= MAX_BATCH_BYTES:
            raise ConfigurationError(
                reason=f"batch_bytes {self.batch_bytes}: must be 1 to {MAX_BATCH_BYTES}"
            )


ClientOptions.__module__ = "koinon"


class Options(TypedDict, total=False):
    """The fields of ``ClientOptions`` as the keywords of ``connect``."""

    timeout_ms: int
    retry_unknown: bool
    max_pending: int
    batch_rows: int
    batch_bytes: int
    batches_in_flight: int
    singles_in_flight: int
    transport: Transport
    keyspace: str
    tls_bundle: str
    token_file: str
    observer: Observer | None


URL_VARIABLE = "KOINON_URL"
"""The cluster of ``connect()`` without addresses."""

Connect = TypeVar("Connect", bound=Callable[..., object])


def with_options(connect: Connect) -> Connect:
    """Give ``connect`` a signature in which ``help`` and shells show the options as keywords."""
    signature = inspect.signature(connect)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
        for f in fields(ClientOptions)
    ]
    connect.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return connect


def parse(
    coordinators: str | Sequence[str] | None, options: Mapping[str, Any]
) -> tuple[tuple[str, ...], ClientOptions]:
    """Parse the arguments of ``connect``; return the addresses and the options. A keyword overrides
    the same option in a URL.

    Raises:
        ConfigurationError: no address is given, one is not host:port, or an option is invalid.
        TypeError: an option's name or type is wrong.
    """
    if unknown := options.keys() - _NAMES:
        name = min(unknown)
        raise TypeError(
            f"connect() has no option {name!r}{_instead(name, (COORDINATORS, *_NAMES))}"
        )
    if coordinators is None:
        coordinators = os.environ.get(URL_VARIABLE)
        if not coordinators:
            raise ConfigurationError(
                reason="where is the cluster? connect('host:port,host:port'), or set "
                f"{URL_VARIABLE} to koinon://host:port,host:port"
            )
    if isinstance(coordinators, str) and "://" in coordinators:
        coordinators, named = _parse_url(coordinators)
        options = {**named, **options}
    return parse_addresses(coordinators), ClientOptions(**options)


def _parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """Parse a URL such as ``koinon://host:port,host:port/keyspace?timeout_ms=500``; return its
    addresses and options.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # for instance brackets that do not match
        raise ConfigurationError(reason=f"URL {_shown(url)!r}: {error}") from None
    if parts.scheme != "koinon" or parts.username is not None or parts.fragment:
        raise ConfigurationError(
            reason=f"URL {_shown(url)!r}: must be koinon://host:port,host:port/keyspace?option=value"
        )
    options: dict[str, Any] = {}
    if keyspace := unquote(parts.path).strip("/"):
        if "/" in keyspace:
            raise ConfigurationError(reason=f"URL: {parts.path!r} is not the name of a keyspace")
        options["keyspace"] = keyspace
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name == "observer":
            raise ConfigurationError(reason="URL: observer is a function: give it in Python")
        if name not in _NAMES:
            named = [name for name in _NAMES if name != "observer"]
            raise ConfigurationError(
                reason=f"URL: there is no option {name!r}{_instead(name, named)}"
            )
        if name in options:
            raise ConfigurationError(reason=f"URL: {name} is given twice")
        options[name] = _value_of(name, text)
    return parts.netloc, options


def _value_of(name: str, text: str) -> Any:
    kind = type(_NAMES[name])
    try:
        return _FLAGS[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = "true or false" if kind is bool else "a whole number"
        raise ConfigurationError(reason=f"URL: {name}={text}: must be {expected}") from None


_NAMES: dict[str, Any] = {field.name: field.default for field in fields(ClientOptions)}
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


COORDINATORS = "coordinators"
"""The parameter of ``connect`` for the addresses; it is no option in a URL."""
_ADDRESS_WORDS = re.compile("addr|host|(?<!ob)server|seed|endpoint|node|url")
"""Words in the names that other clients use for that parameter."""


def _instead(name: str, names: Collection[str]) -> str:
    """Return a hint for an unknown option: the most similar name, or all names."""
    if COORDINATORS in names and _ADDRESS_WORDS.search(name.lower()):
        near = [COORDINATORS]
    else:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f": did you mean {near[0]!r}?" if near else "."
    return f"{meant} There are {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def _shown(url: str) -> str:
    """Return the URL without a possible password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def parse_addresses(coordinators: str | Sequence[str]) -> tuple[str, ...]:
    """Parse ``"host:port,host:port"``, or a sequence of such texts, into addresses.

    Raises:
        ConfigurationError: no address is given, or one is not host:port.
        TypeError: an address is no str.
    """
    parts = coordinators.split(",") if isinstance(coordinators, str) else list(coordinators)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(f"addresses must be a str or a sequence of such, not {coordinators!r}")
    addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not addresses:
        raise ConfigurationError(reason="no coordinator address given; expected host:port")
    for address in addresses:
        check_address("address", address)
    return addresses
