"""Addresses where the processes of a local cluster serve metrics; it remembers them."""

from __future__ import annotations

import json
from pathlib import Path

from koinon.local import LocalCluster, Ports
from tests.conftest import ClusterFactory
from tests.scraping import scrape


def addresses(cluster: LocalCluster) -> list[str]:
    return [cluster.metrics_address(name) for name in cluster.names]


def test_metrics_are_served_from_the_next_start_on_and_remembered(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    first = make_cluster(tmp_path, nodes=1, coordinators=1)
    assert addresses(first) == ["", ""]
    first.close()
    with make_cluster(tmp_path, nodes=1, coordinators=1, ports=Ports(metrics=True)) as second:
        given = addresses(second)
        assert len(set(given)) == 2
        for name in second.names:
            kind = "node" if name.startswith("n") else "coordinator"
            found = scrape(second.metrics_address(name))
            assert found.sum("koinon_build_info", component=kind) == 1
        name = second.add_node()
        assert second.metrics_address(name) not in {"", *given, *map(second.address, second.names)}
    remembered = json.loads((tmp_path / "cluster.json").read_text())["members"]
    assert [remembered[name]["metrics"] for name in ("c1", "n1")] == given
    third = make_cluster(tmp_path)
    assert addresses(third)[:2] == given
    third.close()
    assert addresses(make_cluster(tmp_path, ports=Ports(metrics=False))) == ["", "", ""]
