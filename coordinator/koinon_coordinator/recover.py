"""``python -m koinon_coordinator.recover``: a new coordinator group after a majority is lost.

Makes the data directory of a group of one, from a surviving member's directory, from the tables of
the nodes, or from both: the newest wins, and of the member's log only what the nodes' tables do not
contradict counts (core/cluster/recovery.py). Changes nothing but the new directory.
The coordinator is then started on it and others are added as to any group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer

from koinon_coordinator.core.cluster.image import StateImage
from koinon_coordinator.core.cluster.recovery import (
    Committed,
    LoadsFound,
    copies_at_risk,
    image_of,
    loads_found,
    newest,
    recovered,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.raft import (
    TERM_MAX,
    Configuration,
    EntryKind,
    HardState,
    LogPosition,
    RestoredState,
    Snapshot,
    SnapshotWrite,
)
from koinon_coordinator.raft.storage import LmdbRaftStorage
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.state_codec import image_to_bytes
from koinon_proto.contract import convert
from koinon_proto.contract.access import NO_ACCESS_STATE
from koinon_proto.contract.addresses import check_address, check_name, is_address
from koinon_proto.contract.errors import ConfigurationError, KoinonError
from koinon_proto.contract.table import NodeStatus, Table, apply_update
from koinon_proto.process.printable import OutputError, let_go, protect_streams, tell
from koinon_proto.process.private_files import only_for_owner
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import dialing
from koinon_proto.server.rpc import COMMON_OPTIONS, error_of
from koinon_proto.v1 import table_pb2, table_pb2_grpc

CALL_TIMEOUT_S = 3.0
EXIT_REFUSED = 1
EXIT_CONFIGURATION = 2
EXIT_UNPRINTED = 4
EXIT_INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(kw_only=True)
class Found:
    """The state that could be read. ``term`` and ``index`` are those of the survivor's last entry,
    0 without a survivor; ``dropped``: number of its log entries that were never committed. All
    tables are of one cluster.
    """

    tables: dict[str, Table] = field(default_factory=dict)  # by the address that told it
    silent: dict[str, str] = field(default_factory=dict)  # address -> why
    survivor_id: str = ""
    survivor: StateImage | None = None
    log: RestoredState | None = None
    term: int = 0
    index: int = 0
    dropped: int = 0

    @property
    def cluster_id(self) -> str:
        """The id of the cluster whose state this is; empty while it is unknown."""
        if self.survivor is not None and self.survivor.config is not None:
            return self.survivor.config.cluster_id
        return next((table.cluster.cluster_id for table in self.tables.values()), "")

    def images(self) -> list[StateImage]:
        """All states that were found, the survivor's first."""
        known = [] if self.survivor is None else [self.survivor]
        return [*known, *map(image_of, self.tables.values())]

    def loads(self) -> LoadsFound:
        """Return the known bulk loads."""
        tables = self.tables.values()
        return loads_found(
            self.survivor, max(tables, key=lambda table: table.table_version, default=None)
        )


def read_survivor(directory: Path, member_id: str, found: Found) -> None:
    """Add the state in a stopped member's directory, with entries of unknown fate: they may have
    been committed. ``drop_uncommitted`` removes the entries that nodes know were not committed.

    Raises:
        DataDirectoryError, UnsupportedVersionError: it cannot be read; the file is named.
    """
    storage = LmdbRaftStorage(directory, member_id, Configuration(), read_only=True)
    try:
        found.log = log = storage.load()
    finally:
        storage.close()
    last = log.entries[-1] if log.entries else log.snapshot
    found.survivor_id = member_id
    found.survivor = _last_image(log)
    found.index = max(last.index, log.snapshot.index)
    voted = log.hard_state.term if log.hard_state.term <= TERM_MAX else 0  # a stranger's
    found.term = max(last.term, log.snapshot.term, voted)


def ask_nodes(addresses: Iterable[str], found: Found) -> None:
    """Add the tables of the nodes at the addresses, and of every node that these tables or the
    survivor name. A node that was only named and serves another cluster counts as silent.

    Raises:
        ConfigurationError: one of the addresses given serves another cluster.
    """
    given = list(dict.fromkeys(addresses))
    waiting = given[::-1]  # taken from the end
    if found.survivor is not None:
        nodes = [record.info for record in found.survivor.nodes]
        waiting[:0] = [n.address for n in nodes if n.status is not NodeStatus.LEFT]
    while waiting:
        address = waiting.pop()
        if address in found.tables or address in found.silent:
            continue
        try:
            table = _table_of(address)
        except KoinonError as error:
            found.silent[address] = str(error)
            continue
        ours, theirs = found.cluster_id, table.cluster.cluster_id
        if ours not in ("", theirs):
            if address in given:
                raise ConfigurationError(
                    reason=f"nodes: {address} belongs to cluster {theirs}, the others to {ours}: "
                    "name those of one cluster"
                )
            found.silent[address] = f"the address belongs to cluster {theirs} now"
            continue
        found.tables[address] = table
        nodes = list(table.nodes.values())
        waiting[:0] = [n.address for n in nodes if n.status is not NodeStatus.LEFT]


