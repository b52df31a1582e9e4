"""Routers: which bytes of a key are hashed, and so which keys lie together in one partition.

A router is a pure, total function: it answers for every key, and never raises. A key that does not
have the form that a router looks for (no delimiter, no tag, no cell) is hashed whole. What is built
in, by the text that names it:

=====================  ===========================================================================
``whole``              the whole key
``until:<xx>[,<n>]``   all before the n-th byte ``xx`` (hexadecimal; n is 1 if it is left out)
``tag``                Redis's hash tag: between the first ``{`` and the first ``}`` after it, if
                       there is something
``first:<n>``          the first n bytes; of a shorter key all
``h3:<res>``           a key begins with an H3 cell (8 bytes, big-endian) of resolution ``res`` or
                       finer: the 8 bytes of its parent cell at ``res``
=====================  ===========================================================================

For ``h3`` a cell is known by its header (mode 1, a base cell from 0 to 121, a resolution of ``res``
at least) and by the digits that its parent keeps.

Each router has a scalar form and one for columns (``spans``), which says of every key where the
bytes to be hashed lie. Those of the built-in ones are in ``router_columns``, which needs NumPy and
is imported with the first column. Further routers are entry points of the group
``koinon.routers``: a name, and a callable that makes a ``KeyRouter`` of the parameters.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MAX_KEY_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Places = NDArray[np.int64]
    Spans = tuple[Bytes, Places, Places]

ENTRY_POINTS: Final = "koinon.routers"
UNTIL_MAX: Final = 16
H3_CELL_BYTES: Final = 8
_H3_FINEST: Final = 15
_H3_FIRST_BYTE: Final = 0x08  # mode 1 (a cell), all that is reserved 0
_H3_BASE_CELLS: Final = 122
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_TEXT_CHARS_MAX: Final = 100
_PARAMETERS: Final = re.compile(r"[A-Za-z0-9_.,=:-]*")


class KeyRouter(ABC):
    """Selects the bytes of a key that are hashed. Immutable; safe to share between threads."""

    text: str
    """Name and parameters, ``name[:parameters]``, in the form that is replicated."""

    examples: Sequence[bytes] = ()
    """Keys that this router treats as no other does. What it answers for them is a part of the
    fingerprint, whose own keys hardly show such a treatment. Fixed once a cluster has the router.
    """

    @abstractmethod
    def routing_bytes(self, key: bytes) -> bytes:
        """Return the bytes of ``key`` that are hashed."""

    def of_prefix(self, prefix: bytes) -> bytes | None:
        """Return the routing bytes that all keys with this prefix share; None if they may differ.

        None is always right: such a prefix is looked for in all partitions.
        """
        return None

    def spans(self, data: Bytes, starts: Places, ends: Places) -> Spans:
        """Return where the routing bytes of the keys ``data[starts[i]:ends[i]]`` lie, as another
        such triple. The keys lie in ascending order, one behind the other; there is at least one.
        """
        from koinon_proto.router_columns import gathered

        return gathered(self.routing_bytes, data, starts, ends)


class WholeRouter(KeyRouter):
    """The whole key."""

    text = "whole"

    def routing_bytes(self, key: bytes) -> bytes:
        return key

    def spans(self, data: Bytes, starts: Places, ends: Places) -> Spans:
        return data, starts, ends


class UntilRouter(KeyRouter):
    """All before the n-th delimiter, which is one byte."""

    def __init__(self, delimiter: int, n: int = 1) -> None:
        self.text = f"until:{delimiter:02x}" + (f",{n}" if n > 1 else "")
        self._delimiter = bytes((delimiter,))
        self._byte, self._n = delimiter, n

    def _end(self, key: bytes) -> int:
        """Return where the n-th delimiter is; -1 if there are fewer."""
        find, delimiter = key.find, self._delimiter
        at = find(delimiter)
        for _ in range(self._n - 1):
            if at < 0:
                break
            at = find(delimiter, at + 1)
        return at

    def routing_bytes(self, key: bytes) -> bytes:
        end = self._end(key)
        return key if end < 0 else key[:end]

    def of_prefix(self, prefix: bytes) -> bytes | None:
        end = self._end(prefix)
        return None if end < 0 else prefix[:end]

    def spans(self, data: Bytes, starts: Places, ends: Places) -> Spans:
        from koinon_proto.router_columns import until

        return until(data, starts, ends, self._byte, self._n)


class TagRouter(KeyRouter):
    """Redis's hash tag."""

    text = "tag"

    def routing_bytes(self, key: bytes) -> bytes:
        tag = self.of_prefix(key)
        return key if tag is None else tag

    def of_prefix(self, prefix: bytes) -> bytes | None:
        start = prefix.find(b"{") + 1
        if start:
            end = prefix.find(b"}", start)
            if end > start:
                return prefix[start:end]
        return None

    def spans(self, data: Bytes, starts: Places, ends: Places) -> Spans:
        from koinon_proto.router_columns import hash_tags

        return data, *hash_tags(data, starts, ends)


class FirstRouter(KeyRouter):
    """The first n bytes."""

    def __init__(self, n: int) -> None:
        self.text = f"first:{n}"
        self._n = n

    def routing_bytes(self, key: bytes) -> bytes:
        return key[: self._n]

    def of_prefix(self, prefix: bytes) -> bytes | None:
        return prefix[: self._n] if len(prefix) >= self._n else None

    def spans(self, data: Bytes, starts: Places, ends: Places) -> Spans:
        from koinon_proto.router_columns import first

        return first(data, starts, ends, self._n)


