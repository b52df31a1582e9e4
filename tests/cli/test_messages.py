"""Messages of the command line for errors."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from koinon.cli.console.command import message_of
from koinon.cli.console.units import as_given
from koinon.operate.wording import duration_text
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    StorageFullError,
    UnavailableError,
)
from tests.kit.command_line import koinon_app

DAY_MS = 86_400_000


@pytest.mark.parametrize(
    "error", [StorageFullError(node_id="n1", reason="full"), UnavailableError(reason="nobody")]
)
def test_error_is_told_with_the_id_of_its_request_once(error: KoinonError) -> None:
    assert "[request" not in message_of(error)
    error.request_id = "5f0c9a1e-2b"
    assert message_of(error).endswith(" [request 5f0c9a1e-2b]")
    assert message_of(error).count("5f0c9a1e-2b") == 1


OPTIONS = {"ttl": "--ttl", "default_ttl": "--default-ttl", "max_value": "--max-value"}


@pytest.mark.parametrize(
    ("field", "reason", "limit", "actual", "shown"),
    [
        ("ttl_ms", "too long", 30 * DAY_MS, 90 * DAY_MS, "--ttl: too long (limit 30d, got 90d)"),
        (
            "default_ttl_ms",
            f"must be from 0 to {DAY_MS}",
            DAY_MS,
            36 * DAY_MS // 24,
            "--default-ttl: must be from 0 to 1d (limit 1d, got 36h)",
        ),
        ("max_value_bytes", "too long", 5, 6, "--max-value: too long (limit 5, got 6)"),
        ("ttl_ms of row 3", "too long", 5, 6, "ttl_ms of row 3: too long (limit 5, got 6)"),
        ("max_ttl_ms", "too long", 5, 6, "max_ttl_ms: too long (limit 5, got 6)"),
    ],
)
def test_error_speaks_of_options_in_the_units_that_are_typed(
    field: str, reason: str, limit: int, actual: int, shown: str
) -> None:
    error = InvalidArgumentError(field=field, reason=reason, limit=limit, actual=actual)
    error.request_id = "5f0c9a1e-2b"
    assert message_of(as_given(error, OPTIONS)) == f"{shown} [request 5f0c9a1e-2b]"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("put temp -5", "koinon put … -- -5"),
        ("put -55 x", "koinon put … -- -55"),
        ("get -7", "koinon get … -- -7"),
        ("where a -x", "koinon where … -- -x"),
        ("admin drain -3", "koinon admin drain … -- -3"),
        ("put temp x --tll 5m", ""),
        ("admin status -5", ""),
    ],
)
def test_argument_that_begins_with_a_dash_is_told_where_it_goes(arguments: str, hint: str) -> None:
    ended = CliRunner().invoke(koinon_app(), arguments.split(), prog_name="koinon")
    said = " ".join(ended.stderr.replace("│", " ").split())
    assert ended.exit_code == 2
    assert "No such option" in said
    assert (hint in said) if hint else ("behind '--'" not in said)


def test_version_is_a_command_too() -> None:
    commanded, asked = (
        CliRunner().invoke(koinon_app(), [word], prog_name="koinon")
        for word in ("version", "--version")
    )
    assert commanded.exit_code == asked.exit_code == 0
    assert commanded.stdout == asked.stdout
    assert commanded.stdout.startswith("koinon ")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.24, "240 ms"),
        (59.9, "59.9 s"),
        (245, "4 min 05 s"),
        (7_200, "2 h 00 min"),
        (86_399, "23 h 59 min"),
        (90 * 86_400 + 3 * 3_600, "90 d 03 h"),
    ],
)
def test_duration_has_its_two_greatest_units(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown
