"""The acts of the demo about the change feed: a program follows it, is killed, and misses no
change.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from demo.follower import Follower
from demo.play import Play, wait
from koinon.operate.wording import count

SEEN_S = 60.0
POLL_S = 0.1


def program_follows(play: Play) -> None:
    """Start the program; it prints the existing records, then changes."""
    stage = play.stage
    stage.act("A program follows what is written, while nodes die and leave: koinon watch")
    scratch = play.finally_.enter_context(tempfile.TemporaryDirectory(prefix="koinon-demo-"))
    play.follower = follower = Follower(play.cluster.coordinators, Path(scratch))
    play.finally_.callback(follower.kill)
    pid = follower.start()
    stage.check(
        _has_seen_all(play), f"pid {pid} has told {count(follower.lines, 'record')} that were there"
    )


def program_is_killed(play: Play) -> None:
    """Kill -9 the program; it continues where it stopped."""
    stage, follower = play.stage, play.follower
    assert follower is not None
    stage.act("That program is killed as well, misses some writes, and goes on")
    follower.values()
    before = follower.lines
    follower.kill()
    stage.event(f"kill -9 koinon watch, after {count(before, 'change')}")
    missed = {b"demo/f/%d" % n: b"written while nobody followed" for n in range(500)}
    play.client.put_many(missed).raise_for_errors()
    play.acknowledged |= missed
    follower.start()
    stage.check(
        _has_seen_all(play),
        f"it has told {count(follower.lines - before, 'more change')}: all that it missed",
    )


def program_missed_nothing(play: Play) -> None:
    """Compare the printed changes with the acknowledged writes."""
    stage, follower = play.stage, play.follower
    assert follower is not None
    stage.act("What the program was told is compared with what was acknowledged")
    seen = _has_seen_all(play)
    follower.kill()
    stage.check(
        seen,
        f"{count(follower.lines, 'change')} told: the newest of each of "
        f"{len(play.acknowledged):,} keys is its last acknowledged write",
    )


def _has_seen_all(play: Play) -> bool:
    """Wait until the program has printed every acknowledged write; return whether it has."""
    assert play.follower is not None
    for _ in range(int(SEEN_S / POLL_S)):
        told = play.follower.values()
        if all(told.get(key) == value for key, value in play.acknowledged.items()):
            return True
        wait(POLL_S)
    return False
