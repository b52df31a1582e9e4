"""Executes clients' operations on the partitions that this node leads, without messages or
transport.

The parts: ``reads`` (rows by key), ``scans`` (pages), ``writes``, ``expiry`` (expired records). The
docstring of each lists its safety rules.
"""

from __future__ import annotations

from koinon_node.partition.expiry import Reclaimer
from koinon_node.partition.reads import Reads
from koinon_node.partition.scans import Scans
from koinon_node.partition.serving_context import ServingContext
from koinon_node.partition.writes import Writes
from koinon_node.storage.index_sweeper import IndexSweeper


class Engine:
    """The parts over one context. Belongs to the event loop's thread."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.expiry = Reclaimer(context)
        self.reads = Reads(context, self.expiry)
        self.scans = Scans(context, self.expiry)
        self.writes = Writes(context)
        self.sweeper = IndexSweeper(self.expiry.look)
