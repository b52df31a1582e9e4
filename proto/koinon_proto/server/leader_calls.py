"""Calls to the coordinators' leader: the two drivers of ``contract/leader_search.py``.

``attempt`` asks the member ``search.asked`` once. It may raise what gRPC raises, or a KoinonError
of its own: ``NotSentError`` where nothing was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.leader_search import LeaderSearch
from koinon_proto.server import rpc

Reply = TypeVar("Reply")


FateOf = Callable[[grpc.RpcError], KoinonError]


def ask_leader(
    search: LeaderSearch, attempt: Callable[[], Reply], fate_of: FateOf = rpc.fate_of
) -> Reply:
    """Make attempts until the leader has answered; return its answer.

    Raises:
        KoinonError: as ``LeaderSearch.failure``.
    """
    while True:
        try:
            reply = attempt()
        except (grpc.RpcError, KoinonError) as failure:
            pause_s = _pause_after(failure, search, fate_of)
        else:
            search.on_answer()
            return reply
        time.sleep(pause_s)


async def ask_leader_aio(
    search: LeaderSearch, attempt: Callable[[], Awaitable[Reply]], fate_of: FateOf = rpc.fate_of
) -> Reply:
    """Do as ``ask_leader`` on an event loop."""
    while True:
        try:
            reply = await attempt()
        except (grpc.RpcError, KoinonError) as failure:
            pause_s = _pause_after(failure, search, fate_of)
        else:
            search.on_answer()
            return reply
        await asyncio.sleep(pause_s)


def _pause_after(
    failure: grpc.RpcError | KoinonError, search: LeaderSearch, fate_of: FateOf
) -> float:
    error = failure if isinstance(failure, KoinonError) else fate_of(failure)
    pause_s = search.on_failure(error, time.monotonic())
    if pause_s is None:
        answered = isinstance(failure, grpc.RpcError) and rpc.error_of(failure) is not None
        raise search.failure() from None if answered else failure  # gRPC's text adds nothing
    return pause_s
