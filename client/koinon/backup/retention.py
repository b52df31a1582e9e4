"""Decides which backups are kept. Pure.

Every backup is complete in itself, so each can be deleted alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from koinon.backup.destination import Found

UNFINISHED_S_MAX = 24 * 3600.0
"""The age of its newest file, in seconds, from which an unfinished backup counts as abandoned."""


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """The backups to delete, and the backups to keep with the reason for each."""

    gone: tuple[Found, ...]
    kept: tuple[tuple[Found, str], ...]


def prune(found: Sequence[Found], *, keep_last: int, keep_daily: int, now_s: float) -> Pruning:
    """Decide which backups to delete: finished ones that are neither among the ``keep_last`` newest
    nor the newest of one of the ``keep_daily`` newest days (UTC) with a backup, and abandoned
    unfinished ones. A backup whose manifest cannot be read is kept, for an operator to look at.

    Args:
        found: all backups, the oldest first.
        now_s: Unix seconds.
    """
    good = [backup for backup in reversed(found) if backup.manifest is not None]
    newest_of_day: dict[str, Found] = {}
    for backup in good:
        newest_of_day.setdefault(_day(backup), backup)
    daily = {backup.backup_id for backup in list(newest_of_day.values())[:keep_daily]}
    last = {backup.backup_id for backup in good[:keep_last]}
    gone, kept = [], []
    for backup in found:
        why = ""
        if backup.fault:
            why = "cannot be read: look at it, and delete it by hand"
        elif backup.manifest is None:
            if now_s - backup.changed_s < UNFINISHED_S_MAX:
                why = "unfinished, and its newest file is younger than a day"
        elif backup.backup_id in last:
            why = f"one of the last {keep_last}"
        elif backup.backup_id in daily:
            why = f"the newest of {_day(backup)}"
        if why:
            kept.append((backup, why))
        else:
            gone.append(backup)
    return Pruning(gone=tuple(gone), kept=tuple(kept))


def _day(backup: Found) -> str:
    assert backup.manifest is not None
    return datetime.fromtimestamp(backup.manifest.cut_ms / 1000, UTC).strftime("%Y-%m-%d")
