"""The load of this node and of the partitions that it leads, for plans that balance by load.

The unit is a *core*: a load of 1 is the work of a node that uses one core of the reference machine
(docs/balance.md) without pause. Work is counted, not timed: each row and kilobyte that was served
has a fixed cost, since the CPU of single requests cannot be told apart. A follower's share of the
work follows from the writes of the primary: each of them is done once more on each follower.

Counted work alone would mislead: a slow node completes less, and would look idle. So the node also
measures how busy its event loop is: the part of the time in which the loop's thread ran, or was
ready to run and had no CPU. Work over business is the speed of the node.

All figures are means that decay with the time constant DECAY_S, counted from 0 at the start of the
process. After a partition has moved, the old primary's figure falls as fast as the new one's rises:
their sum is right all the time. A young process shows too little, in all figures by the same part.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from koinon_node.partition.traffic import Traffic
from koinon_proto.v1 import membership_pb2

F64Array = npt.NDArray[np.float64]

DECAY_S = 120.0
REPORTED_MAX = 8_192
"""The most partitions of a report, the busiest ones: the report has to fit into a heartbeat."""

# Microseconds of the reference core, as `python -m bench run costs` measures them.
LONE_READ_US, JOINED_READ_US = 50.0, 2.0
LONE_WRITE_US, JOINED_WRITE_US = 200.0, 5.0
FOLLOWED_LONE_US, FOLLOWED_JOINED_US = 200.0, 7.0
READ_KIB_US, WRITTEN_KIB_US, FOLLOWED_KIB_US = 0.5, 6.0, 4.0
_KIB = 1024.0


class Applied(Protocol):
    """The counters of what this node has written as a follower; ``Applier`` has them."""

    groups_applied: int
    rows_applied: int
    bytes_applied: int


class LoopTime:
    """The time in which the calling thread ran, or was ready to run: nanoseconds since it began.

    Linux tells the wait for a CPU, also while a limit of the process's group throttles it.
    Elsewhere only the CPU time counts.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):  # no Linux, or one without statistics of its scheduler
            self._descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def wanted_ns(self) -> int:
        """Return the nanoseconds of the thread that made this object, which also calls this."""
        if self._descriptor < 0:
            return time.thread_time_ns()
        ran, waited = os.pread(self._descriptor, 64, 0).split()[:2]
        return int(ran) + int(waited)

    def close(self) -> None:
        """Close the file of the statistics."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LoadMeter:
    """Decayed means of the load. All methods but ``report`` belong to the event loop's thread."""

    def __init__(
        self, traffic: Traffic, applied: Applied, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._traffic = traffic
        self._applied = applied
        self._now = now
        self._began = self._at = now()
        self._loop: LoopTime | None = None
        self._wanted_ns = 0
        self._counted = np.zeros((2, 0))  # microseconds of work by partition: led, followed
        self._followed_us = 0.0
        # The means. ``partitions``: cores by partition, for its primary and for each follower.
        self.partitions: F64Array = np.zeros((2, 0))
        self.followed = 0.0  # cores, for what this node follows
        self.busy = 0.0  # of the event loop's thread, a part of 1

    @property
    def work(self) -> float:
        """The counted work of this node, in cores."""
        return float(self.partitions[0].sum()) + self.followed

    def observe(self, partitions: int) -> None:
        """Bring the means up to date; call it every second or so. ``partitions``: how many there
        are.
        """
        now = self._now()
        elapsed_s, self._at = now - self._at, now
        self._grow(partitions)
        counted, followed_us = _worked(self._traffic, partitions), _followed(self._applied)
        if elapsed_s <= 0:
            return
        kept, rate = math.exp(-elapsed_s / DECAY_S), 1e-6 / elapsed_s
        part = 1 - kept
        self.partitions = kept * self.partitions + part * rate * (counted - self._counted)
        self.followed = kept * self.followed + part * rate * (followed_us - self._followed_us)
        self.busy = kept * self.busy + part * self._busy_now(elapsed_s)
        self._counted, self._followed_us = counted, followed_us

    def _grow(self, partitions: int) -> None:
        """Make room for partitions that were added since: a keyspace was created."""
        more = partitions - self.partitions.shape[1]
        if more > 0:
            self.partitions = np.pad(self.partitions, ((0, 0), (0, more)))
            self._counted = np.pad(self._counted, ((0, 0), (0, more)))

    def _busy_now(self, elapsed_s: float) -> float:
        """Return the part of the time since the last call in which the loop's thread was busy."""
        if self._loop is None:
            self._loop = LoopTime()
            self._wanted_ns = self._loop.wanted_ns()
            return 0.0
        before, self._wanted_ns = self._wanted_ns, self._loop.wanted_ns()
        return min(1.0, max(0.0, (self._wanted_ns - before) / 1e9 / elapsed_s))

    def close(self) -> None:
        """Release the file of the scheduler's statistics."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def report(self, lag_s: float) -> membership_pb2.NodeLoad:
        """Return the means for a heartbeat, in millionths of a core. ``lag_s``: how late the loop
        runs what is scheduled. Any thread may call it.
        """
        partitions = np.rint(self.partitions * 1e6).astype(np.int64)
        lead, follow = partitions
        ids = np.flatnonzero(lead)
        if len(ids) > REPORTED_MAX:
            ids = np.sort(ids[np.argsort(-lead[ids], kind="stable")[:REPORTED_MAX]])
        return membership_pb2.NodeLoad(
            observed_ms=int((self._at - self._began) * 1000),
            busy=round(self.busy * 1e6),
            lag_us=round(lag_s * 1e6),
            work=round(self.work * 1e6),
            partition_ids=ids.tolist(),
            lead=lead[ids].tolist(),
            follow=follow[ids].tolist(),
            rest_lead=int(lead.sum() - lead[ids].sum()),
            rest_follow=int(follow.sum() - follow[ids].sum()),
        )


def _worked(traffic: Traffic, partitions: int) -> F64Array:
    """Return the counted microseconds of each partition: for its primary, and for each of its
    followers.
    """
    upto = slice(partitions)
    joined_reads, joined_writes = traffic.joined_reads[upto], traffic.joined_writes[upto]
    lone_reads = traffic.reads[upto] - joined_reads
    lone_writes = traffic.writes[upto] - joined_writes
    read_kib, written_kib = traffic.read_bytes[upto] / _KIB, traffic.written_bytes[upto] / _KIB
    led = lone_reads * LONE_READ_US + joined_reads * JOINED_READ_US + read_kib * READ_KIB_US
    led += lone_writes * LONE_WRITE_US + joined_writes * JOINED_WRITE_US
    led += written_kib * WRITTEN_KIB_US
    followed = lone_writes * FOLLOWED_LONE_US + joined_writes * FOLLOWED_JOINED_US
    followed += written_kib * FOLLOWED_KIB_US
    return np.stack([led, followed])


def _followed(applied: Applied) -> float:
    """Return the counted microseconds of the work as a follower."""
    groups = applied.groups_applied * (FOLLOWED_LONE_US - FOLLOWED_JOINED_US)
    rows = applied.rows_applied * FOLLOWED_JOINED_US
    return groups + rows + applied.bytes_applied / _KIB * FOLLOWED_KIB_US
