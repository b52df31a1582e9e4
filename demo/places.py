"""The act about places: a cluster that routes by H3 cells, where records of one cell are in one
partition.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h3
import numpy as np
import pandas as pd

from demo.play import RIDE_TIMEOUT_MS, Play
from demo.stage import Stage
from koinon.client import Client
from koinon.geo import CELL_BYTES, cell_keys
from koinon.ingest.session import spark_session
from koinon.local import LocalCluster, Setup
from koinon.operate.wording import count, duration_text
from koinon_proto.partitioner import partitioner_of

RESOLUTION = 3
PARTITIONS = 60
UNEVEN_MAX = 0.05
DRIVERS, EVENTS, RIDERS = 100, 6_000, 300
CITIES = (
    *((48.86, 2.35), (41.01, 28.98), (-23.55, -46.63)),
    *((35.68, 139.69), (6.45, 3.39), (40.71, -74.01)),
)
NEAR_DEGREES = 0.1  # around the middle of a cell, whose edges are 69 km long
Place = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows of drivers and riders, and each rider's nearest driver after the last event."""

    rows: dict[bytes, bytes]
    nearest: dict[str, str]


def drivers_meet_riders(play: Play) -> None:
    """Store drivers and riders by cell, so that all of a cell are in one partition, and match them
    there.
    """
    stage = play.stage
    stage.act(f"Drivers meet riders: {EVENTS:,} events of {DRIVERS} drivers in {len(CITIES)} cells")
    flags = ["--partitions", str(PARTITIONS)]
    with (
        LocalCluster(
            coordinators=1, setup=Setup(router=f"h3:{RESOLUTION}", coordinator_flags=flags)
        ) as cluster,
        cluster.client(timeout_ms=RIDE_TIMEOUT_MS) as client,
    ):
        name = client.table().cluster.partitioner
        stage.say(f"A second cluster, with {PARTITIONS} partitions by {name}.")
        _cells_of_the_world(stage, client)
        traffic = _traffic()
        client.put_many(traffic.rows).raise_for_errors()
        _scan_cells(stage, client, traffic)
        _join(stage, cluster, traffic)


def _cells_of_the_world(stage: Stage, client: Client) -> None:
    """Write a record for every cell of the world; show how evenly they are spread."""
    parents = h3.get_res0_cells()
    cells = [cell for parent in parents for cell in h3.cell_to_children(parent, RESOLUTION)]
    keys = [h3.str_to_int(cell).to_bytes(CELL_BYTES, "big") + b"/cell" for cell in cells]
    client.put_many(dict.fromkeys(keys, b"")).raise_for_errors()
    found = [entry.key for entry in client.scan(keys_only=True, page_rows=5_000)]
    known = partitioner_of(client.table().keyspaces.default)
    per_partition = np.bincount(known.partitions_of(found), minlength=PARTITIONS)
    uneven = float(per_partition.std() / per_partition.mean())
    stage.check(
        sorted(found) == sorted(keys) and uneven < UNEVEN_MAX and per_partition.min() > 0,
        f"all {len(cells):,} cells of the world at resolution {RESOLUTION} lie in {PARTITIONS} "
        f"partitions, {per_partition.min()} to {per_partition.max()} each: coefficient of "
        f"variation {uneven:.1%}",
    )


def _traffic() -> Traffic:
    """Make events of drivers that move around the middle of a cell, and riders that wait there."""
    rng = random.Random(RESOLUTION)
    middles = [h3.cell_to_latlng(h3.latlng_to_cell(*city, RESOLUTION)) for city in CITIES]

    def near(number: int) -> Place:
        lat, lng = middles[number % len(middles)]
        return lat + rng.uniform(-1, 1) * NEAR_DEGREES, lng + rng.uniform(-1, 1) * NEAR_DEGREES

    events = [(f"/driver/{n % DRIVERS:02d}/{n:05d}", near(n % DRIVERS)) for n in range(EVENTS)]
    riders = [(f"/rider/{n:03d}", near(n)) for n in range(RIDERS)]
    waiting, last = dict(riders), {name[8:10]: place for name, place in events}
    named = [*events, *riders]
    lats, lngs = [place[0] for _, place in named], [place[1] for _, place in named]
    keys = cell_keys(lats, lngs, [name for name, _ in named], RESOLUTION)
    values = [json.dumps(place).encode() for _, place in named]
    nearest = {
        name[7:]: min(last, key=lambda driver: _apart(last[driver], place))
        for name, place in waiting.items()
    }
    return Traffic(rows=dict(zip(keys, values, strict=True)), nearest=nearest)


def _apart(a: Place, b: Place) -> float:
    """Return a measure of the distance of two places, for comparisons only."""
    return (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2


def _scan_cells(stage: Stage, client: Client, traffic: Traffic) -> None:
    """Read each cell by its 8 bytes: drivers and riders, from one partition, in key order."""
    cells = sorted({key[:CELL_BYTES] for key in traffic.rows})
    whole_s, found = 0.0, 0
    for cell in cells:
        began = time.perf_counter()
        rows = [e for e in client.scan(prefix=cell, page_rows=5_000) if e.key in traffic.rows]
        whole_s += time.perf_counter() - began
        expected = sorted(key for key in traffic.rows if key[:CELL_BYTES] == cell)
        if [row.key for row in rows] != expected:
            stage.check(False, f"cell {cell.hex()} is read whole, in key order")
        found += len(rows)
    stage.check(
        found == EVENTS + RIDERS and len(cells) == len(CITIES),
        f"{found:,} events and riders of {len(cells)} cells come back by scans of a cell, each "
        f"of one partition: {duration_text(whole_s / len(cells))} a cell",
    )


def _join(stage: Stage, cluster: LocalCluster, traffic: Traffic) -> None:
    """Have Spark find each rider's nearest driver, inside the tasks that read the partitions."""
    with spark_session(app_name="koinon demo") as spark:
        began = time.monotonic()
        read = spark.read.format("koinon").option("coordinators", cluster.coordinators).load()
        met = read.mapInPandas(_meeting(), "rider string, driver string")
        plan = met._jdf.queryExecution().executedPlan().toString()
        found = {row.rider: row.driver for row in met.collect()}
        seconds = time.monotonic() - began
    stage.check(
        found == traffic.nearest and "Exchange" not in plan,
        f"Spark joins {count(len(found), 'rider')} with the driver next to them where they are "
        f"read, each cell in one task: its plan has no exchange, no row went from node to node "
        f"({duration_text(seconds)})",
    )


def _meeting() -> Any:
    """Return the function of a task over the rows of its partitions, which contain whole cells."""

    def meet(frames: Iterable[Any]) -> Iterator[Any]:
        drivers: dict[bytes, dict[str, Place]] = {}
        riders: list[tuple[bytes, str, Place]] = []
        for frame in frames:
            for key, value in zip(frame.key, frame.value, strict=True):
                cell, (kind, *names) = key[:8], key[9:].decode().split("/")
                if kind == "driver":  # in key order: the last event of each driver stays
                    drivers.setdefault(cell, {})[names[0]] = json.loads(value)
                elif kind == "rider":
                    riders.append((cell, names[0], json.loads(value)))

        def nearest(places: dict[str, Place], lat: float, lng: float) -> str:
            apart = {name: (a - lat) ** 2 + (b - lng) ** 2 for name, (a, b) in places.items()}
            return min(apart, key=apart.__getitem__)

        pairs = [(rider, nearest(drivers[cell], *place)) for cell, rider, place in riders]
        yield pd.DataFrame(pairs, columns=["rider", "driver"])

    return meet
