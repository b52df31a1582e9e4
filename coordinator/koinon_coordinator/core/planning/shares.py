"""Computes how many replicas each node should hold: shares by weight, within bounds.

A share is an exact fraction; a count is right if it is the share rounded down or up. The shares are
max-min fair: every node gets ``level * weight``, clipped to the replicas that it cannot give away
(below) and to the replicas that it can hold (above); the rest of a full rack goes to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def fair_shares(
    total: int, weights: Sequence[int], lower: Sequence[int], upper: Sequence[int | Fraction]
) -> list[Fraction]:
    """Return shares that add up to ``total``, each ``level * weight`` clipped to its bounds.

    A total outside the bounds' sums gives the bounds.
    """
    level = _level(total, weights, lower, upper)
    if level is None:
        return [Fraction(bound) for bound in upper]
    return [
        min(Fraction(high), max(Fraction(low), level * weight))
        for weight, low, high in zip(weights, lower, upper, strict=True)
    ]


def fair_shares_by_rack(
    total: int,
    weights: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    racks: Sequence[Sequence[int]],
    rack_upper: Sequence[int],
) -> list[Fraction]:
    """Return fair shares where rack ``r`` (its members' indices) holds ``rack_upper[r]`` at most.

    Worked example: racks {a: 1 node, b: 2 nodes}, equal weights, total 9, at most 3 on rack b.
    Rack b alone is full at level 1.5; so its nodes get 1.5 each, and the node of rack a 6.
    """
    bounds: list[int | Fraction] = list(upper)
    for members, limit in zip(racks, rack_upper, strict=True):
        inside = fair_shares(
            limit,
            [weights[i] for i in members],
            [lower[i] for i in members],
            [upper[i] for i in members],
        )
        for i, share in zip(members, inside, strict=True):
            bounds[i] = share
    return fair_shares(total, weights, lower, bounds)


def _level(
    total: int, weights: Sequence[int], lower: Sequence[int], upper: Sequence[int | Fraction]
) -> Fraction | None:
    """Return the level at which the clipped shares add up to ``total``; None if the total is too
    high.
    """
    events: list[tuple[Fraction, int]] = []
    for weight, low, high in zip(weights, lower, upper, strict=True):
        if high > low:
            events.append((Fraction(low) / weight, weight))
            events.append((Fraction(high) / weight, -weight))
    events.sort()
    level, filled, slope = Fraction(0), Fraction(sum(lower)), 0
    for at, change in events:
        reached = filled + slope * (at - level)
        if reached >= total:
            break
        level, filled, slope = at, reached, slope + change
    else:
        return None
    if not slope:
        return level
    return level + (total - filled) / slope
