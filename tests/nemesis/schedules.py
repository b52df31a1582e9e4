"""Schedules of faults: what goes wrong, and when, is drawn from a seed before anything runs.

A schedule names processes (``n2``, ``c1``, ``w3``, ``n2.writer``) or parts that they play
(``leader``; ``primary/3``: the node that leads the fourth key by then; ``primary``: the one that
leads most keys), so that the same seed means the same whoever leads. It is a row of episodes with
time to recover between them; in each, one kind of fault or a few at once. The first episode's kind
goes through all kinds as seeds rise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.nemesis import means
from tests.nemesis.client import KEYS

BEGINS_S = 2.5  # until the first episode: clients have written every key by then
NODES = ("n1", "n2", "n3", "n4")
COORDINATORS = ("c1", "c2", "c3")
CLIENTS = ("w1", "w2", "w3")
CALM_S = (1.0, 3.0)  # between episodes, least and most
HOUR_S, YEAR_S = 3_600.0, 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One fault: ``amount`` is what its kind says (percent, milliseconds, seconds, which way)."""

    at_s: float
    kind: str
    lasts_s: float
    targets: tuple[str, ...]
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" {self.amount:g}" if self.amount else ""
        until = self.at_s + self.lasts_s
        return f"{self.at_s:5.1f}-{until:.1f} s {self.kind} {' '.join(self.targets)}{amount}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``steps`` in the order in which they begin; ``seconds``: how long clients go on."""

    seed: int
    seconds: float
    steps: tuple[Step, ...]

    @property
    def kinds(self) -> list[str]:
        return sorted({step.kind for step in self.steps})

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


