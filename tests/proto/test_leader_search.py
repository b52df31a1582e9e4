"""The search for the coordinators' leader, and what a failed call comes to, without any network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import LoadClosedError, NotLeaderError
from koinon_proto.contract.errors import (
    KoinonError,
    NotSentError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
    UnsupportedVersionError,
)
from koinon_proto.contract.leader_search import AGAIN_S_MIN, LeaderSearch, Pace, Repeat, Route
from koinon_proto.server import rpc
from koinon_proto.server.leader_calls import ask_leader, ask_leader_aio

LOST = UnknownFateError(reason="lost")
FULL = ResourceExhaustedError(resource="r", limit=1)
CLOSED = LoadClosedError(load_id=7, state="aborted")
NOT_SENT = NotSentError(reason="no connection")


def not_leader(address: str = "") -> NotLeaderError:
    return NotLeaderError(leader_id="", leader_address=address, term=1)


def test_route_in_turn_goes_around_and_learns_a_leader_that_it_did_not_know() -> None:
    route = Route(["a", "b"], "b")
    route.pass_over("b")
    assert route.current == "a"
    route.follow(not_leader("c"), "a")
    assert (route.current, route.addresses) == ("c", ["a", "b", "c"])
    route.follow(not_leader("c"), "c")  # it names itself, and does not lead
    assert route.current == "a"
    route.follow(not_leader(), "a")
    assert route.current == "b"


def test_route_without_addresses_forgets_who_leads() -> None:
    route = Route()
    assert route.current == ""
    route.follow(not_leader("a"), "")
    assert (route.current, route.addresses) == ("a", [])
    route.pass_over("a")
    assert route.current == ""


@pytest.mark.parametrize(
    ("repeat", "errors", "goes_on", "ends_with"),
    [
        (Repeat.NOTHING, [not_leader("b")], True, NotLeaderError),
        (Repeat.NOTHING, [NOT_SENT], True, NotSentError),
        (Repeat.NOTHING, [LOST], False, UnknownFateError),
        (Repeat.NOTHING, [FULL], False, ResourceExhaustedError),
        (Repeat.UNANSWERED, [LOST], True, UnavailableError),
        (Repeat.UNANSWERED, [LOST, FULL], False, ResourceExhaustedError),
        (Repeat.CHANGE, [LOST], True, UnknownFateError),
        (Repeat.CHANGE, [FULL], True, ResourceExhaustedError),
        (Repeat.CHANGE, [LOST, FULL], True, UnknownFateError),
        (Repeat.CHANGE, [LOST, not_leader()], True, UnknownFateError),
        (Repeat.CHANGE, [LOST, CLOSED], False, LoadClosedError),
        (Repeat.READ, [LOST], True, UnavailableError),
        (Repeat.READ, [LOST, FULL], True, ResourceExhaustedError),
        (Repeat.READ, [not_leader()], True, NotLeaderError),
    ],
)
def test_failure_is_repeated_or_ends_the_call_by_what_may_be_asked_again(
    repeat: Repeat, errors: list[KoinonError], goes_on: bool, ends_with: type[KoinonError]
) -> None:
    search = LeaderSearch(Route(["a", "b"]), repeat)
    pauses = [search.on_failure(error, 0.0) for error in errors]
    assert pauses[:-1] == [0.0] * (len(errors) - 1)
    assert (pauses[-1] is not None) == goes_on
    assert type(search.failure()) is ends_with


def test_refusal_of_the_leader_does_not_make_the_next_call_ask_another() -> None:
    route = Route(["a", "b"])
    assert LeaderSearch(route, Repeat.UNANSWERED).on_failure(FULL, 0.0) is None
    assert route.current == "a"
    assert LeaderSearch(route, Repeat.NOTHING).on_failure(LOST, 0.0) is None
    assert route.current == "b"


def test_search_once_around_ends_after_one_attempt_more_than_addresses() -> None:
    search = LeaderSearch(Route(["a", "b"]), Repeat.UNANSWERED, once_around=True)
    asked = [search.asked]
    while search.on_failure(LOST, 0.0) is not None:
        asked.append(search.asked)
    assert asked == ["a", "b", "a"]


def test_search_slows_down_and_ends_while_there_is_time_to_say_so() -> None:
    pace = Pace(attempt_s=1.0, attempt_s_max=3.0, pause_s=0.2, pause_s_max=0.4)
    search = LeaderSearch(Route(["a"]), Repeat.READ, pace=pace, deadline=10.0)
    seen = []
    for now in (0.0, 1.0, 2.0, 3.0):
        seen.append((search.timeout_s(now), search.on_failure(LOST, now)))
    assert [timeout_s for timeout_s, _ in seen] == [1.0, 2.0, 3.0, 3.0]
    assert [pause for _, pause in seen] == pytest.approx([0.2, 0.3, 0.4, 0.4])
    assert search.timeout_s(9.0) == pytest.approx(1.0)
    assert search.timeout_s(9.99) == AGAIN_S_MIN
    assert search.on_failure(LOST, 9.55) is None


# --- the drivers ----------------------------------------------------------------------------------


class Failure(grpc.RpcError):
    """An error as gRPC raises it; ``answer`` is the typed error that came with it."""

    def __init__(self, code: grpc.StatusCode, answer: KoinonError | None = None) -> None:
        self._code, self._answer = code, answer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "Socket closed"

    def trailing_metadata(self) -> Any:
        if self._answer is None:
            return None
        return ((convert.STATUS_DETAILS_KEY, convert.error_to_status_details(self._answer, 9)),)


def blocking(search: LeaderSearch, attempt: Callable[[], str]) -> str:
    return ask_leader(search, attempt)


def on_a_loop(search: LeaderSearch, attempt: Callable[[], str]) -> str:
    async def attempt_aio() -> str:
        return attempt()

    return asyncio.run(ask_leader_aio(search, attempt_aio))


@pytest.mark.parametrize("drive", [blocking, on_a_loop])
def test_driver_follows_hints_and_remembers_who_answered(
    drive: Callable[[LeaderSearch, Callable[[], str]], str],
) -> None:
    route = Route(["a", "b"])
    search = LeaderSearch(route, Repeat.UNANSWERED, once_around=True)
    fates = [
        Failure(grpc.StatusCode.UNAVAILABLE),
        Failure(grpc.StatusCode.FAILED_PRECONDITION, not_leader("c")),
    ]
    asked = []

    def attempt() -> str:
        asked.append(search.asked)
        if fates:
            raise fates.pop(0)
        return "done"

    assert drive(search, attempt) == "done"
    assert asked == ["a", "b", "c"]
    assert route.current == "c"
    fates += [Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)]
    with pytest.raises(ResourceExhaustedError):
        drive(LeaderSearch(route, Repeat.UNANSWERED), attempt)


# --- what a failure of gRPC comes to --------------------------------------------------------------


def test_typed_answer_is_the_error_whatever_the_status_says() -> None:
    failure = Failure(grpc.StatusCode.UNIMPLEMENTED, FULL)
    for error in (rpc.error_of(failure), rpc.fate_of(failure, at="a:1", unimplemented="it")):
        assert isinstance(error, ResourceExhaustedError)
        assert str(error) == str(FULL) == rpc.in_words(failure)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, "not reachable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"),
        (grpc.StatusCode.CANCELLED, "cancelled: Socket closed"),
        (grpc.StatusCode.UNIMPLEMENTED, "unimplemented: Socket closed"),
    ],
)
def test_call_without_a_typed_answer_is_of_unknown_fate(code: grpc.StatusCode, words: str) -> None:
    failure = Failure(code)
    assert rpc.error_of(failure) is None
    error = rpc.fate_of(failure, at="a:1")
    assert isinstance(error, UnknownFateError)
    assert error.reason == f"a:1: {code.name.lower()}: Socket closed"
    assert rpc.in_words(failure) == words


def test_method_that_the_other_side_does_not_know_is_an_unsupported_version() -> None:
    error = rpc.fate_of(Failure(grpc.StatusCode.UNIMPLEMENTED), at="a:1", unimplemented="loads")
    assert isinstance(error, UnsupportedVersionError)
    assert error.what == "a:1: loads"
