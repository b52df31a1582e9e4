"""Counts, times and logs of a server's requests, and the ids that they have."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from koinon_proto.contract import cluster_errors, convert, errors, request_ids
from koinon_proto.contract.errors import ConditionFailedError, KoinonError, NotPrimaryError
from koinon_proto.contract.errors_gen import KINDS
from koinon_proto.contract.request_ids import CHARS_MAX, KEY, Metadata
from koinon_proto.server import request_metrics, requests, rpc
from koinon_proto.v1 import errors_pb2, kv_pb2

NOT_PRIMARY = NotPrimaryError(
    partition_id=1, primary="n2", primary_address="n2:1", primary_epoch=1, table_version=1
)


class AbortedError(Exception):
    """The error by which ``abort`` ends a call on the server."""


class Context:
    """A call's context."""

    def __init__(self, sent: str = "") -> None:
        self.metadata: Metadata = (("user-agent", "x"), *(((KEY, sent),) if sent else ()))

    def invocation_metadata(self) -> Metadata:
        return self.metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def send_initial_metadata(self, _: Metadata) -> None:
        pass

    async def abort(self, *_: Any) -> None:
        raise AbortedError


class SampleServicer:
    """A servicer as protoc would generate it."""


class Service(SampleServicer):
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.answer: Any = kv_pb2.BatchGetResponse()
        self.gate: asyncio.Event | None = None
        self.onward: Metadata = ()

    @rpc.typed_errors
    @rpc.bounded(1)
    async def Ask(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.onward = request_ids.onward()
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    @rpc.typed_stream
    async def Follow(self, request: Any, context: Any) -> None:  # noqa: N802
        assert self.gate is not None
        await self.gate.wait()


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(requests, "slow", requests.Slow())
    before = dict(requests.methods)
    requests.methods.clear()
    yield
    requests.methods.clear()
    requests.methods.update(before)


async def ask(service: Service, sent: str = "", request: Any = None) -> Any:
    request = kv_pb2.BatchGetRequest() if request is None else request
    try:
        return await service.Ask(request, Context(sent))
    except AbortedError:
        return None


def fresh(service: type[Service] = Service) -> Service:
    """A service of a class of its own: methods are found once for each."""
    kind = type("Service", (service,), {})
    made: Service = kind()
    return made


def samples() -> dict[tuple[str, ...], float]:
    """The exposition, parsed: values by name and the values of labels."""
    text = "".join(piece for family in request_metrics.families() for piece in family.pieces())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (kv_pb2.BatchGetResponse(), "ok"),
        (NOT_PRIMARY, "not_primary"),
        (errors.UnknownFateError(reason="x"), "unknown_fate"),
        (cluster_errors.DataDirectoryError(path="x", reason="y"), "internal"),
        (ZeroDivisionError(), "internal"),
        (
            kv_pb2.BatchGetResponse(
                refusals=[kv_pb2.Refusal(partition_id=1, error=convert.error_to_proto(NOT_PRIMARY))]
            ),
            "not_primary",
        ),
        (
            kv_pb2.BatchWriteResponse(
                row_errors=[
                    kv_pb2.RowError(
                        row=1,
                        error=convert.error_to_proto(
                            ConditionFailedError(expected_version=1, current_version=2)
                        ),
                    )
                ]
            ),
            "condition_failed",
        ),
    ],
)
async def test_request_is_counted_by_its_outcome_and_timed(answer: Any, outcome: str) -> None:
    service = fresh()
    service.answer = answer
    await ask(service)
    found = samples()
    assert found["koinon_requests_total", "Sample", "Ask", outcome] == 1
    assert found["koinon_request_duration_seconds_count", "Sample", "Ask"] == 1
    assert found["koinon_request_duration_seconds_bucket", "Sample", "Ask", "+Inf"] == 1
    assert 0 < found["koinon_request_duration_seconds_sum", "Sample", "Ask"] < 10
    assert found["koinon_requests_in_progress", "Sample"] == 0


def test_outcomes_are_the_names_of_errors_on_the_wire() -> None:
    kinds = {f.name for f in errors_pb2.Error.DESCRIPTOR.oneofs_by_name["kind"].fields}
    known = {rpc.outcome_of(kind.__new__(kind)) for kind in KINDS}
    assert known == kinds


async def test_request_under_way_shows_and_its_caller_may_go() -> None:
    service = fresh()
    service.gate = asyncio.Event()
    first = asyncio.create_task(ask(service))
    await asyncio.sleep(0)
    assert samples()["koinon_requests_in_progress", "Sample"] == 1
    await ask(service)  # one more than ``bounded`` lets in
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    found = samples()
    assert found["koinon_requests_in_progress", "Sample"] == 0
    assert found["koinon_requests_total", "Sample", "Ask", "cancelled"] == 1
    assert found["koinon_requests_total", "Sample", "Ask", "resource_exhausted"] == 1


async def test_stream_is_counted_while_it_lasts_and_is_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests.slow.after_s = 0.0

    service = fresh()
    service.gate = asyncio.Event()
    stream = asyncio.create_task(service.Follow(None, Context()))
    await asyncio.sleep(0)
    assert samples()["koinon_streams_in_progress", "Sample", "Follow"] == 1
    service.gate.set()
    await stream
    found = samples()
    assert found["koinon_streams_in_progress", "Sample", "Follow"] == 0
    assert not any(name[0].startswith("koinon_request") for name in found)
    assert not caplog.records, "to last long is what streams do"


