"""The load of a node and of its partitions: counted work, decayed, and the loop's own business."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest

from koinon_node.partition import load as load_module
from koinon_node.partition.load import DECAY_S, LONE_READ_US, LONE_WRITE_US, LoadMeter, LoopTime
from koinon_node.partition.traffic import Traffic


@dataclass
class Applied:
    groups_applied: int = 0
    rows_applied: int = 0
    bytes_applied: int = 0


class Meter:
    """A meter whose time is set, with the counters that it reads."""

    def __init__(self) -> None:
        self.now = 50.0
        self.traffic, self.applied = Traffic(), Applied()
        self.meter = LoadMeter(self.traffic, self.applied, lambda: self.now)

    def gets(self, per_second: dict[int, int], seconds: float, step_s: float = 1.0) -> None:
        """Serve so many lone gets a second of each partition, and observe every ``step_s``."""
        for _ in range(round(seconds / step_s)):
            for partition, rows in per_second.items():
                self.traffic.reads[partition] += np.int64(rows * step_s)
            self.now += step_s
            self.meter.observe(4)


def test_load_of_steady_traffic_comes_near_its_cost_with_the_time_constant() -> None:
    one = Meter()
    one.gets({2: 10_000}, DECAY_S)
    whole = 10_000 * LONE_READ_US / 1e6
    assert one.meter.partitions[0, 2] == pytest.approx(whole * (1 - np.exp(-1)), rel=1e-6)
    one.gets({2: 10_000}, 9 * DECAY_S)
    assert one.meter.partitions[0, 2] == pytest.approx(whole, rel=1e-3)
    assert one.meter.work == pytest.approx(whole, rel=1e-3)


def test_mean_does_not_depend_on_how_often_it_is_observed() -> None:
    seldom, often = Meter(), Meter()
    seldom.gets({1: 8_000}, 60, step_s=20.0)
    often.gets({1: 8_000}, 60, step_s=0.5)
    assert seldom.meter.partitions[0, 1] == pytest.approx(often.meter.partitions[0, 1])


def test_sum_over_two_nodes_is_steady_while_a_partition_moves() -> None:
    before, after = Meter(), Meter()
    before.gets({0: 5_000}, 20 * DECAY_S)
    after.gets({}, 20 * DECAY_S)
    whole = before.meter.work
    for _ in range(10):  # the traffic goes to the other node now
        before.gets({}, 30)
        after.gets({0: 5_000}, 30)
        assert before.meter.work + after.meter.work == pytest.approx(whole, rel=1e-6)


def test_rows_of_batches_scans_and_merges_cost_a_fraction_of_lone_ones() -> None:
    one = Meter()
    keys = [b"key%d" % n for n in range(100)]
    one.traffic.count_reads(np.zeros(100, np.uint32), keys, keys)
    one.traffic.count_writes(np.ones(100, np.uint32), keys, np.full(100, 5, np.int64))
    one.traffic.count_scan(2, 100, 500)
    one.traffic.count_merge(3, 100, 500)
    one.traffic.flush()
    one.gets({}, 1)
    lone = Meter()
    lone.gets({0: 100, 2: 100}, 1)
    for partition in (0, 2):
        cost = one.meter.partitions[0, partition]
        assert 0 < cost < lone.meter.partitions[0, partition] / 10
    writes = one.meter.partitions[0, [1, 3]]
    assert writes.min() > 0
    assert writes.max() < 100 * LONE_WRITE_US / 1e6 / 10


def test_followers_do_the_work_of_writes_and_none_of_reads() -> None:
    one = Meter()
    one.traffic.count_write(0, b"key", 100)
    one.traffic.count_read(1, b"key", 100)
    one.gets({}, 1)
    _lead, follow = one.meter.partitions
    assert np.flatnonzero(follow).tolist() == [0]
    assert one.meter.followed == 0
    one.applied.groups_applied = one.applied.rows_applied = 1
    one.applied.bytes_applied = 100
    one.gets({}, 1)
    assert one.meter.followed == pytest.approx(follow[0], rel=0.02)


def test_partitions_of_a_keyspace_that_was_added_are_counted() -> None:
    one = Meter()
    one.gets({3: 10}, 1)
    one.traffic.reads[9] += np.int64(1_000)
    one.now += 1
    one.meter.observe(10)
    assert one.meter.partitions.shape == (2, 10)
    assert one.meter.partitions[0, 9] > one.meter.partitions[0, 3] > 0


def test_report_lists_the_busiest_and_sums_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "REPORTED_MAX", 2)
    one = Meter()
    one.gets({0: 3_000, 1: 1_000, 2: 2_000, 3: 500}, 10)
    report = one.meter.report(lag_s=0.002)
    assert list(report.partition_ids) == [0, 2]
    assert report.lead[0] > report.lead[1] > 0
    assert report.rest_lead == pytest.approx(report.lead[1] * 1500 / 2000, abs=2)
    assert report.work == pytest.approx(sum(report.lead) + report.rest_lead, abs=2)
    assert (report.observed_ms, report.lag_us) == (10_000, 2_000)


def test_time_of_the_loop_grows_while_its_thread_works() -> None:
    loop = LoopTime()
    try:
        before, began = loop.wanted_ns(), time.thread_time_ns()
        while time.thread_time_ns() - began < 30_000_000:
            pass
        assert loop.wanted_ns() - before >= 25_000_000
    finally:
        loop.close()
