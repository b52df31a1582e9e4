"""The recovery tool: what it reads of a surviving member and of nodes, and which of it counts."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from koinon_coordinator import recover as recover_module
from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    PartitionsHosted,
    SetMoveSettings,
)
from koinon_coordinator.core.cluster.image import EMPTY_IMAGE, StateImage
from koinon_coordinator.core.cluster.recovery import recovered
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.raft import (
    Configuration,
    Entry,
    EntryKind,
    HardState,
    LogPosition,
    Snapshot,
    SnapshotWrite,
)
from koinon_coordinator.raft.storage import LmdbRaftStorage
from koinon_coordinator.recover import (
    Found,
    app,
    ask_nodes,
    choose,
    drop_uncommitted,
    read_survivor,
    report,
    write_group,
)
from koinon_coordinator.wire.state_codec import command_to_bytes, image_to_bytes
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MoveSettings, NodeNumber, Table
from koinon_proto.process import printable
from koinon_proto.process.printable import OutputError
from koinon_proto.v1 import table_pb2_grpc
from tests.coordinator.kit.load_states import commit_load, open_load
from tests.coordinator.kit.states import change_of, numbers
from tests.coordinator.kit.support import cluster_config, hosted_of, register

N1, N2, N3 = numbers(1, 2, 3)
ALL = (N1, N2, N3)
BASE = LogPosition(4, 2)  # the survivor's log begins after it


class History:
    """Commands, and the state that they make."""

    def __init__(self, commands: Iterable[Command] = ()) -> None:
        self.commands: list[Command] = []
        self.state = ClusterState()
        self.add(*commands)

    def add(self, *commands: Command) -> History:
        for command in commands:
            self.commands.append(command)
            self.state.apply(command, self.index)
        return self

    @property
    def index(self) -> int:
        """The last command's in the log."""
        return BASE.index + len(self.commands)

    def table(self) -> Table:
        table = self.state.table()
        assert table is not None
        return table

    def alter(self, *in_sync: int) -> History:
        """The primary wants partition 0 to have these in sync."""
        row = self.state.row(0)
        assert row is not None
        change = change_of(row, *in_sync)
        return self.add(AlterPartitions(node_number=N1, node_epoch=1, changes=(change,)))


def served(cluster_id: str = "c0ffee") -> History:
    """Three nodes with one partition, in sync on all."""
    config = replace(cluster_config(partitions=1, replicas=3, nodes=3), cluster_id=cluster_id)
    history = History([CreateCluster(config=config), *(register(f"n{n}") for n in ALL)])
    history.add(*(ConfirmRegistration(node_number=n, node_epoch=1) for n in ALL))
    history.add(AssignPartitions(replicas=(ALL,)))
    hosted = hosted_of(history.state.assigned_to(N1))
    return history.add(PartitionsHosted(node_number=N1, node_epoch=1, hosted=hosted))


def make_member(
    directory: Path,
    commands: Sequence[Command],
    snapshot: StateImage = EMPTY_IMAGE,
    *,
    term: int = 3,
) -> Path:
    """Make the directory of c1, in whose log the commands follow the snapshot."""
    configuration = Configuration(voters={"c1": "127.0.0.1:1"})
    storage = LmdbRaftStorage(directory, "c1", configuration, map_bytes=1 << 20)
    data = image_to_bytes(snapshot)
    storage.save(
        hard_state=HardState(term=term, vote=None),
        snapshot_write=SnapshotWrite(
            snapshot=Snapshot.of(*BASE, configuration, data),
            base=BASE,
            installed=True,
        ),
        entries=[
            Entry(index, 2, EntryKind.COMMAND, command_to_bytes(command))
            for index, command in enumerate(commands, BASE.index + 1)
        ],
    )
    storage.close()
    return directory


def found_in(directory: Path, *tables: Table) -> Found:
    found = Found()
    read_survivor(directory, "c1", found)
    found.tables = {f"n{n}:1": table for n, table in enumerate(tables, 1)}
    drop_uncommitted(found)
    return found


# --- entries that were never committed -----------------------------------------------------------

OTHER = SetMoveSettings(settings=MoveSettings(moves_per_node=9))


def test_recovery_survivors_uncommitted_entry_loses_to_what_nodes_were_told(tmp_path: Path) -> None:
    """Writes were acknowledged by n1 and n2 alone: n3 must not count as in sync again."""
    told = served().alter(1, 2)
    log = served().add(OTHER)
    assert log.state.table_version == told.state.table_version
    found = found_in(make_member(tmp_path / "c1", log.commands), told.table())
    image = choose(found)
    assert image.rows[0].in_sync == (N1, N2)
    assert image.move_settings == MoveSettings()
    told_so = "The end of c1's log (entries: 1) was never committed"
    assert any(told_so in line for line in report(image, found))
    assert found.index == log.index  # no index of the old group comes again


@pytest.mark.parametrize("more", [0, 2])
def test_recovery_newer_table_tells_which_entries_before_it_were_not_committed(
    tmp_path: Path, more: int
) -> None:
    """The survivor knows a load by its log index, where the real history has another load."""
    told = served().alter(1, 2).add(open_load("committed"))
    for n in range(more):
        told.add(FenceNode(node_number=numbers(2, 3)[n], node_epoch=1))
    log = served().add(OTHER, open_load("never committed"))
    assert [a.load_id for a in told.table().loads] == [a.load_id for a in log.table().loads]
    found = found_in(make_member(tmp_path / "c1", log.commands), told.table())
    image = choose(found)
    assert (found.dropped, image.rows, image.loads.active) == (2, told.table().rows, ())
    assert found.loads().open == (log.index,)


