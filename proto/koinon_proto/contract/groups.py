"""Types and limits of consumer groups that all processes share. ``groups.proto`` has the rules."""

from __future__ import annotations

from enum import IntEnum

GROUP_NAME_CHARS_MAX = 128
"""Of a group's name and a member's id."""
GROUP_TEXT_CHARS_MAX = 200
"""Of a member's client name."""
GROUP_KEYSPACES_MAX = 64
"""The most keyspaces that a member may subscribe to."""
GROUP_SESSION_MS = 30_000
"""A member that is not heard for so long loses its partitions, unless it joined with another time.
"""
GROUP_SESSION_MS_MIN = 1_000
GROUP_SESSION_MS_MAX = 300_000
GROUP_STATIC_SESSION_MS_MAX = 3_600_000
GROUP_PAUSE_MS_MAX = 60_000
"""The longest time for which a reset of cursors may keep a group without grants."""
POLLS_A_SESSION = 3
"""A member's request is answered after this part of its session, if nothing has changed."""


class GroupStrategy(IntEnum):
    """The ways to share partitions among members; numbers are those of the wire."""

    RANGE = 1
    ROUND_ROBIN = 2
    STICKY = 3
