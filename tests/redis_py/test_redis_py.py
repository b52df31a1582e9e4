"""redis-py's own tests pass, but for those that are listed with a reason."""

from __future__ import annotations

import subprocess

import pytest

from tests.redis_py.__main__ import run, unpacked


@pytest.mark.long
@pytest.mark.timeout(1_800)  # of five hundred tests, on a machine that does much else
def test_tests_of_redis_py_pass_or_are_listed() -> None:
    try:
        sources = unpacked()
    except subprocess.CalledProcessError:
        pytest.skip("the source distribution of redis-py cannot be fetched")
    done = run(sources, ["-q", "--tb=native"], capture=True)
    assert done.returncode == 0, done.stdout[-10_000:]
