"""The ports of a local cluster for clients of Redis, by keyspace, and that they are remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.cluster import RedisCluster

from koinon.local import LocalCluster, Ports
from koinon.local.cluster_files import PortClaims, port_of
from koinon_proto.contract.errors import InvalidArgumentError
from tests.conftest import ClusterFactory

KEYS = 50


def ports(cluster: LocalCluster, keyspace: str) -> list[str]:
    return [cluster.redis_address(name, keyspace) for name in cluster.node_names]


def koinon(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "koinon.cli", *arguments]
    environment = {**os.environ, "KOINON_DATA": str(directory), "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_up_gives_each_node_a_port_for_clients_of_redis_cluster_in_a_keyspace(
    tmp_path: Path,
) -> None:
    size = ("--nodes", "2", "--coordinators", "1")
    try:
        told = koinon(tmp_path, "up", "-d", *size, "--redis-keyspace", "carts", "--json")
        members: dict[str, Any] = json.loads(told)["members"]
        carts = [members[name]["redis_keyspaces"]["carts"] for name in ("n1", "n2")]
        assert len({*carts, *(members[name]["redis"] for name in ("n1", "n2"))}) == 4
        made = ("admin", "keyspaces", "create", "carts", "--partitioner", "crc16")
        koinon(tmp_path, *made, "--partitions", "16")
        host, _, port = carts[0].rpartition(":")
        with RedisCluster(host=host, port=int(port)) as guest:
            for n in range(KEYS):
                guest.set(f"k{n}", n)
            assert sorted(f"{node.host}:{node.port}" for node in guest.get_nodes()) == sorted(carts)
            assert [guest.get(f"k{n}") for n in range(KEYS)] == [b"%d" % n for n in range(KEYS)]
        assert koinon(tmp_path, "get", "k7", "--keyspace", "carts", "--raw").strip() == "7"
        again = koinon(tmp_path, "up", "-d")
        assert f"redis-cli -c -u redis://{carts[0]}" in again
        assert carts[1] in again
    finally:
        koinon(tmp_path, "down")


def test_up_with_resp_proxy_serves_every_key_at_one_node(tmp_path: Path) -> None:
    shape = ("--nodes", "2", "--coordinators", "1", "--partitioner", "crc16", "--resp-proxy")
    try:
        told = koinon(tmp_path, "up", "-d", *shape, "--json")
        host, _, port = json.loads(told)["members"]["n1"]["redis"].rpartition(":")
        with Redis(host=host, port=int(port)) as guest:
            assert all(guest.set(f"k{n}", n) for n in range(KEYS))
            assert [guest.get(f"k{n}") for n in range(KEYS)] == [b"%d" % n for n in range(KEYS)]
        koinon(tmp_path, "up", "-d", "--resp-proxy")
    finally:
        koinon(tmp_path, "down")


def test_ports_of_keyspaces_are_chosen_once_and_added_from_the_next_start_on(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    asked = ["carts", "default", "carts"]
    first = make_cluster(tmp_path, nodes=2, coordinators=1, ports=Ports(redis_keyspaces=asked))
    assert first.redis_keyspaces == ("carts",)
    carts = ports(first, "carts")
    first.start()
    first.wait_ready()
    first.close()
    second = make_cluster(tmp_path, ports=Ports(redis_keyspaces=["users"]))
    assert second.redis_keyspaces == ("carts", "users")
    assert ports(second, "carts") == carts
    given = {*carts, *ports(second, "users"), *ports(second, "default")}
    assert len(given) == 6
    assert "" not in given
    assert second.redis_address("c1", "carts") == ""
    remembered = [*carts, *map(second.address, second.names)]
    assert not any(PortClaims().claim(port_of(address)) for address in remembered)


def test_port_of_what_is_no_name_of_a_keyspace_is_refused(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="keyspace"):
        make_cluster(tmp_path, ports=Ports(redis_keyspaces=["No name"]))
