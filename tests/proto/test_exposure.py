"""Tests of the addresses that a server warns of."""

from __future__ import annotations

import logging

import pytest

from koinon_proto.security.exposure import is_loopback, warn_of_strangers
from koinon_proto.security.transport import Listening, Mode


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7500", True),
        ("127.8.9.10:7500", True),
        ("[::1]:7500", True),
        ("localhost:7500", True),
        ("0.0.0.0:7500", False),
        ("[::]:7500", False),
        ("10.0.0.1:7500", False),
        ("no-such-host.invalid:7500", False),
    ],
)
def test_loopback_is_known(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("mode", "warned"),
    [(Mode.OFF, True), (Mode.ALLOW, True), (Mode.PREFER, True), (Mode.REQUIRE, False)],
)
def test_open_ports_are_warned_of_while_anybody_is_let_in(
    mode: Mode, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = {"--listen": "10.0.0.1:7500", "--redis-listen": "", "--metrics-listen": "[::1]:1"}
    found = warn_of_strangers(Listening(mode), addresses)
    assert found == (("10.0.0.1:7500",) if warned else ())
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert bool(texts) is warned
    assert all("flag=--listen address=10.0.0.1:7500" in text for text in texts)
    assert len(texts) == int(warned)
