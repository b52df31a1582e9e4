"""Keeps the wire form of each of the table's rows: a snapshot and the updates of the table hold the
same rows in the same field, and of thousands of rows few have changed since the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from koinon_proto.contract.codec import codec
from koinon_proto.contract.table import PartitionRow
from koinon_proto.v1 import state_pb2, table_pb2

FIELD = table_pb2.TableUpdate.DESCRIPTOR.fields_by_name["rows"].number
assert state_pb2.StateSnapshot.DESCRIPTOR.fields_by_name["rows"].number == FIELD
_TAG = bytes((FIELD << 3 | 2,))  # a message of this number follows, its length first
_AT_ONCE = 256
_ROW = codec(PartitionRow, table_pb2.PartitionRow)


class RowForms:
    """Rows' wire forms. Several threads may use it at once: a form that is made twice is equal."""

    def __init__(self) -> None:
        # By partition: the row that was asked for last, and its field in a message.
        self._made: dict[int, tuple[PartitionRow, bytes]] = {}

    def of(
        self, rows: Iterable[PartitionRow], let_go: Callable[[], object] = lambda: None
    ) -> bytes:
        """Return the rows' field of a message, as protobuf writes it. ``let_go`` is called after
        every few hundred rows that had to be made: a thread lets the event loop go on.
        """
        known, forms = self._made, []
        made = 0
        for row in rows:
            row_and_form = known.get(row.partition_id)
            if row_and_form is None or row_and_form[0] is not row:
                row_and_form = known[row.partition_id] = row, _field(row)
                made += 1
                if not made % _AT_ONCE:
                    let_go()
            forms.append(row_and_form[1])
        return b"".join(forms)


def _field(row: PartitionRow) -> bytes:
    form = _ROW.encode(row).SerializeToString(deterministic=True)
    return b"".join((_TAG, _varint(len(form)), form))


def _varint(number: int) -> bytes:
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*groups, number))