def drop_uncommitted(found: Found) -> None:
    """Remove the end of the survivor's log that the nodes' tables contradict.

    Raises:
        ConfigurationError: they contradict its snapshot, all of which was committed.
    """
    log = found.log
    if log is None:
        return
    committed = Committed(found.tables.values())
    wrong = next((i for i, state in _states(log) if committed.contradicts(state)), None)
    if wrong is None:
        return
    if wrong == log.snapshot.index:
        raise ConfigurationError(
            reason=f"from-member: the snapshot of {found.survivor_id} and the tables of the nodes "
            "differ at the same version, so they are of different histories: name the member or "
            "the nodes, not both"
        )
    kept = tuple(entry for entry in log.entries if entry.index < wrong)
    found.dropped = len(log.entries) - len(kept)
    found.survivor = _last_image(replace(log, entries=kept))


def _last_image(log: RestoredState) -> StateImage:
    *_, (_, state) = _states(log)
    return state.image()


def _states(log: RestoredState) -> Iterator[tuple[int, ClusterState]]:
    """Yield the state (one object) as of the snapshot and after each command, with its index."""
    machine = ReplicatedState()
    if log.snapshot.data:
        machine.restore(log.snapshot.data)
    yield log.snapshot.index, machine.state
    for entry in log.entries:
        if entry.index > log.snapshot.index and entry.kind is EntryKind.COMMAND:
            machine.apply(entry.index, entry.data)
            yield entry.index, machine.state


def _table_of(address: str) -> Table:
    with dialing().channel(address, ANY_SERVER, COMMON_OPTIONS) as channel:
        stub = table_pb2_grpc.TableServiceStub(channel)
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
    """
    images = [image for image in found.images() if image.config is not None and image.rows]
    if not images:
        raise ConfigurationError(
            reason="neither a surviving member nor a node knows of a partition table: "
            "name them with --from-member and --nodes"
        )
    access = found.survivor.access if found.survivor is not None else NO_ACCESS_STATE
    return replace(newest(images), loads=found.loads().image, access=access)


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
    """Return the text that an operator has to read before agreeing."""
    assert image.config is not None
    reached = set(found.tables)
    nodes = [r.info for r in image.nodes if r.info.status is not NodeStatus.LEFT]
    there = [n.number for n in nodes if n.address in reached]
    lines = [
        f"cluster        {image.config.cluster_id}",
        f"table          version {image.table_version}, {len(image.rows)} partitions",
        f"nodes reached  {len(there)} of {len(nodes)}",
    ]
    if found.survivor is not None:
        version = found.survivor.table_version
        lines.insert(1, f"survivor {found.survivor_id}: term {found.term}, table version {version}")
    if found.dropped:
        lines.append(
            f"The end of {found.survivor_id}'s log (entries: {found.dropped}) was never "
            "committed, as the nodes' tables show: it is left out."
        )
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
    lines += _report_access(image, found)
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


def _report_access(image: StateImage, found: Found) -> list[str]:
    access = image.access
    if found.survivor is None:
        return [
            "Users, roles and tokens are not known without a surviving member: if there were any, "
            "only root is let in until they are made again."
        ]
    newest_version = max((table.table_version for table in found.tables.values()), default=0)
    if access.version and newest_version > found.survivor.table_version:
        return [
            f"Users ({len(access.users)}), roles and tokens are {found.survivor_id}'s, which did "
            "not see the last changes: make sure that what was revoked last is revoked."
        ]
    return []


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
        drop_uncommitted(found)
        image = choose(found)
        _print("\n".join(report(image, found)), "nothing was made")
        assert image.config is not None
        if not yes:
            _confirm(image.config.cluster_id)
        write_group(data, member_id, advertise, recovered(image), found)
    except KoinonError as error:
        _end(str(error), EXIT_CONFIGURATION)
    _print(
        f"Made. Start it:  koinon coordinator --id {member_id} --listen {advertise} "
        f"--data {data} --join\nThen add the others: start each with --join and a new directory, "
        "and name it with  koinon admin coordinators add.",
        f"{data} was made",
    )


def _print(text: str, state: str) -> None:
    """Print the text. If printing fails, exit with a message about the work done so far."""
    try:
        tell(text)
    except OutputError as error:
        let_go()
        _end(f"{state}; the output could not be printed: {error.reason}", EXIT_UNPRINTED)


def _confirm(cluster_id: str) -> None:
    if not sys.stdin.isatty():
        _end("not a terminal: say --yes to go on without being asked", EXIT_CONFIGURATION)
    try:
        answer = typer.prompt("Type the cluster id to go on", default="", show_default=False)
    except typer.Abort as abort:  # Ctrl-C, or Ctrl-D
        ended = isinstance(abort.__context__, EOFError)
        _end("no answer; nothing was made", EXIT_CONFIGURATION if ended else EXIT_INTERRUPTED)
    if answer.strip() != cluster_id:
        _end("that is not the cluster id; nothing was made", EXIT_REFUSED)


def _end(reason: str, code: int) -> NoReturn:
    tell(f"koinon coordinator recovery: {reason}", stderr=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    protect_streams()
    only_for_owner()
    app(prog_name="koinon recover-coordinators")
