"""What a process has of descriptors, threads and memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from koinon_proto.process.resources import Use, uses


def test_use_is_scarce_from_nine_tenths_of_a_limit_on() -> None:
    assert [used for used in (0, 89, 90, 200) if Use("x", used, 100).is_scarce] == [90, 200]
    assert not Use("x", 5, 0).is_scarce


def test_descriptors_are_counted_and_where_none_is_left_all_are_used() -> None:
    before = uses()[0]
    assert before.used == len(list(Path("/proc/self/fd").iterdir())) - 1
    assert any(use.name == "bytes of memory" and 0 < use.used < use.limit for use in uses())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (before.used + 20, hard))
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        found = uses()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    assert found == ("file descriptors", before.used + 20, before.used + 20)
    assert found.is_scarce
