"""An operator that changes who may do what, and a caller who shows nodes what it has been given.

Drawn from numbers of their own, in a share of the seeds only, so that others are what they were.
The operator changes one thing after another: grants of a role, a user's roles and whether it is
blocked, its tokens, revoked certificates. Each change names the version that it was made for, as
``koinon admin`` does, so that one that comes late changes nothing. Coordinators fail over as they
do anyway, and now and then a node is cut off from them as soon as a change is committed.

What must hold:

- from the answer to a change on, a node that holds a lease goes by that change, or a later one;
- what a node answers to a caller, it answers by a state that is no older than the newest change
  whose answer came before the call was sent, and as that state says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from koinon_coordinator.core.cluster.commands import (
    AccessCommand,
    AddToken,
    Command,
    DropToken,
    PutRole,
    PutUser,
    RevokeCertificate,
)
from koinon_coordinator.leader.change_barrier import ChangeBarrier
from koinon_proto.contract.access import (
    Access,
    AccessState,
    Action,
    Effect,
    Grant,
    Permissions,
    Role,
    Token,
    User,
    secret_hash,
)
from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.keyspaces import DEFAULT_ID
from tests.simulation.checkers import ViolationError
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation
    from tests.simulation.node import SimulatedNode

SHARE = 0.15  # of the seeds
PAUSE_S = 0.4
CALL_TIMEOUT_S = 2.5  # a change is answered within check-quorum and a lease
CUT_OFF = 0.15  # how probable, after a change
ROLE, USER, KEY = "reader", "app", b"key 0"
SECRET = "S" * 43
TOKENS = [f"aaaaaaaaa{letter}" for letter in "abcdef"]


class AccessChecker:
    """Knows which change is in force, and looks at all nodes."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._states = {0: AccessState()}  # all that were committed, by version
        self._seen: dict[str, tuple[object, int]] = {}
        self.in_force = 0  # the version of the newest change that was answered

    def on_committed(self) -> bool:
        """Return whether a change of access was just committed."""
        state = self._simulation.group.newest_state().state.access.state
        is_new = state.version not in self._states
        self._states[state.version] = state
        return is_new

    def on_answered(self, version: int) -> None:
        """A change was answered: from here on it is in force."""
        self.in_force = max(self.in_force, version)
        for name in self._simulation.nodes:
            self.after_event(name)

    def after_event(self, name: str) -> None:
        """Look at the node that something has just run on. Its version never falls while it lives,
        so it is enough to look when its lease or what is in force has changed.
        """
        life = self._simulation.nodes[name].life
        if life is None or not self.in_force:
            return
        state = life.state
        if self._seen.get(name) == (state.lease, self.in_force):
            return
        self._seen[name] = (state.lease, self.in_force)
        if state.serving() and state.access.version < self.in_force:
            raise ViolationError(
                f"{name} serves by access {state.access.version}: {self.in_force} is in force"
            )

    def check(self, name: str, version: int, sent_at: int, token: str, allowed: bool) -> None:
        """Check what a node answered by the access of ``version``; when it was asked, ``sent_at``
        was in force.
        """
        if version < sent_at:
            raise ViolationError(f"{name} answered by access {version}: {sent_at} was in force")
        access = Access(self._states[version])
        known = access.token_of(token, 0.0)
        permissions = access.permissions_of(known.user) if known is not None else Permissions.NONE
        says = permissions.in_keyspace(DEFAULT_ID).allows(Action.READ, KEY)
        if says != allowed:
            raise ViolationError(f"{name} said {allowed} by access {version}, which says {says}")


