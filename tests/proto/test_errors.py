"""Errors keep their class, their fields and their facts over pickling and over the wire."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import koinon
from koinon_proto.contract import cluster_errors, convert, errors
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import errors_pb2

ALL = [
    cls
    for cls in {**vars(errors), **vars(cluster_errors)}.values()
    if isinstance(cls, type) and issubclass(cls, KoinonError) and is_dataclass(cls)
]
LOCAL_ONLY = {
    errors.ClientClosedError,
    cluster_errors.DataDirectoryError,
    errors.ForkedError,
    errors.NobodyListensError,
    errors.NotSentError,
    errors.PartitionerMismatchError,
    errors.UnknownHostError,
    errors.WrongEventLoopError,
}


def sample(cls: type[KoinonError]) -> KoinonError:
    samples: dict[Any, Callable[[str], Any]] = {
        "int": lambda _: 7,
        "bool": lambda _: True,
        "str": lambda name: f"the {name}",
        "bytes": lambda name: b"the \xff " + name.encode(),
        "tuple[int, ...]": lambda _: (3, 5),
    }
    return cls(**{f.name: samples[f.type](f.name) for f in fields(cast(Any, cls))})


def same(left: KoinonError, right: KoinonError) -> bool:
    return type(left) is type(right) and vars(left) == vars(right)


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_error_pickled_keeps_class_and_fields(cls: type[KoinonError]) -> None:
    assert same(pickle.loads(pickle.dumps(sample(cls))), sample(cls))


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_error_pickled_keeps_the_id_of_its_request(cls: type[KoinonError]) -> None:
    error = sample(cls)
    error.request_id = "5f0c9a1e-2b"
    assert same(pickle.loads(pickle.dumps(error)), error)


@pytest.mark.parametrize(
    "cls", [errors.UnavailableError, errors.UnknownFateError, errors.InternalError]
)
def test_error_whose_story_is_in_servers_logs_says_under_which_id(cls: type[KoinonError]) -> None:
    error = sample(cls)
    assert "[request" not in str(error)
    error.request_id = "5f0c9a1e-2b"
    assert str(error).endswith(" [request 5f0c9a1e-2b]")


@pytest.mark.parametrize("cls", [c for c in ALL if c not in LOCAL_ONLY], ids=lambda c: c.__name__)
def test_error_over_the_wire_keeps_class_and_fields(cls: type[KoinonError]) -> None:
    details = convert.error_to_status_details(sample(cls), 9)
    back = convert.error_from_status_details(details)
    assert back is not None
    assert same(back, sample(cls))


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_error_facts_never_contradict(cls: type[KoinonError]) -> None:
    assert not (cls.retriable and cls.maybe_applied), "a retry would apply an unknown write twice"
    assert cls.__name__.endswith("Error")
    assert str(sample(cls))


@pytest.mark.parametrize(
    ("expected", "current", "hidden", "text"),
    [
        (7, 0, False, "expected version 7, there is no record"),
        (0, 9, False, "expected no record, the record has version 9"),
        (7, 9, False, "expected version 7, the record has version 9"),
        (7, 0, True, "expected version 7, it has another (only who may read the key is told"),
    ],
)
def test_condition_that_failed_says_that_there_is_no_record(
    expected: int, current: int, hidden: bool, text: str
) -> None:
    failed = errors.ConditionFailedError(
        expected_version=expected, current_version=current, version_hidden=hidden
    )
    assert str(failed).startswith(f"condition failed: {text}")
    assert text in str(errors.CheckFailedError(key=b"k", **vars(failed)))


RETRIABLE = {
    "ClusterNotReadyError",
    "DeadlinePassedError",
    "LeaseExpiredError",
    "NobodyListensError",
    "NotEnoughReplicasError",
    "NotPrimaryError",
    "PartitionOfflineError",
    "QuotaExceededError",
    "ResourceExhaustedError",
    "TableBehindError",
    "UnavailableError",
    "UnknownHostError",
}
MAYBE_APPLIED = {"UnknownFateError"}
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


@pytest.mark.parametrize("name", errors.__all__)
def test_public_error_says_whether_a_call_may_be_repeated_and_is_in_the_reference(
    name: str,
) -> None:
    cls = getattr(koinon, name)
    assert issubclass(cls, koinon.KoinonError)
    assert cls.retriable == (name in RETRIABLE)
    assert cls.maybe_applied == (name in MAYBE_APPLIED)
    assert f"autoexception:: koinon.{name}\n" in REFERENCE.read_text()


def test_resource_exhausted_names_its_limit_where_it_is_known() -> None:
    assert str(errors.ResourceExhaustedError(resource="queue", limit=7)).endswith("limit of 7")
    assert str(errors.ResourceExhaustedError(resource="queue", limit=0)).endswith("at its limit")


def test_error_of_unknown_kind_becomes_internal() -> None:
    from_the_future = errors_pb2.Error(message="strange")
    assert same(convert.error_from_proto(from_the_future), errors.InternalError(reason="strange"))


def test_error_without_wire_form_becomes_internal() -> None:
    message = convert.error_to_proto(ZeroDivisionError("x"))
    assert message.internal.reason == "ZeroDivisionError: x"


@pytest.mark.parametrize("details", [b"", b"\xff\xff garbage", b"\x08\x01"])
def test_error_details_garbage_gives_none(details: bytes) -> None:
    assert convert.error_from_status_details(details) is None


def test_an_error_about_a_number_that_the_wire_has_no_room_for_is_sent_without_it() -> None:
    error = errors.InvalidArgumentError(field="durability", reason="none", limit=1, actual=-1)
    received = convert.error_from_proto(convert.error_to_proto(error))
    assert isinstance(received, errors.InvalidArgumentError)
    assert (received.field, received.limit, received.actual) == ("durability", 1, 0)