class H3Router(KeyRouter):
    """The parent, at one resolution, of the H3 cell at the key's start."""

    def __init__(self, resolution: int) -> None:
        self.text = f"h3:{resolution}"
        self.resolution = resolution
        self._finer = (1 << 3 * (_H3_FINEST - resolution)) - 1  # digits below the parent's: all 7
        ones = sum(1 << 3 * digit for digit in range(_H3_FINEST - resolution, _H3_FINEST))
        self._digits = ones  # the lowest bit of each digit that the parent keeps

    def _parent(self, cell: int) -> int:
        """Return the parent of a possible cell; 0 if it is no cell, or a coarser one."""
        if (
            cell >> 56 != _H3_FIRST_BYTE
            or (cell >> 52) & 15 < self.resolution
            or (cell >> 45) & 127 >= _H3_BASE_CELLS
            or cell & (cell >> 1) & (cell >> 2) & self._digits
        ):
            return 0
        return (cell & ~(15 << 52)) | self.resolution << 52 | self._finer

    def of_prefix(self, prefix: bytes) -> bytes | None:
        if len(prefix) < H3_CELL_BYTES:
            return None
        parent = self._parent(int.from_bytes(prefix[:H3_CELL_BYTES], "big"))
        return parent.to_bytes(H3_CELL_BYTES, "big") if parent else None

    def routing_bytes(self, key: bytes) -> bytes:
        parent = self.of_prefix(key)
        return key if parent is None else parent

    def spans(self, data: Bytes, starts: Places, ends: Places) -> Spans:
        from koinon_proto.router_columns import h3_parents

        return h3_parents(data, starts, ends, self.resolution, self._finer, self._digits)


WHOLE: Final = WholeRouter()
TAG: Final = TagRouter()


def _without(router: KeyRouter) -> Callable[[str], KeyRouter]:
    def make(parameters: str) -> KeyRouter:
        _require(not parameters, f"takes no parameters, not {parameters!r}")
        return router

    return make


def _until(parameters: str) -> KeyRouter:
    delimiter, comma, n = parameters.partition(",")
    _require(
        bool(re.fullmatch(r"[0-9A-Fa-f]{2}", delimiter)),
        f"needs the delimiter as two hexadecimal digits (until:2f is a slash), not {delimiter!r}",
    )
    return UntilRouter(int(delimiter, 16), _number(n, 1, UNTIL_MAX) if comma else 1)


def _first(parameters: str) -> KeyRouter:
    return FirstRouter(_number(parameters, 1, MAX_KEY_BYTES))


def _h3(parameters: str) -> KeyRouter:
    return H3Router(_number(parameters, 0, _H3_FINEST))


def _number(text: str, low: int, high: int) -> int:
    good = bool(re.fullmatch(r"[0-9]{1,3}", text)) and low <= int(text) <= high
    _require(good, f"needs a number from {low} to {high}, not {text!r}")
    return int(text)


BUILT_IN: Final[dict[str, Callable[[str], KeyRouter]]] = {
    "whole": _without(WHOLE),
    "until": _until,
    "tag": _without(TAG),
    "first": _first,
    "h3": _h3,
}


@lru_cache(maxsize=64)
def router(text: str) -> KeyRouter:
    """Return the router of this text, ``name[:parameters]``.

    Raises:
        ConfigurationError: no such router, or its parameters are wrong.
    """
    name, _, parameters = text.partition(":")
    try:
        _require(len(text) <= _TEXT_CHARS_MAX, f"has more than {_TEXT_CHARS_MAX} characters")
        _require(bool(_NAME.fullmatch(name)), "is no name of a router")
        make = BUILT_IN.get(name)
        if make is not None:
            return make(parameters)
        _require(bool(_PARAMETERS.fullmatch(parameters)), "has a character that cannot be there")
        made = _installed(name)(parameters)
        _check_made(made, text)
        return made
    except ConfigurationError as error:
        raise ConfigurationError(reason=f"router {text!r} {error.reason}") from None


def is_built_in(chosen: KeyRouter) -> bool:
    """Return whether the router comes with this package."""
    return type(chosen).__module__ == __name__


def entry_points(**chosen: str) -> Any:
    """Return the entry points of this group and name. What finds them is imported with the first:
    it brings packages for mail with it.
    """
    from importlib.metadata import entry_points

    return entry_points(**chosen)


def _installed(name: str) -> Callable[[str], KeyRouter]:
    found = list(entry_points(group=ENTRY_POINTS, name=name))
    _require(
        len(found) == 1,
        "is installed twice, by different packages"
        if found
        else f"is not known here; built in are {', '.join(BUILT_IN)}, others are installed as "
        f"entry points of the group {ENTRY_POINTS}",
    )
    make: Callable[[str], KeyRouter] = found[0].load()
    return make


def _check_made(made: object, text: str) -> None:
    if not isinstance(made, KeyRouter):
        raise ConfigurationError(reason=f"is made as {type(made).__name__}, not as a KeyRouter")
    actual = getattr(made, "text", None)
    _require(actual == text, f"calls itself {actual!r}")
    _require(
        all(isinstance(key, bytes) and 0 < len(key) <= MAX_KEY_BYTES for key in made.examples),
        "has an example that is no key",
    )


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ConfigurationError(reason=reason)
