"""The scripts that a node keeps for EVALSHA. Pure."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha1

from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.scripts.compiler import Script, compiled
from koinon_node.resp.scripts.values import LuaError

SCRIPTS_MAX = 256
NO_SCRIPT = "NOSCRIPT No matching script. Please use EVAL."


class Scripts:
    """The recently used scripts, compiled, by their SHA1 in hexadecimal."""

    def __init__(self) -> None:
        # Compiled script and text, in the order of their last use.
        self._scripts: OrderedDict[bytes, tuple[Script, bytes]] = OrderedDict()

    def add(self, source: bytes) -> bytes:
        """Compile and keep a script, evicting the least recently used one; return its SHA1.

        Raises:
            RefusedError: the script does not compile.
        """
        name = sha1(source, usedforsecurity=False).hexdigest().encode()
        if name not in self._scripts:
            try:
                self._scripts[name] = compiled(source), source
            except LuaError as error:
                raise RefusedError(f"ERR Error compiling script (new function): {error}") from None
            if len(self._scripts) > SCRIPTS_MAX:
                self._scripts.popitem(last=False)
        return name

    def find(self, name: bytes) -> Script | None:
        """Return the script with this SHA1."""
        found = self._scripts.get(name.lower())
        if found is None:
            return None
        self._scripts.move_to_end(name.lower())
        return found[0]

    def source(self, name: bytes) -> bytes:
        """Return the text of the script with this SHA1.

        Raises:
            RefusedError: the cache does not have it.
        """
        if (found := self._scripts.get(name.lower())) is None:
            raise RefusedError(NO_SCRIPT)
        return found[1]

    def clear(self) -> None:
        """Forget all scripts."""
        self._scripts.clear()
