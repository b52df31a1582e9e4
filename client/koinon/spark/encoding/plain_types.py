"""The Arrow types that the encoders support, and conversion of other types to them.

Files and Spark have strings, bytes and lists in several layouts (large, view, dictionary, fixed
size), and numbers and dates in several widths. The encoders support one layout of each.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_LEAVES: dict[str, Any] = {
    "large_string": pa.string(),
    "string_view": pa.string(),
    "large_binary": pa.binary(),
    "binary_view": pa.binary(),
    "halffloat": pa.float32(),
    "date64[ms]": pa.date32(),
    "null": pa.string(),
}


def plain_type(kind: Any) -> Any:
    """Return the type that a column of this type is converted to before it is encoded. An
    unsupported type is returned unchanged.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return _LEAVES.get(str(kind), kind)


def plain_batch(batch: Any) -> Any:
    """Return the record batch with its columns converted to plain types."""
    fields = [field.with_type(plain_type(field.type)) for field in batch.schema]
    if [field.type for field in fields] == batch.schema.types:
        return batch
    return batch.cast(pa.schema(fields))
