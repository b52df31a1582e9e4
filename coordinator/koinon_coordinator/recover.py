"""``python -m koinon_coordinator.recover``: a new coordinator group after a majority is lost.

Makes the data directory of a group of one, from a surviving member's directory, from the tables of
the nodes, or from both: the newest wins (core/recovery.py). Changes nothing but the new directory.
The coordinator is then started on it and others are added as to any group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer

from koinon_proto import convert
from koinon_proto.addresses import check_address, is_address
from koinon_proto.errors import ConfigurationError, KoinonError, WrongClusterError
from koinon_proto.rpc import CHANNEL_OPTIONS, error_of
from koinon_proto.table import NodeStatus, Table, apply_update
from koinon_proto.v1 import table_pb2, table_pb2_grpc

from .convert import image_to_bytes
from .core.decisions import check_name
from .core.raft import Configuration, EntryKind, HardState, LogPosition, Snapshot, SnapshotWrite
from .core.recovery import (
    LoadsFound,
    copies_at_risk,
    image_of,
    loads_found,
    newest,
    recovered,
)
from .core.state import StateImage
from .raft.storage import LmdbRaftStorage
from .replicated import ReplicatedState

CALL_TIMEOUT_S = 3.0
EXIT_REFUSED = 1
EXIT_CONFIGURATION = 2

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(kw_only=True)
class Found:
    """What could be read. ``term`` and ``index`` are the survivor's last, 0 without one."""

    images: list[StateImage] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)  # by the address that told it
    silent: dict[str, str] = field(default_factory=dict)  # address -> why
    survivor: StateImage | None = None
    term: int = 0
    index: int = 0

    def loads(self) -> LoadsFound:
        """What is known of bulk loads."""
        tables = self.tables.values()
        return loads_found(
            self.survivor, max(tables, key=lambda table: table.table_version, default=None)
        )


def read_survivor(directory: Path, member_id: str, found: Found) -> None:
    """Add what a stopped member's directory holds, entries of unknown fate included: they may have
    been committed, and if they were not, committing them now breaks no promise.

    Raises:
        DataDirectoryError, UnsupportedVersionError: it cannot be read; the file is named.
    """
    storage = LmdbRaftStorage(directory, member_id, Configuration())
    try:
        restored = storage.load()
    finally:
        storage.close()
    machine = ReplicatedState()
    if restored.snapshot.data:
        machine.restore(restored.snapshot.data)
    index, term = restored.snapshot.index, restored.snapshot.term
    for entry in restored.entries:
        if entry.index <= restored.snapshot.index:
            continue
        index, term = entry.index, entry.term
        if entry.kind is EntryKind.COMMAND:
            machine.apply(entry.index, entry.data)
    found.survivor = machine.state.image()
    found.images.insert(0, found.survivor)
    found.index, found.term = index, max(term, restored.hard_state.term)


def ask_nodes(addresses: Iterable[str], found: Found) -> None:
    """Add the tables of the nodes at the addresses, and of every node that these name."""
    waiting = list(dict.fromkeys(addresses))
    for image in found.images:
        waiting += [r.info.address for r in image.nodes if r.info.status is not NodeStatus.LEFT]
    while waiting:
        address = waiting.pop()
        if address in found.tables or address in found.silent:
            continue
        try:
            table = _table_of(address)
        except KoinonError as error:
            found.silent[address] = str(error)
            continue
        found.tables[address] = table
        found.images.append(image_of(table))
        waiting += [n.address for n in table.nodes.values() if n.status is not NodeStatus.LEFT]


