"""Clusters of real processes that route by a part of the key: every way in agrees on where keys
lie, and no way in goes by another router.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from koinon import aio
from koinon.client import Client
from koinon.core.atomic import Operation
from koinon.local import LocalCluster, Setup
from koinon.local.cluster_files import LocalClusterError
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.partitioner import partitioner
from tests.kit.clusters import running_cluster
from tests.kit.command_line import koinon_app

CITIES = 7
ROWS = {b"city%d/driver%03d" % (n % CITIES, n): b"v%d" % n for n in range(700)}


@pytest.fixture(scope="module", params=["murmur2", "md5", "crc16"])
def routed(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Filled with ``ROWS``. All before the first slash is hashed."""
    nodes = 3 if request.param == "murmur2" else 1
    with running_cluster(
        nodes=nodes,
        coordinators=1,
        setup=Setup(
            partitioner=request.param, router="until:2F", coordinator_flags=["--partitions", "64"]
        ),
    ) as cluster:
        with cluster.client() as client:
            client.put_many(ROWS.items())
        yield cluster


def run(cluster: LocalCluster, *arguments: str) -> str:
    at = ["--coordinators", cluster.coordinators]
    ended = CliRunner().invoke(koinon_app(), [*arguments, *at])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


async def test_rows_of_one_city_lie_in_one_partition_and_every_interface_finds_them(
    routed: LocalCluster,
) -> None:
    with routed.client() as client:
        config = client.table().cluster
        assert config.partitioner.endswith("(until:2f)")
        known = partitioner(config.partitioner, config.partition_count)
        assert config.partitioner_fingerprint == known.fingerprint
        assert {entry.key: entry.value for entry in client.scan()} == ROWS
        assert client.get_many(list(ROWS)) == list(ROWS.values())
        client.put(b"city1/alone", b"1")
        assert client.get(b"city1/alone") == b"1"
        assert client.delete(b"city1/alone")

    async with aio.connect(routed.coordinators, transport="grpc") as client:
        assert await client.get(b"city2/driver002") == b"v2"
    shown = run(routed, "scan", "--prefix", "city5/", "--keys-only").split()
    assert shown == sorted(key.decode() for key in ROWS if key.startswith(b"city5/"))
    places = [json.loads(run(routed, "where", key, "--json")) for key in ("city3/a", "city3/b")]
    assert [place["routing_bytes"] for place in places] == ["city3", "city3"]
    assert places[0]["partition_id"] == places[1]["partition_id"] == known.partition_of(b"city3")
    assert places[0]["hash"] == str(known.hash_of(b"city3"))


def test_rows_of_a_file_are_loaded_and_copies_are_alike(
    routed: LocalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("k,v\n" + "".join(f"city{n % 3}/file{n},{n}\n" for n in range(300)))
    run(routed, "load", str(file), "--key", "k", "--value", "v")
    with routed.client() as client:
        assert len(list(client.scan(prefix=b"city1/file"))) == 100
        client.delete_many([b"city%d/file%d" % (n % 3, n) for n in range(300)])
    run(routed, "admin", "verify")


def test_atomic_batch_holds_keys_of_one_city(routed: LocalCluster) -> None:
    with routed.client() as client:
        batch = client.batch(b"city1").put(b"city1/ride", b"1").increment(b"city1/rides")
        result = batch.check(b"city1/driver001", _version(client, b"city1/driver001")).commit()
        assert result.results == [None, 1, None]
        assert client.get_many([b"city1/ride", b"city1/rides"]) == [b"1", b"1"]
        with pytest.raises(InvalidArgumentError, match=r"b'city2/x' is routed by b'city2'"):
            client.batch(b"city1/any").put(b"city2/x", b"1")
        client.batch(b"city1/any").delete(b"city1/ride").delete(b"city1/rides").commit()


def test_node_refuses_a_batch_of_two_cities(routed: LocalCluster) -> None:
    """Whatever a client has checked."""
    with routed.client() as client:
        batch = client.batch(b"city1").put(b"city1/ride", b"1")
        batch._operations.operations.append(Operation("put", b"city2/ride", b"1"))
        with pytest.raises(InvalidArgumentError, match="same routing bytes"):
            batch.commit()
        assert client.get_many([b"city1/ride", b"city2/ride"]) == [None, None]


def _version(client: Client, key: bytes) -> int:
    entry = client.get_entry(key)
    assert entry is not None
    return entry.version


def test_clients_of_redis_are_told_that_slots_lead_nowhere(routed: LocalCluster) -> None:
    host, _, port = routed.redis_address("n1").rpartition(":")
    with redis.Redis(host=host, port=int(port)) as node:
        for asked in ("SLOTS", "SHARDS", "NODES", "KEYSLOT city1/x"):
            with pytest.raises(redis.ResponseError, match=r"until:2f.*no router but the hash tag"):
                node.execute_command(f"CLUSTER {asked}")
        if len(routed.node_names) == 1:
            assert node.get("city4/driver004") == b"v4"
            node.set("city4/guest", "g")
            with routed.client() as client:
                assert client.get(b"city4/guest") == b"g"
            assert node.delete("city4/guest") == 1


def test_directory_remembers_its_router(tmp_path: Path) -> None:
    with running_cluster(
        tmp_path, nodes=1, coordinators=1, setup=Setup(router="first:4")
    ) as cluster:
        cluster.stop()
    with pytest.raises(LocalClusterError, match=r"murmur2\(first:4\)"):
        LocalCluster(tmp_path, setup=Setup(router="tag"))
    with pytest.raises(LocalClusterError, match=r"murmur2\(first:4\)"):
        LocalCluster(tmp_path, setup=Setup(partitioner="murmur2"))
    LocalCluster(tmp_path, setup=Setup(router="first:4")).close()
    LocalCluster(tmp_path).close()
