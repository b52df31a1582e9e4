"""SCAN and DBSIZE: the keys of the partitions that this node leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from koinon_node.partition.batches import ScanAnswer, ScanPage
from koinon_node.resp import wire
from koinon_node.resp.commands.arguments import SYNTAX, integer
from koinon_node.resp.commands.cursors import (
    HashPage,
    compiled,
    cursor_of,
    literal_prefix,
    position_of,
)
from koinon_node.resp.commands.rules import check_counting
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import NotPrimaryError

_COUNT_DEFAULT = 10
_COUNT_MAX = 4_096
_KEYS_MAX = 10_000
_HASH_PAGE_KEYS = 1_024
"""The least page of a partition that exceeds one page: each such page reads the whole partition."""
_LOOK_ROWS = 4_096
_PATTERN_BYTES_MAX = 4_096
_CURSOR_DIGITS_MAX = 20


def scan(session: Session, arguments: Arguments) -> Outcome:
    """Return some keys, and the cursor of the next ones."""
    cursor = _cursor(arguments[1])
    pattern, count, strings = b"", _COUNT_DEFAULT, True
    options = arguments[2:]
    if len(options) % 2:
        raise RefusedError(SYNTAX)
    for name, value in zip(options[::2], options[1::2], strict=True):
        if name.upper() == b"MATCH":
            pattern = value
            if len(pattern) > _PATTERN_BYTES_MAX:
                raise RefusedError("ERR the pattern is too long")
        elif name.upper() == b"COUNT":
            count = integer(value)
            if count < 1:
                raise RefusedError(SYNTAX)
        elif name.upper() == b"TYPE":
            strings = value.lower() == b"string"
        else:
            raise RefusedError(SYNTAX)
    if not strings:
        return _reply(0, ())
    prefix = literal_prefix(pattern) if pattern else b""
    session.caller.check_prefix(Action.SCAN, session.served.keyspace_id, prefix)
    return _scan(session, cursor, pattern, min(count, _COUNT_MAX))


def _cursor(text: bytes) -> int:
    if not text.isdigit() or len(text) > _CURSOR_DIGITS_MAX or int(text) >= 1 << 64:
        raise RefusedError("ERR invalid cursor")
    return int(text)


async def _scan(session: Session, cursor: int, pattern: bytes, count: int) -> bytes:
    session.served.check_quota()
    prefix = literal_prefix(pattern)
    try:
        keys, following = await next_page(session, cursor, prefix, count)
    except NotPrimaryError:  # a partition was handed over meanwhile: skip it
        keys, following = await next_page(session, cursor, prefix, count)
    session.served.count_shown(keys)
    if pattern:
        fits = compiled(pattern).fullmatch
        keys = [key for key in keys if fits(key)]
    return _reply(following, keys)


def _reply(cursor: int, keys: Sequence[bytes]) -> bytes:
    return wire.array([wire.bulk(b"%d" % cursor), wire.bulks(keys)])


async def next_page(
    session: Session, cursor: int, prefix: bytes, count: int
) -> tuple[list[bytes], int]:
    """Return the keys at the cursor that begin with ``prefix``, and the next cursor."""
    first, first_hash = position_of(cursor)
    led = [p for p in session.served.led() if p >= first]
    if not led:
        return [], 0
    if led[0] > first:
        first_hash = 0  # another node leads that partition now
    if not first_hash:
        answer = await session.service.scan(_page(led, prefix, b"", count))
        if answer.next_cursor is None:
            return answer.keys, 0
        partition_id, after_key = answer.next_cursor
        whole = _keys_before(answer, partition_id) if after_key else answer.keys
        if whole or partition_id > led[0]:
            return whole, cursor_of(partition_id, 0)
    page = HashPage(first_hash, max(count, _HASH_PAGE_KEYS))
    async for keys in pages_of(session, led[:1], prefix):
        page.offer(keys)
    if page.next_hash is not None:
        return page.keys, cursor_of(led[0], page.next_hash)
    return page.keys, cursor_of(led[1], 0) if len(led) > 1 else 0


def _keys_before(answer: ScanAnswer, partition_id: int) -> list[bytes]:
    """Return the keys of the partitions that the answer has completely."""
    return [
        key for key, p in zip(answer.keys, answer.partition_ids, strict=True) if p < partition_id
    ]


def _page(
    partition_ids: Sequence[int],
    prefix: bytes,
    after_key: bytes,
    limit: int,
    *,
    counted: bool = False,
) -> ScanPage:
    return ScanPage(
        table_version=0,
        partition_ids=partition_ids,
        prefix=prefix,
        after_key=after_key,
        limit=limit,
        keys_only=True,
        counted=counted,
    )


async def pages_of(
    session: Session, partition_ids: Sequence[int], prefix: bytes, *, counted: bool = False
) -> AsyncIterator[list[bytes]]:
    """Yield all keys of the partitions, a page at a time, with yields to the event loop.
    ``counted`` pages count against the keyspace's quota.
    """
    left, after_key = partition_ids, b""
    while left:
        session.served.keyspace()  # raises if dropped: another keyspace may get its partitions
        try:
            answer = await session.service.scan(
                _page(left, prefix, after_key, _LOOK_ROWS, counted=counted)
            )
        except NotPrimaryError as error:  # handed over meanwhile: continue with the others
            after_key = b"" if left[0] == error.partition_id else after_key
            left = [p for p in left if p != error.partition_id]
            continue
        yield answer.keys
        if answer.next_cursor is None:
            return
        await asyncio.sleep(0)  # a scan might otherwise never yield
        following, after_key = answer.next_cursor
        left = [p for p in left if p >= following]


def keys(session: Session, arguments: Arguments) -> Outcome:
    """Return the keys that match a pattern, among all keys that this node leads."""
    pattern = arguments[1]
    if len(pattern) > _PATTERN_BYTES_MAX:
        raise RefusedError("ERR the pattern is too long")
    prefix = literal_prefix(pattern)
    session.caller.check_prefix(Action.SCAN, session.served.keyspace_id, prefix)
    return _keys(session, pattern, prefix)


async def _keys(session: Session, pattern: bytes, prefix: bytes) -> bytes:
    session.served.check_quota()
    fits = compiled(pattern).fullmatch
    found: list[bytes] = []
    async for page in pages_of(session, session.served.led(), prefix):
        found += [key for key in page if fits(key)]
        if len(found) > _KEYS_MAX:
            raise RefusedError(f"ERR KEYS returns {_KEYS_MAX:,} keys at most: use SCAN")
    session.served.count_shown(found)
    return wire.bulks(found)


def dbsize(session: Session, arguments: Arguments) -> Outcome:
    """Count the records that this node leads, by reading all of them."""
    check_counting(session)
    return _dbsize(session)


async def _dbsize(session: Session) -> bytes:
    found = 0
    async for keys in pages_of(session, session.served.led(), b""):
        found += len(keys)
    return wire.integer(found)