def _table_of(address: str) -> Table:
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = table_pb2_grpc.TableServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply = stub.GetTable(table_pb2.GetTableRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            typed = error_of(error)
            raise typed or ConfigurationError(reason="does not answer") from error
    table = apply_update(None, convert.update_from_proto(reply))
    assert table is not None  # an update to a caller without a table is whole
    return table


def choose(found: Found) -> StateImage:
    """Return the newest state.

    Raises:
        ConfigurationError: nothing was found, or no cluster in it.
        WrongClusterError: what was found belongs to more than one cluster.
    """
    images = [image for image in found.images if image.config is not None and image.rows]
    if not images:
        raise ConfigurationError(
            reason="neither a surviving member nor a node knows of a partition table: "
            "name them with --from-member and --nodes"
        )
    ids = list(dict.fromkeys(i.config.cluster_id for i in images if i.config is not None))
    if len(ids) > 1:
        raise WrongClusterError(expected_cluster_id=ids[0], actual_cluster_id=ids[1])
    return replace(newest(images), loads=found.loads().image)


def write_group(
    directory: Path, member_id: str, address: str, image: StateImage, found: Found
) -> None:
    """Make the directory of a group of one that begins with the state.

    Raises:
        ConfigurationError: the directory is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(reason=f"data {directory}: is not empty; name a new directory")
    configuration = Configuration(voters={member_id: address})
    index, term = found.index + 1, found.term + 1
    storage = LmdbRaftStorage(directory, member_id, configuration)
    try:
        storage.save(
            hard_state=HardState(term=term, vote=None),
            snapshot_write=SnapshotWrite(
                snapshot=Snapshot.of(index, term, configuration, image_to_bytes(image)),
                base=LogPosition(index, term),
                installed=True,
            ),
            entries=(),
        )
    finally:
        storage.close()


def report(image: StateImage, found: Found) -> list[str]:
    """Return what an operator has to know before they agree."""
    assert image.config is not None
    reached = set(found.tables)
    nodes = [r.info for r in image.nodes if r.info.status is not NodeStatus.LEFT]
    there = [n.number for n in nodes if n.address in reached]
    lines = [
        f"cluster        {image.config.cluster_id}",
        f"table          version {image.table_version}, {len(image.rows)} partitions",
        f"nodes reached  {len(there)} of {len(nodes)}",
    ]
    for node in nodes:
        if node.number not in there:
            why = found.silent.get(node.address, "not asked")
            lines.append(f"  missing      {node.node_id} at {node.address}: {why}")
    if len(there) < len(nodes):
        lines.append(
            "A missing node may know of newer decisions than those found here. If it led by them, "
            "writes that only it acknowledged are lost to this recovery."
        )
    at_risk = copies_at_risk(image, there)
    if at_risk:
        ids = ", ".join(str(row.partition_id) for row in at_risk[:20])
        more = f" and {len(at_risk) - 20} more" if len(at_risk) > 20 else ""
        lines.append(f"Partitions whose in-sync replicas are all missing: {ids}{more}.")
    lines += _report_loads(found.loads())
    lines.append(
        "The old coordinators must never run again: end them and remove their directories first."
    )
    return lines


def _report_loads(loads: LoadsFound) -> list[str]:
    lines = []
    if loads.merging:
        lines.append(
            f"Bulk loads that were being merged and cannot be completed: {_ids(loads.merging)}. "
            "Some of their rows may be readable, the others are lost: run their jobs again."
        )
    if loads.open:
        lines.append(
            f"Bulk loads that were open and are given up: {_ids(loads.open)}. Nothing of them is "
            "readable: run their jobs again."
        )
    if not loads.is_whole:
        lines.append(
            "Which batches of streaming queries have been applied is not known up to the end: a "
            "query that repeats its last batch may apply it a second time."
        )
    return lines


def _ids(load_ids: Iterable[int]) -> str:
    return ", ".join(str(load_id) for load_id in load_ids)


@app.command()
def main(
    member_id: Annotated[str, typer.Option("--id", help="the new coordinator's name")],
    advertise: Annotated[str, typer.Option(help="host:port that it will serve on")],
    data: Annotated[Path, typer.Option(help="its directory, to be made")],
    from_member: Annotated[
        str, typer.Option(help="id=directory of a stopped member that survived")
    ] = "",
    nodes: Annotated[str, typer.Option(help="host:port,… of storage nodes that run")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Make a new coordinator group of one after a majority of the old one is lost for good.

    Name everything that survived: the newest state wins. Storage nodes keep running meanwhile, and
    serve nothing until the new coordinator is up.
    """
    found = Found()
    try:
        check_name("id", member_id)
        check_address("advertise", advertise)
        addresses = [a.strip() for a in nodes.split(",") if a.strip()]
        for address in addresses:
            if not is_address(address):
                raise ConfigurationError(reason=f"nodes: {address!r} is not host:port")
        if from_member:
            name, separator, directory = from_member.partition("=")
            if not separator or not Path(directory).is_dir():
                raise ConfigurationError(
                    reason=f"from-member: {from_member!r} is not id=directory of a member"
                )
            read_survivor(Path(directory), name, found)
        ask_nodes(addresses, found)
        image = choose(found)
        for line in report(image, found):
            print(line)
        assert image.config is not None
        if not yes:
            _confirm(image.config.cluster_id)
        write_group(data, member_id, advertise, recovered(image), found)
    except KoinonError as error:
        _end(str(error), EXIT_CONFIGURATION)
    print(
        f"Made. Start it:  koinon coordinator --id {member_id} --listen {advertise} "
        f"--data {data} --join\nThen add the others: start each with --join and a new directory, "
        "and name it with  koinon admin coordinators add."
    )


def _confirm(cluster_id: str) -> None:
    if not sys.stdin.isatty():
        _end("not a terminal: say --yes to go on without being asked", EXIT_CONFIGURATION)
    answer = typer.prompt("Type the cluster id to go on", default="", show_default=False)
    if answer.strip() != cluster_id:
        _end("that is not the cluster id; nothing was made", EXIT_REFUSED)


def _end(reason: str, code: int) -> NoReturn:
    print(f"koinon coordinator recovery: {reason}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="koinon recover-coordinators")