Draw = Callable[[random.Random], tuple[tuple[str, ...], float]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and how it is drawn. ``alone``: all must be well before it, and nothing else
    goes wrong meanwhile: it destroys a copy. ``assumed``: the cluster promises to stand it; kinds
    that it does not are drawn only if they are asked for by name.
    """

    draw: Draw  # targets and amount
    lasts_s: tuple[float, float]
    needs: tuple[str, ...] = ()
    alone: bool = False
    assumed: bool = True
    weight: int = 2


def _one_of(*targets: str) -> Draw:
    return lambda choice: ((choice.choice(targets),), 0.0)


def _all_of(*targets: str) -> Draw:
    return lambda _choice: (targets, 0.0)


def _some_of(*targets: str, most: int) -> Draw:
    return lambda choice: (tuple(choice.sample(targets, choice.randint(1, most))), 0.0)


def _with_amount(draw: Draw, *amounts: float) -> Draw:
    return lambda choice: (draw(choice)[0], choice.choice(amounts))


def _side(choice: random.Random) -> tuple[tuple[str, ...], float]:
    """A primary and the clients that go on through it; perhaps a coordinator on their side.
    Amount 1: the node still reaches the other nodes, but not the coordinators.
    """
    primary = choice.choice(["primary", f"primary/{choice.randrange(KEYS)}"])
    clients = choice.choice([("w1",), ("w1",), ("w3",), ("w1", "w3")])
    if choice.random() < 0.4:
        return (primary, *clients), 1.0
    coordinator = choice.choice([(), (), ("leader",), (choice.choice(COORDINATORS),)])
    return (primary, *clients, *coordinator), 0.0


def _link(choice: random.Random) -> tuple[tuple[str, str], float]:
    """A sender and a receiver: a primary and another node, which follows it somewhere, or a client
    and a primary; either way round.
    """
    primary = choice.choice(["primary", f"primary/{choice.randrange(KEYS)}"])
    other = choice.choice([*NODES, *CLIENTS])
    return ((primary, other) if choice.random() < 0.5 else (other, primary)), 0.0


_MEMBER = _one_of("primary", "primary", "leader", *NODES, *COORDINATORS)
_PRIMARIES = tuple(f"primary/{key}" for key in range(KEYS))
_WRITERS = tuple(f"{node}.writer" for node in NODES)
_NET = (means.NAMESPACES, means.FILTER)

KINDS: dict[str, Kind] = {
    "split": Kind(draw=_side, lasts_s=(4.5, 7.0), needs=_NET, weight=4),
    "isolate": Kind(draw=_MEMBER, lasts_s=(1.0, 6.0)),
    "one-way": Kind(draw=_with_amount(_MEMBER, 0, 1, 2, 3), lasts_s=(2.0, 6.0), needs=_NET),
    "one-way-link": Kind(draw=_link, lasts_s=(2.0, 6.0), needs=_NET),
    "loss": Kind(
        draw=_with_amount(_some_of(*NODES, *COORDINATORS, *CLIENTS, most=4), 5, 15, 40),
        lasts_s=(3.0, 7.0),
        needs=_NET,
    ),
    "delay": Kind(
        draw=_with_amount(_some_of(*NODES, *COORDINATORS, *CLIENTS, most=3), 30, 100, 300),
        lasts_s=(3.0, 6.0),
        needs=(means.NARROW,),
    ),
    "kill": Kind(
        draw=_some_of("primary", "leader", *NODES, *COORDINATORS, "w1", "w3", most=3),
        lasts_s=(0.0, 4.0),
        weight=4,
    ),
    "pause": Kind(
        draw=_some_of("primary", "leader", *NODES, *COORDINATORS, *CLIENTS, *_WRITERS, most=3),
        lasts_s=(0.3, 5.0),
        weight=3,
    ),
    "pause-in-read": Kind(draw=_one_of("primary", *_PRIMARIES), lasts_s=(3.5, 5.0)),
    "restart": Kind(draw=_some_of("primary", "leader", *NODES, most=2), lasts_s=(1.0, 3.0)),
    "transfer": Kind(draw=_one_of("leader"), lasts_s=(0.5, 1.0), weight=1),
    "moves": Kind(draw=_one_of("primary", *NODES), lasts_s=(4.0, 7.0)),
    "descriptors": Kind(draw=_MEMBER, lasts_s=(2.0, 6.0), weight=1),
    "full-disk": Kind(draw=_MEMBER, lasts_s=(2.0, 6.0), needs=(means.MOUNTS,)),
    "frozen-disk": Kind(draw=_MEMBER, lasts_s=(1.0, 6.0), needs=(means.FREEZE,)),
    "eio": Kind(draw=_MEMBER, lasts_s=(3.0, 5.0), needs=(means.SHUTDOWN,), alone=True),
    "wall-clock": Kind(
        draw=_with_amount(
            _some_of("primary", *NODES, *COORDINATORS, most=3),
            *(-YEAR_S, -HOUR_S, -2.0, 2.0, HOUR_S, YEAR_S),
        ),
        lasts_s=(2.0, 6.0),
    ),
    "machine-clock": Kind(
        draw=_with_amount(_all_of(*NODES, *COORDINATORS), -YEAR_S, -HOUR_S, HOUR_S, YEAR_S),
        lasts_s=(2.0, 6.0),
        weight=1,
    ),
    "drift": Kind(
        draw=_with_amount(_some_of("primary", *NODES, *COORDINATORS, most=4), 0.97, 1.03),
        lasts_s=(4.0, 8.0),
    ),
    "uptime": Kind(
        draw=_with_amount(_some_of("primary", *NODES, *COORDINATORS, most=2), 90, 86_400, 1e7),
        lasts_s=(0.5, 2.0),
        needs=(means.TIME,),
    ),
    "wipe": Kind(draw=_one_of("primary", *NODES), lasts_s=(0.5, 3.0), alone=True),
    "swap": Kind(
        draw=_with_amount(lambda choice: (tuple(choice.sample(NODES, 2)), 0.0), 0),
        lasts_s=(1.0, 3.0),
        needs=(means.MOUNTS,),
        alone=True,
    ),
    "roll-back": Kind(draw=_one_of("primary", *NODES), lasts_s=(2.0, 4.0), alone=True),
    "slow-lease": Kind(draw=_side, lasts_s=(4.5, 7.0), needs=_NET, assumed=False),
}


def available(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return which of these kinds this machine allows, and of the others why not."""
    left_out: dict[str, str] = {}
    for name in names:
        for needed in KINDS[name].needs:
            if why := means.missing(needed):
                left_out[name] = f"{needed}: {why}"
    return [name for name in names if name not in left_out], left_out


def make_schedule(
    seed: int,
    kinds: Sequence[str],
    seconds: float = 25.0,
    calm_s: tuple[float, float] = CALM_S,
) -> Schedule:
    """Draw a schedule of these kinds of faults."""
    choice = random.Random(seed)
    steps: list[Step] = []
    at_s = BEGINS_S
    name = kinds[seed % len(kinds)]
    while at_s < seconds - 3.0:
        steps += (episode := _episode(choice, name, kinds, at_s))
        at_s = max(step.at_s + step.lasts_s for step in episode) + choice.uniform(*calm_s)
        name = _drawn(choice, kinds)
    steps.sort(key=lambda step: step.at_s)
    return Schedule(seed=seed, seconds=max(seconds, at_s), steps=tuple(steps))


def _drawn(choice: random.Random, kinds: Sequence[str]) -> str:
    return choice.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]


def _episode(choice: random.Random, name: str, kinds: Sequence[str], at_s: float) -> list[Step]:
    steps = [_step(choice, name, at_s)]
    if KINDS[name].alone:
        return steps
    beside = [kind for kind in kinds if kind != name and not KINDS[kind].alone]
    for _ in range(choice.choice([0, 0, 1, 1, 2])):
        if beside:
            steps.append(_step(choice, _drawn(choice, beside), at_s + choice.uniform(0.0, 2.0)))
    return steps


def _step(choice: random.Random, name: str, at_s: float) -> Step:
    kind = KINDS[name]
    targets, amount = kind.draw(choice)
    lasts_s = round(choice.uniform(*kind.lasts_s), 2)
    return Step(at_s=round(at_s, 2), kind=name, lasts_s=lasts_s, targets=targets, amount=amount)
