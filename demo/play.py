"""The state and the helpers that all acts of the demo share."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from demo.follower import Follower
from demo.stage import Stage
from koinon.client import Client
from koinon.local import LocalCluster

READ_BATCH = 5_000
RIDE_TIMEOUT_MS = 30_000


@dataclass(kw_only=True)
class Play:
    """The cluster, a client, the loaded rows, and every single write acknowledged since the load.
    ``rows_max``: the limit of rows to load from any source; None: all.
    """

    stage: Stage
    cluster: LocalCluster
    client: Client
    rows: dict[bytes, bytes]
    rows_max: int | None = None
    acknowledged: dict[bytes, bytes] = field(default_factory=dict)
    killed_coordinator: str = ""
    follower: Follower | None = None
    finally_: ExitStack = field(default_factory=ExitStack)  # closed after the last act


def check_all_rows(play: Play) -> float:
    """Compare every row with its source; return rows per second."""
    return _check(play, play.rows)


def check_acknowledged(play: Play) -> float:
    """Compare every acknowledged single write with the stored record; return rows per second."""
    return _check(play, play.acknowledged)


def _check(play: Play, rows: dict[bytes, bytes]) -> float:
    keys = list(rows)
    began = time.monotonic()
    with play.stage.progress("reading", len(keys)) as advance:
        for start in range(0, len(keys), READ_BATCH):
            batch = keys[start : start + READ_BATCH]
            values = play.client.get_many(batch, timeout_ms=RIDE_TIMEOUT_MS)
            for key, value in zip(batch, values, strict=True):
                if value != rows[key]:
                    play.stage.check(False, f"{key.decode()} reads back as it was written")
            advance(start + len(batch))
    return len(keys) / (time.monotonic() - began)


def wait(seconds: float) -> None:
    """Wait while an act's background work goes on."""
    threading.Event().wait(seconds)
