"""Waits for a committed step, by the table that the coordinators publish change by change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from koinon.driver.rpc.channels import OPTIONS
from koinon_proto.contract import convert
from koinon_proto.contract.table import Table, apply_update
from koinon_proto.v1 import table_pb2, table_pb2_grpc

PAUSE_S = 0.05


def wait_for_table(
    addresses: str, condition: Callable[[Table], bool], *, what: str, timeout_s: float = 60.0
) -> Table:
    """Return the first table that is seen to meet the condition, milliseconds after the commit
    that made it. ``addresses`` are the coordinators', asked in turn.
    """
    deadline = time.monotonic() + timeout_s
    turn = 0
    while time.monotonic() < deadline:
        address = addresses.split(",")[turn % len(addresses.split(","))]
        turn += 1
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            stub: Any = table_pb2_grpc.TableServiceStub(channel)
            table: Table | None = None
            try:
                left_s = deadline - time.monotonic()
                for update in stub.WatchTable(table_pb2.GetTableRequest(), timeout=left_s):
                    table = apply_update(table, convert.update_from_proto(update))
                    if table is not None and table.bootstrapped and condition(table):
                        return table
            except grpc.RpcError:
                time.sleep(PAUSE_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")
