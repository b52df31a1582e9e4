"""Signals that ask a command to stop are remembered; a hangup that nohup ignores is not one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from koinon.cli.console.signals import Interrupt, StopSignals


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP], ids=lambda n: n.name
)
def test_work_is_asked_to_stop_once_and_then_interrupted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), number)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_hangup_that_is_ignored_stays_ignored(hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt, StopSignals() as stopping:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.asked
        assert not stopping.wait(0)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
