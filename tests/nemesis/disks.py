"""A disk of its own for every member: ext4 in a file, mounted by a loop device.

What goes wrong with it goes wrong in the kernel: it is filled, frozen as for a backup (fsfreeze:
writes and syncs wait), or shut down (ext4's own ioctl: from then on everything fails with EIO, and
what was not synced is lost). Contents are wiped, kept and put back while nothing uses them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

SIZE_BYTES = 192 * 1024**2
_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSHING_THE_LOG = 2


class Disk:
    """``path`` is where the member keeps its data."""

    def __init__(self, directory: Path, name: str) -> None:
        self._image = directory / f"{name}.img"
        self._mount = directory / f"{name}.disk"
        self._kept = directory / f"{name}.kept"
        self._filler = self._mount / "filler"
        self._frozen = False
        self.path = self._mount / "data"

    def make(self) -> None:
        """Make and mount an empty disk."""
        self._mount.mkdir()
        with self._image.open("wb") as image:
            image.truncate(SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-b", "4096", "-J", "size=4", "-m", "0", str(self._image))
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop,noatime", str(self._image), str(self._mount))

    def unmount(self) -> None:
        if self._mount.is_mount():
            _run("umount", str(self._mount))

    def swap_with(self, other: Disk) -> None:
        """Each is mounted where the other one was. Nothing may use them."""
        for disk in (self, other):
            disk.unmount()
        self._image, other._image = other._image, self._image
        for disk in (self, other):
            disk.mount()

    def fill(self) -> None:
        """Leave no room at all."""
        with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            room = os.statvfs(self._mount)
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)
            filler.seek(0, os.SEEK_END)
            while filler.write(bytes(4096)):
                pass

    def empty(self) -> None:
        """Take away what ``fill`` has put there."""
        self._filler.unlink(missing_ok=True)

    def freeze(self) -> None:
        _run("fsfreeze", "--freeze", str(self._mount))
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            _run("fsfreeze", "--unfreeze", str(self._mount))
            self._frozen = False

    def shut_down(self) -> None:
        """Let every access fail from now on, until ``repair``."""
        mount = os.open(self._mount, os.O_RDONLY)
        try:
            flags = struct.pack("I", _WITHOUT_FLUSHING_THE_LOG)
            fcntl.ioctl(mount, _EXT4_IOC_SHUTDOWN, flags)
        finally:
            os.close(mount)

    def repair(self) -> None:
        """Mount what was synced before ``shut_down``. A copy of the image is: some other process's
        mount namespace may hold the dead file system on for as long as it likes.
        """
        self.unmount()
        copy = self._image.with_suffix(".copy")
        _run("cp", "--sparse=always", str(self._image), str(copy))
        copy.rename(self._image)
        self.mount()

    def wipe(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def keep(self) -> None:
        """Copy the data aside, for ``put_back``."""
        _run("cp", "-a", "--sparse=always", str(self.path), str(self._kept))

    def put_back(self) -> None:
        """Let the data be what it was at ``keep``."""
        self.wipe()
        _run("cp", "-a", "--sparse=always", str(self._kept), str(self.path))
        _run("sync", "--file-system", str(self.path))
        shutil.rmtree(self._kept)

    def close(self) -> None:
        """End every fault and unmount; the image stays with its directory."""
        self.thaw()
        self.unmount()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
