"""Carries out the steps of a schedule on a running cluster, and takes them back at the end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable

from koinon.operate.plans import PlanKind, PlanRequest
from koinon_proto.contract.cluster_errors import PlanStaleError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeStatus
from tests.nemesis.cluster import CLIENTS, NemesisCluster
from tests.nemesis.journal import Journal
from tests.nemesis.schedules import KINDS, Schedule, Step

SETTLE_S = 25.0  # for what must find all well
HEAL_S = 90.0
STOP_S = 30.0
PLAN_TRIES = 5
REFUSE_S = 30.0  # until a process has read that its directory is another's, and ended
SLOW_RATE = 0.2  # of a lease's clock, far beyond what the cluster allows for
DEAF, UNHEARD, DEAF_TO_COORDINATORS = 0, 1, 2  # one-way; else unheard by the coordinators


class Nemesis:
    """``journal`` is told of every fault; ``notes`` are for whoever reads the result."""

    def __init__(self, cluster: NemesisCluster, journal: Journal) -> None:
        self._cluster = cluster
        self._journal = journal
        self._down: set[str] = set()  # processes that are not to run now
        self._undo: dict[Step, Callable[[], None]] = {}
        self._drained: set[str] = set()
        self.done: Counter[str] = Counter()  # faults that were carried out, by kind
        self.kills = 0  # of members that ran
        self.notes: list[str] = []

    def run(self, schedule: Schedule, began_at: float) -> None:
        """Carry out all of it; times of the schedule count from ``began_at`` (monotonic)."""
        events = [(step.at_s, number, step) for number, step in enumerate(schedule.steps)]
        events += [(s.at_s + s.lasts_s, n, s) for n, s in enumerate(schedule.steps)]
        begun: set[int] = set()
        for at_s, number, step in sorted(events, key=lambda event: event[:2]):
            time.sleep(max(0.0, began_at + at_s - time.monotonic()))
            if number in begun:
                self._end(step)
            else:
                begun.add(number)
                self._begin(step)
        time.sleep(max(0.0, began_at + schedule.seconds - time.monotonic()))

    def heal(self) -> None:
        """End all faults; every process runs, and all is well, when this returns.

        Raises:
            AssertionError: it does not become well.
            subprocess.TimeoutExpired: a process did not end that should have.
        """
        for step in list(self._undo):
            self._end(step)
        for name in (*self._cluster.members, *CLIENTS):
            self._run(name)
        self._activate()
        self._journal.note("heal", None)
        self._cluster.settled(HEAL_S)

    # --- one step --------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        try:
            if KINDS[step.kind].alone:
                self._cluster.settled(SETTLE_S)
            targets = tuple(dict.fromkeys(map(self._cluster.resolve, step.targets)))
            self._journal.note(f"begin {step.kind}", [*targets, step.amount])
            self._undo[step] = _BEGIN[step.kind](self, step, targets)
            self.done[step.kind] += 1
        except (KoinonError, AssertionError, subprocess.SubprocessError) as error:
            self.notes.append(f"not done: {step}: {type(error).__name__}: {error}")

    def _end(self, step: Step) -> None:
        undo = self._undo.pop(step, None)
        if undo is not None:
            undo()
            self._journal.note(f"end {step.kind}", list(step.targets))

    def _stop(self, name: str) -> None:
        self._down.add(name)
        self.kills += name in self._cluster.members and self._cluster.running(name)
        self._cluster.kill(name)

    def _run(self, name: str) -> None:
        """Let the process run, whatever has become of it."""
        cluster = self._cluster
        if not cluster.running(name):
            if name not in self._down and name in cluster.members:
                self.notes.append(f"{name} has ended by itself")
            (cluster.start_client if name in CLIENTS else cluster.start)(name)
        self._down.discard(name)

    # --- processes -------------------------------------------------------------------------------

    def _kill(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        for name in targets:
            self._stop(name)
        return _for_each(targets, self._run)

    def _pause(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        for name in targets:
            self._cluster.send(name, signal.SIGSTOP)
        return _for_each(targets, lambda name: self._cluster.send(name, signal.SIGCONT))

    def _pause_in_read(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        (name,) = targets
        self._cluster.stop_in_next_read(name, wanted=True)
        self._cluster.wait_stopped(name, timeout_s=1.0)

        def go_on() -> None:
            self._cluster.stop_in_next_read(name, wanted=False)
            self._cluster.send(name, signal.SIGCONT)

        return go_on

    def _restart(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        self._down.update(targets)
        told = {name: self._cluster.terminate(name) for name in targets}

        def start_again() -> None:
            for name, process in told.items():
                if process is not None:
                    self._cluster.let_end(name)
                    process.wait(STOP_S)
                self._run(name)

        return start_again

    def _uptime(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """The processes live on under clocks that began long ago."""
        for name in targets:
            self._cluster.offset_clocks(name, int(step.amount))
        return self._kill(step, targets)

    def _descriptors(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """The process opens no file and takes no connection more; what it has open stays."""
        (name,) = targets
        return self._cluster.take_descriptors(name)

    # --- the network -----------------------------------------------------------------------------

    def _block(self, *pairs: tuple[list[str], list[str]]) -> Callable[[], None]:
        for senders, receivers in pairs:
            self._cluster.links.block(senders, receivers)

        def unblock() -> None:
            for senders, receivers in pairs:
                self._cluster.links.unblock(senders, receivers)

        return unblock

    def _split(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        cluster = self._cluster
        everyone = [*cluster.members, *CLIENTS]
        inside = list(targets)
        outside = [name for name in everyone if name not in inside]
        if not step.amount:
            return self._block((inside, outside), (outside, inside))
        node = [name for name in inside if name not in CLIENTS]
        client = [name for name in inside if name in CLIENTS]
        coordinators = cluster.coordinator_names
        beyond = [name for name in cluster.members if name not in node]
        return self._block(
            (node, coordinators), (coordinators, node), (client, beyond), (beyond, client)
        )

    def _isolate(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        (name,) = targets
        self._cluster.hosts.isolate(name)
        return lambda: self._cluster.hosts.rejoin(name)

    def _one_way(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        (name,) = targets
        others = self._cluster.members
        if step.amount >= DEAF_TO_COORDINATORS:
            others = self._cluster.coordinator_names
        pair = ([name], others)
        if step.amount in (DEAF, DEAF_TO_COORDINATORS):
            pair = (others, [name])
        return self._block(pair)

    def _one_way_link(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """Block the link from the first to the second; a primary has none to itself."""
        return self._block((list(targets[:1]), list(targets[1:])))

    def _loss(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        for name in targets:
            self._cluster.links.lose(name, int(step.amount))
        return _for_each(targets, lambda name: self._cluster.links.lose(name, 0))

    def _delay(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        for name in targets:
            self._cluster.links.delay(name, int(step.amount))
        return _for_each(targets, self._cluster.links.hasten)

    # --- disks -----------------------------------------------------------------------------------

    def _full_disk(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        disk = self._cluster.disks[targets[0]]
        disk.fill()
        return disk.empty

    def _frozen_disk(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        disk = self._cluster.disks[targets[0]]
        disk.freeze()
        return disk.thaw

    def _eio(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        (name,) = targets
        self._down.add(name)  # it ends by itself at its next write
        self._cluster.disks[name].shut_down()
        began_at = time.monotonic()  # a schedule may be late, and the fault then short

        def repair() -> None:
            if self._cluster.running(name):
                lasted_s = time.monotonic() - began_at
                self.notes.append(f"{name} went on for {lasted_s:.1f} s on a dead disk")
            self._stop(name)
            self._cluster.disks[name].repair()
            self._run(name)
            self._cluster.settled(HEAL_S)

        return repair

    def _wipe(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        (name,) = targets
        self._stop(name)
        self._cluster.disks[name].wipe()
        return lambda: self._start_alone(name)

    def _swap(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """Each of two nodes is started on the other one's directory, and has to end by itself."""
        one, other = targets
        disks = self._cluster.disks

        def swap() -> None:
            for name in targets:
                self._stop(name)
            disks[one].swap_with(disks[other])

        def swap_back() -> None:
            for name in targets:
                if not self._cluster.wait_stopped(name, REFUSE_S):
                    self.notes.append(f"{name} runs on the directory of another node")
            swap()
            for name in targets:
                self._run(name)
            self._cluster.settled(HEAL_S)

        swap()
        for name in targets:
            self._cluster.start(name)
        return swap_back

    def _roll_back(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """The directory as it was before the node's last life is put back."""
        (name,) = targets
        disk = self._cluster.disks[name]
        self._stop(name)
        disk.keep()
        self._start_alone(name)

        def put_back() -> None:
            self._stop(name)
            disk.put_back()
            self._start_alone(name)

        return put_back

    def _start_alone(self, name: str) -> None:
        """Start a node and wait until all is well: a copy was destroyed."""
        self._run(name)
        self._cluster.settled(HEAL_S)

    # --- clocks ----------------------------------------------------------------------------------

    def _clocks(self, names: tuple[str, ...], **wanted: float) -> Callable[[], None]:
        for name in names:
            self._cluster.set_clocks(name, **wanted)
        return _for_each(names, self._cluster.set_clocks)

    def _wall_clock(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        return self._clocks(targets, wall_s=step.amount)

    def _machine_clock(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """Unix time jumps for every server by as much, as on one machine."""
        return self._wall_clock(step, targets)

    def _drift(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        return self._clocks(targets, lease_rate=step.amount)

    def _slow_lease(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        mend = self._clocks(targets[:1], lease_rate=SLOW_RATE)
        unblock = self._split(step, targets)

        def undo() -> None:
            unblock()
            mend()

        return undo

    # --- an operator -----------------------------------------------------------------------------

    def _transfer(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        with self._cluster.admin() as admin:
            admin.transfer_leadership()
        return lambda: None

    def _moves(self, step: Step, targets: tuple[str, ...]) -> Callable[[], None]:
        """Drain a node; then take that back, and rebalance."""
        (name,) = targets
        self._drained.add(name)
        self._carry_out(PlanRequest(kind=PlanKind.DRAIN, node_id=name))

        def back() -> None:
            with contextlib.suppress(KoinonError):  # at the end it must work
                self._activate()
                self._carry_out(PlanRequest(kind=PlanKind.REBALANCE))

        return back

    def _carry_out(self, request: PlanRequest) -> None:
        with self._cluster.admin() as admin:
            if request.node_id:
                admin.set_node_status(request.node_id, NodeStatus.DRAINING)
            for tries_left in reversed(range(PLAN_TRIES)):
                plan = admin.plan(request)
                try:
                    if plan.moves:
                        admin.execute(request, plan.plan_id)
                except PlanStaleError:  # the cluster has changed since it was shown
                    if not tries_left:
                        raise
                else:
                    return

    def _activate(self) -> None:
        if not self._drained:
            return
        deadline = time.monotonic() + HEAL_S
        while True:
            try:
                with self._cluster.admin() as admin:
                    for name in sorted(self._drained):
                        admin.set_node_status(name, NodeStatus.ACTIVE)
                self._drained.clear()
            except KoinonError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return


def _for_each(names: tuple[str, ...], act: Callable[[str], None]) -> Callable[[], None]:
    def act_on_all() -> None:
        for name in names:
            act(name)

    return act_on_all


_BEGIN: dict[str, Callable[[Nemesis, Step, tuple[str, ...]], Callable[[], None]]] = {
    name: getattr(Nemesis, "_" + name.replace("-", "_")) for name in KINDS
}
