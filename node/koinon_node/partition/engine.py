"""Reads and writes of the partitions that this node leads; knows neither messages nor transport.

Each part says which safety rules hold there: ``reads`` (rows by their keys), ``scans`` (pages),
``writes``, ``expiry`` (records that have expired).
"""

from __future__ import annotations

from koinon_node.partition.expiry import Reclaimer
from koinon_node.partition.reads import Reads
from koinon_node.partition.scans import Scans
from koinon_node.partition.serving_context import ServingContext
from koinon_node.partition.writes import Writes
from koinon_node.storage.index_sweeper import IndexSweeper


class Engine:
    """The parts over one context. All belong to the event loop's thread."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.expiry = Reclaimer(context)
        self.reads = Reads(context, self.expiry)
        self.scans = Scans(context, self.expiry)
        self.writes = Writes(context)
        self.sweeper = IndexSweeper(self.expiry.look)
