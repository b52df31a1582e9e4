from __future__ import annotations

import contextvars
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process import logs
from koinon_proto.process.logs import (
    JsonFormatter,
    TextFormatter,
    configure_logging,
    event_and_fields,
)


def record(message: object, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("koinon.test", level, __file__, 1, message, args, None)


@pytest.mark.parametrize(
    ("message", "args", "event", "fields"),
    [
        ("node fenced node=%s epoch=%d", ("n1", 3), "node fenced", {"node": "n1", "epoch": 3}),
        ("done took_ms=%.1f", (1.25,), "done", {"took_ms": 1.2}),
        ("seen mask=%04x", (255,), "seen", {"mask": "00ff"}),
        ("plain event", (), "plain event", {}),
        ("not a template %s and key=%s", ("a", "b"), "not a template a and key=b", {}),
        ("half full at=%d%%", (50,), "half full at=50%", {}),
    ],
)
def test_event_and_fields_come_from_the_template(
    message: str, args: tuple[object, ...], event: str, fields: dict[str, object]
) -> None:
    found = event_and_fields(record(message, *args))
    if "%%" in message:
        assert found[0].startswith("half full")  # a percent sign stays readable
    else:
        assert found == (event, fields)


def test_text_format_quotes_what_is_not_one_plain_word() -> None:
    line = TextFormatter().format(record("refused why=%s id=%s empty=%s", 'a "b" c', "n1", ""))
    assert line.endswith('koinon.test refused why="a \\"b\\" c" id=n1 empty=""')
    assert " INFO " in line


def test_text_format_lets_no_field_upset_a_terminal_or_forge_a_line() -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e\n2026-01-01T00:00:00.000Z INFO x all is well"
    for template in ("node registered rack=%s", "an event that says %s by itself"):
        line = TextFormatter().format(record(template, hostile))
        assert line.isprintable()
        assert "]52;c;ZXZpbA==" in line


def test_text_format_indents_a_traceback_that_could_pass_for_lines() -> None:
    try:
        raise ValueError("\x1b[2J\n2026-01-01T00:00:00.000Z INFO x all is well")
    except ValueError:
        failed = record("work failed")
        failed.exc_info = sys.exc_info()
    first, *rest = TextFormatter().format(failed).split("\n")
    assert "work failed" in first
    assert all(line.isprintable() and line.startswith("  ") for line in rest)


def test_json_format_keeps_numbers_and_never_overwrites_its_own_keys() -> None:
    line = JsonFormatter().format(record("moved bytes=%d level=%s", 5, "high"))
    document = json.loads(line)
    assert document["event"] == "moved"
    assert document["bytes"] == 5
    assert (document["level"], document["level_"]) == ("INFO", "high")


def test_json_format_says_whose_process_it_is() -> None:
    formatter = JsonFormatter({"component": "node", "component_id": "n1"})
    document = json.loads(formatter.format(record("moved component=%s", "other")))
    assert (document["component"], document["component_id"]) == ("node", "n1")
    assert document["component_"] == "other"


def test_both_formats_name_the_request_that_is_handled_and_none_after_its_end() -> None:
    handled = request_ids.Handling("5f0c9a1e-2b/3")

    def lines() -> tuple[str, dict[str, object]]:
        line = TextFormatter().format(record("store full at=%d", 5))
        return line, json.loads(JsonFormatter().format(record("store full")))

    def handle() -> tuple[tuple[str, dict[str, object]], ...]:
        request_ids.handling.set(handled)
        during = lines()
        handled.sent = ""
        return during, lines()

    (text, document), (text_after, document_after) = contextvars.copy_context().run(handle)
    assert text.endswith("store full at=5 request_id=5f0c9a1e-2b call=3")
    assert (document["request_id"], document["call"]) == ("5f0c9a1e-2b", 3)
    assert "request_id" not in text_after
    assert "request_id" not in document_after


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_formats_carry_the_whole_exception(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        failed = record("work failed", level=logging.ERROR)
        failed.exc_info = sys.exc_info()
    assert "ValueError: boom" in formatter.format(failed)


@pytest.mark.parametrize(("log_format", "level"), [("xml", "INFO"), ("text", "LOUD")])
def test_configure_logging_unknown_setting_is_refused(log_format: str, level: str) -> None:
    with pytest.raises(ConfigurationError, match=r"xml|LOUD"):
        configure_logging(log_format, level)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Gives the process its logging back: it runs other tests, too."""
    root, encodings = logging.getLogger(), logging.getLogger("grpc._cython.cygrpc")
    handlers, level, filters = root.handlers[:], root.level, encodings.filters[:]
    yield
    root.handlers[:], encodings.filters[:] = handlers, filters
    root.setLevel(level)


@pytest.mark.parametrize(
    "text", ["Invalid encoding on x", "ExecuteBatchError raised in core by servicer method [m]"]
)
@pytest.mark.usefixtures("logging_as_before")
def test_what_callers_cause_in_grpc_is_logged_rarely_and_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(logs, "_lines_of_callers", logs.LinesPerSecond(1))
    configure_logging("text", "INFO")
    log = logging.getLogger("grpc._cython.cygrpc")
    for _ in range(5):
        try:
            b"\xff".decode()
        except UnicodeDecodeError:
            log.exception(text)
    log.error("another thing")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
