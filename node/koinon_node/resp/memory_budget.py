"""The budget of bytes that the connections of all Redis ports share. Pure.

A connection holds bytes for one of two reasons, each with a bound of its own:

- *queued*: commands that this node has not answered yet. While all connections together have more
  than ``QUEUED_BYTES``, connections with queued commands are not read.
- *owed*: bytes that wait for the client: for the rest of its command, for its EXEC, or until it
  reads its replies. When all connections owe more than ``OWED_BYTES``, those that owe most are
  closed, strangers first. (A stranger has not authenticated yet.) A large argument counts in full
  once its length is known, and is read once there is room for it. While others wait for room, a
  connection that has been sending for ``PATIENCE_S`` is closed.

One pass chooses all connections to close, and frees at least an eighth of the budget: so the pass
costs little per byte that an attacker must send to cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

MIB = 1024 * 1024
BUDGET_BYTES = 128 * MIB
QUEUED_BYTES = BUDGET_BYTES // 4
OWED_BYTES = BUDGET_BYTES - QUEUED_BYTES
_ROOM_BYTES = OWED_BYTES * 3 // 4  # for large arguments; the rest is for all other bytes
STRANGERS_BYTES = BUDGET_BYTES // 4
"""The most bytes owed by strangers together."""
PATIENCE_S = 5.0
_LEFT = 7 / 8  # closing stops at this share of a bound


class Holder(Protocol):
    """A connection that holds bytes."""

    is_known: bool

    def read_on(self) -> None:
        """Resume reading if there is room now."""

    def abort(self) -> None:
        """Close at once."""


class _Held:
    __slots__ = ("owed", "queued", "since")

    def __init__(self, since: float) -> None:
        self.since = since  # when the connection began to hold bytes
        self.queued = 0
        self.owed = 0


class MemoryBudget:
    """Counts the bytes that connections hold, and closes connections that hold too much. ``on_cut``
    gets the number of connections closed at once, their bytes, and the first of them.
    """

    def __init__(
        self, now: Callable[[], float], on_cut: Callable[[int, int, Holder], None]
    ) -> None:
        self._now = now
        self._on_cut = on_cut
        self._held: dict[Holder, _Held] = {}
        self._waiting: dict[Holder, int] = {}  # -> bytes of room needed; the longest waiting first
        self.queued_bytes = 0
        self.owed_bytes = 0
        self._strangers_bytes = 0  # owed by strangers

    @property
    def held_bytes(self) -> int:
        return self.queued_bytes + self.owed_bytes

    @property
    def is_short(self) -> bool:
        """True while connections with unanswered commands are not read."""
        return self.queued_bytes > QUEUED_BYTES

    def hold(self, holder: Holder, queued: int, owed: int, coming: int = 0) -> bool:
        """Set the bytes that the connection holds now. ``coming``: the missing bytes of its
        command, which count as owed if there is room for them. Return False if there is no room:
        then the connection must not be read until ``read_on`` is called.
        """
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = _Held(self._now())
        has_room = True
        if coming and owed + coming > held.owed:
            more = owed + coming - held.owed
            is_next = not self._waiting or next(iter(self._waiting)) is holder
            has_room = is_next and self.owed_bytes + more <= _ROOM_BYTES
        if has_room:
            owed += coming
            self._waiting.pop(holder, None)
        else:
            self._waiting.setdefault(holder, coming)
        is_less = queued < held.queued or owed < held.owed
        self._count(holder, held, queued, owed)
        if is_less:
            self._give_room()
        self._cut_if_over()
        return has_room

    def release(self, holder: Holder) -> None:
        """Forget a connection that has ended or holds nothing any more."""
        self._waiting.pop(holder, None)
        if (held := self._held.pop(holder, None)) is not None:
            self._count(holder, held, 0, 0)
            self._give_room()

    def become_known(self, holder: Holder) -> None:
        """Count the connection as authenticated from now on."""
        held = self._held.get(holder)
        if held is not None and not holder.is_known:
            self._strangers_bytes -= held.owed
        holder.is_known = True

    def cut_slow(self) -> None:
        """Close slow connections that keep others waiting for room. The owner calls it
        periodically.
        """
        if self._waiting:
            first, wanted = next(iter(self._waiting.items()))
            # Waiting connections are not read: if they hold the room, all would wait for ever.
            self._cut(
                one
                for one in self._most(lambda: self._waiting_owe() + wanted > _ROOM_BYTES)
                if one in self._waiting and one is not first
            )
        if self._waiting:
            before, wanted = self._now() - PATIENCE_S, next(iter(self._waiting.values()))
            self._cut(
                one
                for one in self._most(lambda: self.owed_bytes + wanted > _ROOM_BYTES)
                if self._held[one].since < before and one not in self._waiting
            )

    def _waiting_owe(self) -> int:
        return sum(self._held[one].owed for one in self._waiting)

    def _count(self, holder: Holder, held: _Held, queued: int, owed: int) -> None:
        self.queued_bytes += queued - held.queued
        self.owed_bytes += owed - held.owed
        if not holder.is_known:
            self._strangers_bytes += owed - held.owed
        held.queued, held.owed = queued, owed

    def _give_room(self) -> None:
        """Resume the connections that have waited longest and have room now. Each asks for its room
        again.
        """
        while self._waiting:
            first = next(iter(self._waiting))
            if self.owed_bytes + self._waiting[first] > _ROOM_BYTES:
                return
            first.read_on()
            if first in self._waiting:
                return

    def _cut_if_over(self) -> None:
        if self._strangers_bytes > STRANGERS_BYTES:
            self._cut(self._most(lambda: self._strangers_bytes > STRANGERS_BYTES * _LEFT))
        if self.owed_bytes > OWED_BYTES:
            self._cut(self._most(lambda: self.owed_bytes > OWED_BYTES * _LEFT))
        if self.held_bytes > BUDGET_BYTES + OWED_BYTES // 2:
            self._cut(self._most(lambda: self.held_bytes > BUDGET_BYTES))

    def _most(self, is_over: Callable[[], bool]) -> Iterator[Holder]:
        """Yield the connections that owe most, strangers first, while ``is_over``."""
        order = sorted(
            self._held,
            key=lambda one: (one.is_known, -self._held[one].owed, -self._held[one].queued),
        )
        for holder in order:
            if not is_over():
                return
            yield holder

    def _cut(self, holders: Iterator[Holder]) -> None:
        count = size = 0
        first: Holder | None = None
        for holder in holders:
            held = self._held.pop(holder)
            first = first or holder
            count, size = count + 1, size + held.owed + held.queued
            self._count(holder, held, 0, 0)
            self._waiting.pop(holder, None)
            holder.abort()
        if first is not None:
            self._on_cut(count, size, first)
            self._give_room()
