"""Defects of the write-ahead log to plant, as those of ``mutants``."""

from __future__ import annotations

from typing import Any

from koinon_node.partition.expiry import Reclaimer
from koinon_node.partition.writes import Writes
from koinon_node.storage import log_files
from koinon_node.storage import store as store_module
from koinon_node.storage.environment import DATA_DB
from koinon_node.storage.logged_channel import LoggedChannel
from koinon_node.storage.write_ahead_log import WriteAheadLog
from tests.simulation import disks
from tests.simulation.planting import log_mutant, replace_method


@log_mutant
def acknowledges_before_the_log_is_synced() -> None:
    replace_method(disks.SimulatedLogDisk, "sync", lambda _: lambda *_: None)


@log_mutant
def lets_go_of_what_the_store_does_not_have_yet() -> None:
    def make(take_over: Any) -> Any:
        def early(self: LoggedChannel) -> None:
            take_over(self)
            if self._taking:
                self._overlay.drop_through(self._taking)

        return early

    replace_method(LoggedChannel, "_take_over", make)


@log_mutant
def uses_segments_again_before_the_store_has_them() -> None:
    def make(append: Any) -> Any:
        def reusing(self: WriteAheadLog, *arguments: Any, **options: Any) -> None:
            append(self, *arguments, **options)
            self.release(self._position)

        return reusing

    replace_method(WriteAheadLog, "append", make)


@log_mutant
def replays_from_one_record_too_late() -> None:
    def make(left_over: Any) -> Any:
        def late(directory: Any, life: int, after: int) -> Any:
            return left_over(directory, life, after + 1)

        return late

    replace_method(log_files, "left_over", make)


@log_mutant
def decides_without_what_lies_over_the_store() -> None:
    for part in (Reclaimer, Writes):
        replace_method(part, "_stored", lambda _: lambda self, keys: stored(self._store, keys))


@log_mutant
def reads_without_what_lies_over_the_store() -> None:
    def make(get_many: Any) -> Any:
        return lambda self, keys: list(stored(self, keys).items())

    replace_method(store_module.Store, "get_many", make)


@log_mutant
def reads_pages_of_a_store_that_lags() -> None:
    replace_method(store_module.Store, "lacks", lambda _: lambda *_: False)


@log_mutant
def commits_large_groups_before_what_the_log_holds() -> None:
    def make(advance: Any) -> Any:
        def at_once(self: LoggedChannel) -> None:
            group = self._group
            if group is not None and not self._taking and self._goes_direct(group[2]):
                self._group, self._direct, self._loose = None, True, set()
                self._inner.send(group)
                return
            advance(self)

        return at_once

    replace_method(LoggedChannel, "_advance_group", make)


def stored(store: store_module.Store, keys: Any) -> dict[bytes, bytes]:
    """Return what the store itself has of the keys."""
    with store.env.begin(store.databases[DATA_DB]) as txn, txn.cursor() as cursor:
        return dict(cursor.getmulti(keys))
