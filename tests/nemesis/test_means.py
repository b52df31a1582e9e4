"""Tests of the nemesis itself: what it does to disks and clocks; skipped where it cannot."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nemesis import means
from tests.nemesis.disks import Disk

ROOT = Path(__file__).parents[2]
CLOCKS = """
import sys, time
from pathlib import Path
from tests.nemesis.member import Clocks

path, wanted = Path(sys.argv[1]), sys.argv[2]
real = time.clock_gettime
Clocks(path).install()
before = time.clock_gettime(time.CLOCK_BOOTTIME)
path.write_text(wanted)
deadline = time.monotonic() + 60
while abs(time.time() - real(time.CLOCK_REALTIME)) < 3000 and time.monotonic() < deadline:
    time.sleep(0.01)
for _ in range(20):  # two clocks are looked at: a busy machine may do else between
    wall = time.time() - real(time.CLOCK_REALTIME)
    began, shown = real(time.CLOCK_BOOTTIME), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert shown >= before
    time.sleep(0.2)
    rate = (time.clock_gettime(time.CLOCK_BOOTTIME) - shown) / (real(time.CLOCK_BOOTTIME) - began)
    found = round(wall), round(rate, 1)
    if found == (-3600, 0.5):
        break
print(*found)
"""


def needs(what: str) -> pytest.MarkDecorator:
    why = means.missing(what)
    return pytest.mark.skipif(bool(why), reason=f"not tested here: {what}: {why}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, "d")
    made.make()
    made.path.mkdir()
    yield made
    with contextlib.suppress(subprocess.CalledProcessError):
        made.close()


def write(path: Path, size: int) -> int:
    """Write and sync so many bytes; return the error's number, 0 if there was none."""
    try:
        with path.open("wb", buffering=0) as file:
            file.write(bytes(size))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno or -1
    return 0


@needs(means.MOUNTS)
def test_full_disk_has_room_again_when_it_is_emptied(disk: Disk) -> None:
    disk.fill()
    assert write(disk.path / "a", 50_000) == errno.ENOSPC
    disk.empty()
    assert write(disk.path / "a", 50_000) == 0


@needs(means.SHUTDOWN)
def test_disk_that_was_shut_down_keeps_what_was_synced(disk: Disk) -> None:
    assert write(disk.path / "synced", 5_000) == 0
    (disk.path / "not synced").write_bytes(bytes(5_000))
    disk.shut_down()
    assert write(disk.path / "later", 10) == errno.EIO
    disk.repair()
    assert (disk.path / "synced").read_bytes() == bytes(5_000)
    assert not (disk.path / "not synced").exists()
    assert write(disk.path / "later", 10) == 0


@needs(means.MOUNTS)
def test_directory_is_rolled_back_to_what_was_kept(disk: Disk) -> None:
    (disk.path / "a").write_text("old")
    disk.keep()
    (disk.path / "a").write_text("new")
    (disk.path / "b").write_text("new")
    disk.put_back()
    assert (disk.path / "a").read_text() == "old"
    assert not (disk.path / "b").exists()


@needs(means.MOUNTS)
def test_two_disks_change_places(disk: Disk, tmp_path: Path) -> None:
    other = Disk(tmp_path, "e")
    other.make()
    try:
        other.path.mkdir()
        (disk.path / "name").write_text("d")
        (other.path / "name").write_text("e")
        disk.swap_with(other)
        assert (disk.path / "name").read_text() == "e"
        assert (other.path / "name").read_text() == "d"
    finally:
        other.close()


def test_clocks_run_wrong_from_one_moment_on_and_never_back(tmp_path: Path) -> None:
    wanted = json.dumps({"wall_s": -3600, "lease_rate": 0.5})
    done = subprocess.run(
        [sys.executable, "-c", CLOCKS, str(tmp_path / "clocks"), wanted],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["-3600", "0.5"]
