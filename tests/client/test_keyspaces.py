"""Opening keyspaces: the coordinators are asked, and send what has changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import koinon
from koinon_proto.contract.errors import UnknownKeyspaceError
from koinon_proto.contract.keyspaces import KeyspaceList
from tests.client.kit.fake_cluster import FakeCluster


class Asked:
    """A cluster with a keyspace ``other``, and a client."""

    def __init__(self, cluster: FakeCluster, client: koinon.Client) -> None:
        self.cluster = cluster
        self.client = client
        self.known: list[int] = []  # table versions that questions for the status named
        for node in cluster.nodes:
            node.before = self._note

    async def _note(self, method: str, request: Any) -> None:
        if method == "GetStatus":
            self.known.append(request.known_version)

    def id_of(self, name: str) -> int:
        return self.client.keyspace(name)._target.keyspace_id

    def make_anew(self) -> None:
        """Drop ``other``, and create another under its name."""
        known = self.cluster.table.keyspace_list.keyspaces
        gone = tuple(replace(keyspace, is_dropping=True) for keyspace in known)
        dropped = KeyspaceList(changed_at=self.cluster.table.table_version, keyspaces=gone)
        self.cluster.table = replace(self.cluster.table, keyspace_list=dropped)
        self.cluster.create_keyspace("other", 4)


@pytest.fixture
def asked(cluster: FakeCluster) -> Iterator[Asked]:
    cluster.create_keyspace("other", 4)
    with koinon.connect(cluster.seeds) as client:
        yield Asked(cluster, client)


def test_keyspace_is_opened_without_the_table_being_sent_again(asked: Asked) -> None:
    ids = {asked.id_of("other") for _ in range(3)}
    assert len(ids) == 1
    assert asked.known[-2:] == [asked.cluster.table.table_version] * 2


def test_keyspace_that_the_table_lacks_is_asked_for(asked: Asked) -> None:
    asked.id_of("other")
    asked.cluster.create_keyspace("new", 4)
    assert asked.id_of("new") != asked.id_of("other")
    with pytest.raises(UnknownKeyspaceError):
        asked.client.keyspace("none")


def test_keyspace_made_anew_is_found_at_once(asked: Asked) -> None:
    other = asked.client.keyspace("other")
    asked.make_anew()
    assert asked.id_of("other") != other._target.keyspace_id
    for node in asked.cluster.nodes:
        node.refuse = lambda _: UnknownKeyspaceError()
    with pytest.raises(UnknownKeyspaceError):
        other.put(b"k", b"v")  # it does not turn into the other one
