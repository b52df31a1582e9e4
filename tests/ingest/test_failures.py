"""Messages for exceptions that Spark raised."""

from __future__ import annotations

import pytest

from koinon.ingest.failures import JobFailedError, JobRefusedError, explained, of_commit
from koinon_proto.contract.errors import (
    ConfigurationError,
    UnavailableError,
    UnknownKeyspaceError,
)

IN_A_TASK = """An error occurred while calling o98.save.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/somewhere/worker.py", line 1, in main
koinon_proto.contract.errors.{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException
"""


def test_typed_error_of_a_worker_is_all_that_is_told() -> None:
    text = IN_A_TASK.format(error="InvalidArgumentError: column id: null key in 1 row (row 0: {})")
    told = explained(RuntimeError(text))
    assert isinstance(told, JobRefusedError)
    assert str(told) == "column id: null key in 1 row (row 0: {})"


def test_options_have_the_names_of_the_command_line() -> None:
    error = "InvalidArgumentError: column id: repeats; name by option orderBy the column"
    assert "name by --order-by the column" in str(
        explained(RuntimeError(IN_A_TASK.format(error=error)))
    )
    told = explained(ConfigurationError(reason="option keyColumn: there is no column 'x'"))
    assert str(told) == "--key: there is no column 'x'"


def test_keyspace_that_is_gone_is_named_by_its_own_error() -> None:
    error = UnknownKeyspaceError(keyspace="carts")
    text = IN_A_TASK.format(error=f"UnknownKeyspaceError: {error}")
    for told in (explained(RuntimeError(text)), of_commit(error)):
        assert isinstance(told, UnknownKeyspaceError)
        assert str(told) == str(error)


def test_error_that_is_nobodys_input_is_a_failed_job() -> None:
    text = IN_A_TASK.format(error="UnavailableError: not served within 120 s")
    told = explained(RuntimeError(text))
    assert isinstance(told, JobFailedError)
    assert str(told) == "the job failed: not served within 120 s"


@pytest.mark.parametrize(
    "line",
    [
        "Caused by: org.apache.spark.SparkRuntimeException: [MALFORMED_CSV_RECORD] Malformed CSV "
        "record: 3,a SQLSTATE: KD000",
        "[MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records are detected in record "
        "parsing: 3,a.",
    ],
)
def test_malformed_row_is_shown_with_the_way_out(line: str) -> None:
    told = explained(RuntimeError(f"[FAILED_READ_FILE.NO_HINT] file a.csv\n{line}\n\tat x.y"))
    assert isinstance(told, JobRefusedError)
    assert str(told) == "a malformed row: 3,a; --bad-records DIR keeps such rows apart"


def test_error_of_sparks_own_is_told_in_a_line() -> None:
    text = "[PATH_NOT_FOUND] Path does not exist: s3a://x. SQLSTATE: 42K03\nmore\n\tat x.y"
    assert str(explained(RuntimeError(text))).endswith(
        "[PATH_NOT_FOUND] Path does not exist: s3a://x. SQLSTATE: 42K03"
    )
    assert str(explained(RuntimeError(""))) == "the job failed: RuntimeError"


def test_our_own_error_stays_itself() -> None:
    error = UnavailableError(reason="nobody")
    assert explained(error) is error