class AccessOperator:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = random.Random(f"access of {simulation.seed}")
        self.active = self._rng.random() < SHARE
        self._name = "guardian"
        self._over = False
        self.checker = AccessChecker(simulation)

    def start(self) -> None:
        if not self.active:
            return
        machine = self._simulation.network.add(self._name)
        process = machine.process = Process(self._simulation.loop, self._name)
        process.spawn(self._change())
        process.spawn(self._ask_nodes())

    def stop(self) -> None:
        """Change nothing any more."""
        self._over = True

    def on_committed(self, _: Command) -> None:
        """Now and then cut a node off right after a change, before or after it has heard of it."""
        if not self.active or not self.checker.on_committed() or self._over:
            return
        if self._rng.random() < CUT_OFF:
            node = self._rng.choice(list(self._simulation.nodes.values()))
            delay_s = self._rng.uniform(0.0, 0.4)
            self._simulation.loop.call_later(delay_s, self._cut_off, node)

    def _cut_off(self, node: SimulatedNode) -> None:
        if not self._over:
            self._simulation.faults.cut_off_coordinators(node)

    # --- changes ------------------------------------------------------------------------------

    async def _change(self) -> None:
        stats = self._simulation.stats
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))
            if self._over:
                return
            leader = self._simulation.group.leader or self._simulation.group.members[0]
            try:
                state: AccessState = await self._call(leader.name, "access_state")
                command = self._draw(state)
                made: ChangeBarrier = await self._call(leader.name, "access", command)
            except KoinonError as error:
                stats[f"access: {type(error).__name__}"] += 1
                if isinstance(error, NotLeaderError):
                    await asyncio.sleep(0.1)
                continue
            if made.serves_s:
                raise ViolationError(f"answered too early: {made}")
            stats["access: changes in force"] += 1
            stats["access: nodes behind"] += len(made.behind)
            self._simulation.trace(f"in force: access {made.version} behind {made.behind}")
            self.checker.on_answered(made.version)

    async def _call(self, leader: str, service: str, *arguments: object) -> Any:
        return await self._simulation.network.call(
            self._name, leader, service, *arguments, timeout_s=CALL_TIMEOUT_S, may_double=True
        )

    def _draw(self, state: AccessState) -> AccessCommand:
        rng, version = self._rng, state.version
        if not state.roles:
            return PutRole(role=_role(rng), expected_version=version)
        if not state.users:
            return PutUser(user=User(name=USER, roles=(ROLE,)), expected_version=version)
        known = [token.id for token in state.tokens]
        free = [token_id for token_id in TOKENS if token_id not in known]
        draws: list[Callable[[], AccessCommand]] = [
            lambda: PutRole(role=_role(rng), expected_version=version),
            lambda: PutUser(
                user=User(name=USER, roles=(ROLE,), blocked=rng.random() < 0.3),
                expected_version=version,
            ),
            lambda: RevokeCertificate(serial=f"{version + 1:x}", expected_version=version),
        ]
        if free:
            draws.append(lambda: AddToken(token=_token(rng.choice(free)), expected_version=version))
        if known:
            draws.append(lambda: DropToken(token_id=rng.choice(known), expected_version=version))
        return rng.choice(draws)()

    # --- callers ------------------------------------------------------------------------------

    async def _ask_nodes(self) -> None:
        """Ask nodes, one after another, with tokens that may be good."""
        rng, simulation = self._rng, self._simulation
        while True:
            await asyncio.sleep(rng.expovariate(1 / 0.05))
            node = rng.choice(list(simulation.nodes))
            token = f"koinon_{rng.choice(TOKENS)}_{SECRET}"
            sent_at = self.checker.in_force
            try:
                version, allowed = await simulation.network.call(
                    self._name, node, "may_read", token, KEY
                )
            except KoinonError:
                continue
            simulation.stats[f"access: {'let in' if allowed else 'refused'}"] += 1
            self.checker.check(node, version, sent_at, token, allowed)


def _role(rng: random.Random) -> Role:
    effect = rng.choice([Effect.ALLOW, Effect.ALLOW, Effect.DENY])
    return Role(name=ROLE, grants=(Grant(effect=effect, actions=(Action.READ,), prefix=b"key"),))


def _token(token_id: str) -> Token:
    return Token(id=token_id, user=USER, sha256=secret_hash(SECRET), created_s=1)
