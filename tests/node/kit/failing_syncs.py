"""Makes the kernel refuse this process, and those that it starts, to sync a file: EIO.

Run with a directory and a durability, it writes a row to the store there, whose writer may not sync
any more, prints how that ended, and ends when the writer has.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import platform
import struct
import sys
from pathlib import Path

from koinon_node.storage.environment import DATA_DB
from koinon_node.storage.store import Store
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.errors import KoinonError
from tests.node.kit.groups import lone_writer

_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000, 0x7FFF0000
_NUMBERS = {"x86_64": (74, 75), "aarch64": (82, 83)}  # of fsync and fdatasync


def fail_syncs() -> None:
    """Let fsync and fdatasync fail from now on; files open for synchronous writes still sync."""
    fsync, fdatasync = _NUMBERS[platform.machine()]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),  # the number of the system call
            (_JUMP_IF_EQUAL, 1, 0, fsync),
            (_JUMP_IF_EQUAL, 0, 1, fdatasync),
            (_RETURN, 0, 0, _REFUSE | errno.EIO),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program)
    loaded = struct.pack("HxxxxxxQ", 5, ctypes.addressof(code))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.prctl(
        _SET_SECCOMP, _FILTER, loaded, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no filter of system calls is to be had")


async def main(directory: Path, durability: str) -> None:
    store = Store(
        StoreConfig(directory=directory, map_size_bytes=64 << 20, durability=durability)  # type: ignore[arg-type]
    )
    fail_syncs()
    lost = asyncio.Event()
    writer = lone_writer(store, lambda reason: lost.set())
    await writer.start()
    try:
        await writer.submit(((DATA_DB, [b"\0\0k"], [b"v"]),), 1, 10)
        print("acknowledged")
    except KoinonError as error:
        print(type(error).__name__)
    await lost.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