def test_recovery_survivor_that_nodes_do_not_contradict_keeps_all_of_its_log(
    tmp_path: Path,
) -> None:
    log = served().add(open_load("job"))
    older = log.table()
    log.add(commit_load(log.index, partition_ids=(0,))).alter(1, 2)
    newer = log.table()
    found = found_in(make_member(tmp_path / "c1", log.alter(1, 2, 3).commands), older, newer)
    assert (found.dropped, choose(found)) == (0, log.state.image())


def test_recovery_from_a_member_whose_term_was_a_strangers_begins_above_its_logs(
    tmp_path: Path,
) -> None:
    history = served()
    directory = make_member(tmp_path / "c1", history.commands, term=(1 << 64) - 1)
    found = found_in(directory)
    assert found.term == 2
    write_group(tmp_path / "c9", "c9", "127.0.0.1:2", recovered(choose(found)), found)
    storage = LmdbRaftStorage(tmp_path / "c9", "c9", Configuration(), read_only=True)
    assert storage.load().hard_state.term == 3
    storage.close()


def test_recovery_snapshot_that_nodes_contradict_is_refused(tmp_path: Path) -> None:
    snapshot = served().add(OTHER).state.image()
    with pytest.raises(ConfigurationError, match="not both"):
        found_in(make_member(tmp_path / "c1", (), snapshot), served().alter(1, 2).table())


# --- addresses -----------------------------------------------------------------------------------


class Tables(table_pb2_grpc.TableServiceServicer):
    """A node of which nothing is asked but its table."""

    def __init__(self) -> None:
        self.table: Table | None = None

    def GetTable(self, request: Any, context: Any) -> Any:  # noqa: N802
        assert self.table is not None
        return convert.update_to_proto(self.table.since(0))


@contextmanager
def nodes(count: int) -> Iterator[list[tuple[str, Tables]]]:
    """Serve so many, each at an address."""
    servers, there = [], []
    for _ in range(count):
        server, servicer = grpc.server(ThreadPoolExecutor(1)), Tables()
        add: Any = table_pb2_grpc.add_TableServiceServicer_to_server
        add(servicer, server)
        there.append((f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", servicer))
        server.start()
        servers.append(server)
    try:
        yield there
    finally:
        for server in servers:
            server.stop(None)


def at(table: Table, addresses: Sequence[str]) -> Table:
    """The table with its nodes at these addresses, the others gone from it."""
    infos = [table.nodes[NodeNumber(n)] for n in range(1, len(addresses) + 1)]
    moved = [replace(i, address=a) for i, a in zip(infos, addresses, strict=True)]
    return replace(table, nodes={info.number: info for info in moved})


def test_recovery_address_that_another_cluster_uses_now_counts_as_silent() -> None:
    with nodes(3) as ((first, one), (reused, other), (strange, elsewhere)):
        one.table = at(served().table(), [first, reused])
        other.table = at(served("beef").table(), [reused, strange])
        elsewhere.table = other.table
        found = Found()
        ask_nodes([first], found)
        assert list(found.tables) == [first]
        assert found.silent == {reused: "the address belongs to cluster beef now"}  # not followed
        image = choose(found)
        assert image.config is not None
        assert image.config.cluster_id == "c0ffee"


def test_recovery_given_address_of_another_cluster_is_refused_by_name() -> None:
    with nodes(2) as ((first, one), (strange, other)):
        one.table = at(served().table(), [first])
        other.table = at(served("beef").table(), [strange])
        with pytest.raises(ConfigurationError, match=f"{strange} belongs to cluster beef"):
            ask_nodes([first, strange], Found())


# --- the survivor's directory --------------------------------------------------------------------


def recover(directory: Path, data: Path) -> Any:
    named = ["--id", "c4", "--advertise", "127.0.0.1:7400", "--data", str(data), "--yes"]
    return CliRunner().invoke(app, [*named, "--from-member", f"c1={directory}"])


def test_recovery_from_a_directory_of_no_member_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = recover(empty, tmp_path / "new")
    assert result.exit_code == 2
    assert "no member's directory" in result.stderr
    assert list(empty.iterdir()) == []
    assert not (tmp_path / "new").exists()


def test_recovery_says_what_it_found_in_the_survivor_and_leaves_it_alone(tmp_path: Path) -> None:
    log = served()
    directory = make_member(tmp_path / "c1", log.commands)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    result = recover(directory, tmp_path / "new")
    assert result.exit_code == 0, result.stderr
    version = log.state.table_version
    assert f"survivor c1: term 3, table version {version}" in result.stdout
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_recovery_whose_output_fails_says_whether_the_directory_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_member(tmp_path / "c1", served().commands)
    for fails_at, state, made in (
        ("table  ", "nothing was made", False),
        ("Made.", "was made", True),
    ):

        def tell(text: str, *, stderr: bool = False, fails_at: str = fails_at) -> None:
            if fails_at in text:
                raise OutputError(OSError(errno.ENOSPC, "No space left on device"))
            printable.tell(text, stderr=stderr)

        monkeypatch.setattr(recover_module, "tell", tell)
        result = recover(directory, tmp_path / "new")
        assert result.exit_code == 4
        assert f"{state}; the output could not be printed: No space left" in result.stderr
        assert (tmp_path / "new").exists() == made
