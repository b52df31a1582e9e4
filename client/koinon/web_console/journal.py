"""The order of all news for browsers, and how much of it is kept. Pure.

Each *topic* (``table``, ``moment``, …) is a value that changes. An entry of the journal is news of
one topic: its whole value, or a change of it. A reader names its last entry and gets the entries
after it. If these are no longer kept, or if the reader names no entry or one of another process, it
gets the whole value of every topic instead.

The journal keeps one bounded list for all readers and no state for single readers, so a slow reader
costs no memory. A reader that falls behind the list reads whole values again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

ENTRIES_MAX = 600
"""The limit of the list: ten minutes of polls, one a second, without other news."""
CHARS_MAX = 8 << 20
Whole = Callable[[], str]
"""Returns the current whole value of a topic, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """News of one topic; ``data`` is JSON. Of several whole values that are sent together, only the
    last has a number, that of the newest entry they include: a reader that has lost some of them
    gets all again.
    """

    number: int | None
    topic: str
    data: str


class Journal:
    """The last entries, and a function for the whole value of each topic."""

    def __init__(self, name: str) -> None:
        """``name``: a unique name of this process."""
        self._name = name
        self._entries: deque[Entry] = deque()
        self._chars = 0  # bytes of the data of all entries
        self._last = 0  # number of the newest entry; the first entry has number 1
        self._wholes: dict[str, Whole] = {}  # by topic, in the order of the topics' first entries
        self._texts: dict[str, str] = {}  # whole values that readers share until the next entry

    @property
    def last(self) -> int:
        """The number of the newest entry; 0: there is none."""
        return self._last

    def add(self, topic: str, data: str, whole: Whole) -> None:
        """Add news of a topic; ``whole`` is the function for its whole value from now on."""
        self._last += 1
        self._wholes[topic] = whole
        self._texts.pop(topic, None)
        self._entries.append(Entry(number=self._last, topic=topic, data=data))
        self._chars += len(data)
        while len(self._entries) > ENTRIES_MAX or self._chars > CHARS_MAX:
            self._chars -= len(self._entries.popleft().data)

    def id_of(self, entry: Entry) -> str | None:
        """Return the id by which a reader asks for the entries after this one; None: the entry has
        no id.
        """
        return None if entry.number is None else f"{self._name}.{entry.number}"

    def number_of(self, entry_id: str) -> int | None:
        """Return the number of the entry with this id; None: the id is of another process."""
        name, _, number = entry_id.partition(".")
        known = name == self._name and number.isascii() and number.isdecimal()
        if not known or len(number) > 18 or int(number) > self._last:
            return None
        return int(number)

    def after(self, number: int | None) -> list[Entry]:
        """Return the entries after this number; whole values if they are no longer kept, or for
        None.
        """
        first = self._last - len(self._entries)
        if number is not None and number >= first:
            return list(islice(self._entries, number - first, None))
        for topic, whole in self._wholes.items():
            if topic not in self._texts:
                self._texts[topic] = whole()
        final = next(reversed(self._wholes), "")
        return [
            Entry(number=self._last if topic == final else None, topic=topic, data=text)
            for topic, text in ((topic, self._texts[topic]) for topic in self._wholes)
        ]
