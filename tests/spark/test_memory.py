"""A task's memory follows its buffer, not what it writes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from koinon.local.servers import environment

MIB = 1 << 20


def test_task_grows_by_its_buffers_however_much_it_writes() -> None:
    """The buffer, its copy in order, and messages on both sides of the wire, for they share the
    process here.
    """
    command = [sys.executable, "-m", "tests.spark.memory_probe", "8MiB", "400"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=environment()
    )
    assert int(ended.stdout) < 200 * MIB


def test_task_faults_its_memory_in_once() -> None:
    program = """
        import resource
        from koinon.spark.writing import tasks

        size = 32 << 20

        def faults_of_blocks():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(20):
                b"x" * size
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        usual = faults_of_blocks()
        with tasks._freed_memory_kept():
            faults_of_blocks()
            print(usual, faults_of_blocks())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=environment()
    )
    usual, kept = map(int, ended.stdout.split())
    if usual < 20 * 32:
        pytest.skip("this system gives out memory in pages so large that they are not counted")
    assert 10 * kept < usual