# --- logs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (NOT_PRIMARY, "outcome=not_primary refusals=0"),
        (
            kv_pb2.BatchGetResponse(
                refusals=[kv_pb2.Refusal(partition_id=1, error=convert.error_to_proto(NOT_PRIMARY))]
            ),
            "outcome=not_primary refusals=1",
        ),
    ],
)
async def test_refusal_is_logged_for_who_debugs(
    answer: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = fresh()
    service.answer = answer
    with caplog.at_level(logging.DEBUG, "koinon_proto.server.requests"):
        await ask(service)
    assert "request ended method=Sample/Ask took_ms=" in caplog.text
    assert words in caplog.text
    assert str(NOT_PRIMARY) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "koinon_proto.server.requests"):
        await ask(service)
    assert not caplog.records


async def test_slow_request_is_logged_and_no_more_than_some_of_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = kv_pb2.BatchGetRequest(keys=[b"secret", b"b"])
    service = fresh()
    requests.log_slow_after(0)
    await ask(service, request=request)
    assert not caplog.records
    requests.slow.after_s = 0.0
    for _ in range(requests.SLOW_LINES_MAX + 3):
        await ask(service, request=request)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == requests.SLOW_LINES_MAX
    assert lines[0].startswith("slow request method=Sample/Ask took_ms=")
    assert f"outcome=ok rows=2 bytes_in={request.ByteSize()} bytes_out=0" in lines[0]
    assert "secret" not in lines[0]
    requests.slow._second -= 1.0
    await ask(service)
    assert caplog.records[-1].getMessage().endswith(" unlogged=3")


# --- ids ------------------------------------------------------------------------------------------


def test_fresh_ids_differ_in_a_forked_process_too() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, request_ids.fresh().encode())
        os._exit(0)
    os.waitpid(child, 0)
    ids = [os.read(reading, 100).decode(), request_ids.fresh(), request_ids.fresh()]
    assert len({*ids, *(name.rpartition("-")[0] for name in (ids[0], ids[1]))}) == 5
    assert all(request_ids.cleaned(name) == name for name in ids)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("order-4711", "order-4711"),
        ("a" * 100, "a" * CHARS_MAX),
        ("x\n2026 ERROR all lost", "x?2026?ERROR?all?lost"),
        ("ümlaut\x7f", "?mlaut?"),
        ("", ""),
    ],
)
def test_id_can_neither_end_a_line_nor_fill_a_log(text: str, cleaned: str) -> None:
    assert request_ids.cleaned(text) == cleaned


@pytest.mark.parametrize(
    ("sent", "fields", "onward"),
    [
        ("5f0c9a1e-2b/3", {"request_id": "5f0c9a1e-2b", "call": 3}, "5f0c9a1e-2b/3"),
        ("foreign", {"request_id": "foreign"}, "foreign"),
        ("a/b/7", {"request_id": "a/b", "call": 7}, "a/b/7"),
        ("a b/7", {"request_id": "a?b", "call": 7}, "a?b/7"),
        ("x/12345678901", {"request_id": "x/12345678901"}, "x/12345678901"),
        (f"{'y' * 500}/1", {"request_id": "y" * 64, "call": 1}, f"{'y' * 64}/1"),
    ],
)
async def test_id_that_came_is_logged_and_passed_on(
    sent: str, fields: dict[str, Any], onward: str
) -> None:
    seen: list[dict[str, Any]] = []

    class Logging(Service):
        @rpc.typed_errors
        async def Ask(self, request: Any, context: Any) -> Any:  # noqa: N802
            seen.append(request_ids.log_fields())
            self.onward = request_ids.onward()
            return self.answer

    service = fresh(Logging)
    await ask(service, sent)
    assert seen == [fields]
    assert service.onward == ((KEY, onward),)


def test_call_for_no_request_gets_an_id_of_its_own() -> None:
    (first,), (second,) = request_ids.onward(), request_ids.onward()
    assert first[0] == second[0] == KEY
    assert first[1] != second[1]


async def test_task_that_outlives_its_request_does_not_speak_in_its_name() -> None:
    ended = asyncio.Event()

    async def outlive() -> dict[str, Any]:
        await ended.wait()
        return {**request_ids.log_fields()}

    class Spawning(Service):
        task: asyncio.Task[dict[str, Any]]

        @rpc.typed_errors
        async def Ask(self, request: Any, context: Any) -> Any:  # noqa: N802
            type(self).task = asyncio.create_task(outlive())
            return self.answer

    service = fresh(Spawning)
    await ask(service, "5f0c9a1e-2b/1")
    ended.set()
    assert await service.task == {}  # type: ignore[attr-defined]


def test_error_of_a_server_has_no_id() -> None:
    error: KoinonError = NOT_PRIMARY
    assert error.request_id == ""


async def test_handler_that_outlives_its_server_is_cancelled_and_no_error_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = fresh()
    service.answer = grpc.aio.BaseError("Server already stopped.")
    with pytest.raises(asyncio.CancelledError):
        await ask(service)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    service.answer = grpc.aio.BaseError("something else")
    await ask(service)
    assert [record.levelno for record in caplog.records][-1] == logging.ERROR
