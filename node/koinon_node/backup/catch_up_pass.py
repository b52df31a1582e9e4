"""One pass over a partition's copy: what stands between the opening and joining the stream.

It replaces the copy by a snapshot, or repairs its tail, then catches up; ``catch_up`` has how pages
are pulled and applied, ``core/replication/replica_sync`` which step comes first. A pass that took a
snapshot closes the opening: the copy is described, and opened, anew.
"""

from __future__ import annotations

from koinon_node.backup.catch_up import Fetcher, Source
from koinon_node.backup.stream_context import StreamContext, SupersededError
from koinon_node.core.replication import replica_sync as core
from koinon_node.core.replication.replica_sync import Followed, ReplicaSync, Stage, Step
from koinon_proto.contract.table import NodeInfo


async def pull(
    context: StreamContext, primary: NodeInfo, following: ReplicaSync, followed: Followed
) -> None:
    """Do the pass, once there is room for it. Then the copy is to join, or is to be opened again.

    Raises:
        SupersededError: the row has changed: this node does not follow there any more.
        KoinonError: the primary cannot be asked, or something here is in the way.
    """
    partition_id, epoch = followed.partition_id, followed.want.primary_epoch

    def guard() -> None:
        if not context.current(partition_id, primary.number, followed.want.primary_epoch):
            raise SupersededError

    source = Source(context.peers, primary, context.cluster_id, partition_id, epoch)
    puller = Fetcher(
        followed,
        source,
        context.store,
        context.applier,
        context.copies,
        context.journal,
        context.uncovered,
        guard=guard,
        leave=lambda: context.leave(followed),
        spend=lambda size: context.spend(followed, size),
        on_pulled=context.count_pulled,
    )
    async with context.passes[followed.want.rank]:
        if followed.stage is Stage.SNAPSHOT:
            await _replace(context, following, followed, puller)
            return
        await _complete(context, followed, puller)
    if followed.stage is Stage.CATCH_UP:
        await puller.written()  # or a page that found no room would go unnoticed
        followed.take(Step.JOIN)


async def _replace(
    context: StreamContext, following: ReplicaSync, followed: Followed, puller: Fetcher
) -> None:
    """Take a snapshot in place of the copy, and close the opening."""
    context.tail_epochs.pop(followed.partition_id, None)
    epoch = followed.want.primary_epoch
    await puller.snapshot()
    context.tail_epochs[followed.partition_id] = epoch
    followed.attempts = 0
    following.close(followed)  # the primary keeps its hold: it is not told
    context.wake()


async def _complete(context: StreamContext, followed: Followed, puller: Fetcher) -> None:
    """Repair the tail and catch up, as far as there is need. The last pages of a catch-up may not
    be durable.
    """
    partition_id, epoch = followed.partition_id, followed.want.primary_epoch
    if followed.stage is Stage.REPAIR:
        if not followed.holds:
            context.tail_epochs.pop(partition_id, None)
        await puller.repair()
        if not followed.holds:
            context.tail_epochs[partition_id] = epoch
        followed.take(core.step_after_repair(followed.opened))
    if followed.stage is Stage.CATCH_UP:
        if not followed.holds:
            context.tail_epochs[partition_id] = epoch
        await puller.catch_up()
