"""A program on a terminal of its own, at whose other end the test sits."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from fcntl import ioctl


@contextlib.contextmanager
def on_terminal(
    arguments: Sequence[str],
    terminal: tuple[int, int],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program on the terminal (``pty.openpty()``), both of whose ends are closed after."""
    here, there = terminal
    program = subprocess.Popen(
        arguments,
        env=environment,
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        yield program
    finally:
        program.kill()
        program.wait()
        os.close(here)
        os.close(there)


def read_until(descriptor: int, wanted: bytes, timeout_s: float = 120.0) -> bytes:
    found = b""
    deadline = time.monotonic() + timeout_s
    while wanted not in found:
        left = deadline - time.monotonic()
        assert left > 0, found
        if select.select([descriptor], [], [], left)[0]:
            found += os.read(descriptor, 65_536)
    return found
