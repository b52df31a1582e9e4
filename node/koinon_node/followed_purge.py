"""Purges tombstones of followed partitions, and entries of the expiry index that fit no record.

A follower purges only up to the floor that the primary has announced (rule 14), and only where the
copy is live and has no ticket under way: then what the store holds is what the index is compared
with. The purge floor rises in the transaction that removes the tombstones. A record that has
expired stays until the primary removes it (rule 13).
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from koinon_node.applying import Change
from koinon_node.core import records
from koinon_node.core.following import Followed, Stage
from koinon_node.hub import Hub
from koinon_node.state import WallClock
from koinon_node.writer import Writer
from koinon_proto.errors import KoinonError

log = logging.getLogger(__name__)

_ROWS = 256
_INTERVAL_S = 0.5
_PAUSE_S = 0.02


class FollowedPurge:
    """Background work in small steps, while the writer has little to do."""

    def __init__(self, hub: Hub, writer: Writer, wall: WallClock) -> None:
        self._hub = hub
        self._writer = writer
        self._wall = wall
        self._from = b""

    async def run(self) -> None:
        """Purge until cancelled."""
        while True:
            more = True
            while more and not self._writer.pending_rows:
                try:
                    more = await self.step()
                except KoinonError as error:
                    log.debug("nothing purged error=%s", error)
                    break
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(_INTERVAL_S)

    async def step(self) -> bool:
        """Look at some entries of the index that are due; return whether there are more."""
        hub = self._hub
        entries, self._from = hub.store.expired_entries(self._from, self._wall.now_ms(), _ROWS)
        more = bool(self._from)
        live = self._live()
        looked = [(entry, *records.split_expiry_key(entry)) for entry in entries]
        looked = [e for e in looked if records.partition_of_data_key(e[2]) in live]
        stored = dict(hub.store.get_many([key for _, _, key in looked]))
        dropped: list[bytes] = []
        floors: dict[int, int] = {}
        removed: list[bytes] = []
        for entry, at_ms, key in looked:
            data = stored.get(key)
            record = records.decode_record(data) if data is not None else None
            if record is None or record.expires_at_ms != at_ms:
                dropped.append(entry)
                continue
            partition_id = records.partition_of_data_key(key)
            if record.tombstone and record.sequence <= live[partition_id].purge_floor:
                dropped.append(entry)
                removed.append(key)
                floors[partition_id] = max(floors.get(partition_id, 0), record.sequence)
        if dropped:
            ids = sorted({records.partition_of_data_key(entry[8:]) for entry in dropped})
            await hub.applier.submit(
                Change(
                    partition_ids=np.array(ids, np.uint32),
                    complete_through=hub.copies.complete_through[ids],
                    purge_floors=np.array([floors.get(p, 0) for p in ids], np.uint64),
                    removed=removed,
                    dropped_entries=dropped,
                )
            )
        return more

    def _live(self) -> dict[int, Followed]:
        """Return the partitions of which the store holds all that was received."""
        hub = self._hub
        return {
            partition_id: followed
            for link in hub.links.values()
            for partition_id, followed in link.following.partitions.items()
            if followed.stage is Stage.LIVE
            and not hub.applier.busy[partition_id]
            and hub.current(partition_id, link.node.number, followed.want.primary_epoch)
        }
