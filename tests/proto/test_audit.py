"""The audit log: what is noted, how lines are counted, how files follow one another."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.security import audit
from koinon_proto.security.audit import OK, Audit

GET, PUT = "/koinon.v1.KeyValue/BatchGet", "redis:SET"
DENIED = "permission_denied"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def note(log: Audit, method: str = PUT, outcome: str = DENIED, **more: Any) -> None:
    if log.wants(method, outcome):
        log.note("user a", "ipv4:127.0.0.1:1", method, outcome, **more)


def test_lines_are_numbered_over_files_that_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 2_000)
    monkeypatch.setattr(audit, "FILES_MAX", 3)
    monkeypatch.setattr(audit, "_REFUSALS_MAX", 1_000)
    path = tmp_path / "audit.jsonl"
    log = Audit(str(path))
    for _ in range(100):
        note(log)
    log.close()
    files = [tmp_path / f"audit.jsonl{end}" for end in (".2", ".1", "")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert all(file.stat().st_size <= 2_000 for file in files)
    kept = [line for file in files for line in lines(file)]
    assert [line["seq"] for line in kept] == list(range(101 - len(kept), 101))
    assert len({line["process"] for line in kept}) == 1


def test_data_is_noted_one_in_so_many_and_refusals_and_administration_always(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.jsonl"
    log = Audit(str(path), every=10)
    for _ in range(50):
        note(log, GET, OK)
    for _ in range(5):  # runs of commands that were answered together
        log.wants(PUT, OK, 3)
    assert [log.wants(PUT, OK, 10) for _ in range(3)] == [True] * 3
    note(log, GET, DENIED)
    note(log, "/koinon.v1.Admin/ChangeAccess", OK)
    note(log, "/koinon.v1.Admin/GetStatus", OK)  # asked all the time
    note(log, "/koinon.v1.Membership/Heartbeat", OK)
    log.close()
    noted = [(line["method"].rpartition("/")[2], line["outcome"]) for line in lines(path)]
    assert noted == [("BatchGet", OK)] * 5 + [("BatchGet", DENIED), ("ChangeAccess", OK)]


def test_without_a_choice_no_data_is_noted(tmp_path: Path) -> None:
    log = Audit(str(tmp_path / "audit.jsonl"))
    assert not any(log.wants(GET, OK) for _ in range(1_000))
    log.close()
    assert not Audit().wants(GET, DENIED)


def test_refusals_are_bounded_and_those_left_out_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1.0]
    monkeypatch.setattr("koinon_proto.process.logs.time.monotonic", lambda: now[0])
    path = tmp_path / "audit.jsonl"
    log = Audit(str(path))
    for _ in range(audit._REFUSALS_MAX + 30):
        note(log)
    now[0] = 2.5
    note(log)
    log.close()
    written = lines(path)
    assert len(written) == audit._REFUSALS_MAX + 1
    assert written[-1]["refusals_left_out"] == 30


def test_a_refusal_says_what_was_not_allowed_and_no_key(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = Audit(str(path))
    error = PermissionDeniedError(
        principal="user a", action="write", what="key b'secret'", rows=(1, 5)
    )
    note(log, error=error, request_id="1-2")
    log.close()
    (line,) = lines(path)
    assert (line["action"], line["rows_refused"], line["request_id"]) == ("write", 2, "1-2")
    assert "secret" not in path.read_text()


def test_keyspace_is_named_where_one_is_known_escaped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = Audit(str(path))
    note(log, keyspace="carts")
    note(log)
    note(log, keyspace="\n\x1b[2J\u202e" + "x" * 1_000)
    log.close()
    text = path.read_text()
    assert text.isascii()
    assert len(text) < 1_000
    assert "\x1b" not in text
    named, unnamed, strange = lines(path)
    assert named["keyspace"] == "carts"
    assert "keyspace" not in unnamed
    assert strange["keyspace"] == "\n\x1b[2J\u202e" + "x" * 58


def test_what_cannot_be_written_leaves_a_gap_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.jsonl"
    log = Audit(str(path))
    note(log)
    log.close()
    log = Audit(str(path))
    broken = log._file.stream
    log._file.stream = Path("/dev/full").open("w")  # noqa: SIM115 (a disk without room)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            note(log)
        log.close()
    if broken is not None:
        broken.close()
    assert [r.message for r in caplog.records if "audit log cannot be written" in r.message]
    assert "Logging error" not in capfd.readouterr().err
    assert len(lines(path)) == 1
