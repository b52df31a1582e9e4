"""A stand-in for the coordinators' service of groups: the test says which member is granted what.

It may do what the real one never does: grant a partition to two members at once.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from koinon.driver.table_refresh import TableRefresh
from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import groups_pb2, groups_pb2_grpc
from tests.kit.waiting import wait_until


class ScriptedGroups(groups_pb2_grpc.GroupsServicer):
    """Answers each member with the grants that the test has given it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.granted: dict[str, dict[int, int]] = {}  # member -> partition -> generation
        self.requests: dict[str, groups_pb2.AttendGroupRequest] = {}  # the newest of each member
        self.left: list[str] = []
        self.refusal: KoinonError | None = None
        self.is_silent = False
        self.address = ""
        self._revisions: dict[str, int] = {}

    def grant(self, member: str, *partition_ids: int, generation: int) -> None:
        """Grant the member these partitions, and no others."""
        with self.changed:
            self.granted[member] = dict.fromkeys(partition_ids, generation)
            self._revisions[member] = self._revisions.get(member, 1) + 1
            self.changed.notify_all()

    def held(self, member: str) -> list[int]:
        """Return what the member said last that it holds."""
        request = self.requests.get(member)
        return [p for one in request.held for p in one.partition_ids] if request else []

    def wait_held(self, member: str, *partition_ids: int) -> None:
        wait_until(
            lambda: self.held(member) == list(partition_ids), f"{member} holds {partition_ids}"
        )

    def Attend(self, request: Any, context: Any) -> Any:  # noqa: N802
        member = request.member_id
        with self.changed:
            self.requests[member] = request
            if request.known_revision == self._revisions.get(member, 1):
                self._take_back(member)
            third_s = request.session_ms / 3000
            if self._revisions.get(member, 1) == request.known_revision:
                self.changed.wait(third_s)
            if self.is_silent:
                self.changed.wait(30.0)
            if self.refusal is not None:
                refuse(context, self.refusal)
            grants = sorted(self.granted.get(member, {}).items())
            return groups_pb2.AttendGroupResponse(
                group_id=zlib.crc32(request.group.encode()),
                generation=1,
                revision=self._revisions.get(member, 1),
                granted=[
                    groups_pb2.Held(
                        keyspace_id=request.keyspace_ids[0],
                        partition_ids=[p for p, _ in grants],
                        generations=[generation for _, generation in grants],
                    )
                ],
                members=1,
            )

    def _take_back(self, member: str) -> None:
        """Grant anew what the member has given back, unless it is another's by now."""
        own = self.granted.get(member, {})
        others = [granted for name, granted in self.granted.items() if name != member]
        for p in own.keys() - set(self.held(member)):
            newest = max((granted.get(p, 0) for granted in others), default=0)
            generation = own.pop(p)
            if generation > newest:
                own[p] = generation + 1
            self._revisions[member] = self._revisions.get(member, 1) + 1

    def Leave(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.left.append(request.member_id)
        return groups_pb2.LeaveGroupResponse()


def refuse(context: Any, error: KoinonError) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    details = convert.error_to_status_details(error, code.value[0])
    context.set_trailing_metadata((("grpc-status-details-bin", details),))
    context.abort(code, str(error))


@contextmanager
def scripted_groups() -> Iterator[ScriptedGroups]:
    """Serve the stand-in; clients of this process take it for the coordinators' leader."""
    groups = ScriptedGroups()
    server = grpc.server(ThreadPoolExecutor(16))
    groups_pb2_grpc.add_GroupsServicer_to_server(groups, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    groups.address = f"127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableRefresh, "seeds", [groups.address])
        try:
            yield groups
        finally:
            with groups.changed:
                groups.changed.notify_all()
            server.stop(0.0).wait()
