"""The settings of an ingest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from koinon.spark.options import WriteOptions, write_options
from koinon.spark.writing.planning import RowPlan, plan_rows


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an ingest, as options of the Spark format ``koinon``. ``value`` None: the
    whole row, encoded by ``encoding``. ``ttl`` is a duration with a unit, such as ``1h``;
    ``bytes_per_second`` is for the whole job, 0 for no limit.
    """

    coordinators: str
    key: str
    keyspace: str = ""
    key_encoding: str = "text"
    value: str | None = None
    encoding: str | None = None
    mode: str = "append"
    prefix: str | None = None
    ttl: str | None = None
    ttl_column: str | None = None
    delete_column: str | None = None
    order_by: str | None = None
    bad_records: str | None = None
    bytes_per_second: int = 0

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that are read beside key and value, each once."""
        named = (self.order_by, self.ttl_column, self.delete_column)
        return tuple(dict.fromkeys(name for name in named if name))

    def write_options(self) -> WriteOptions:
        """Return the checked options of the format.

        Raises:
            ConfigurationError: an option is wrong; the text names it.
        """
        return write_options(self.options(), overwrite=self.mode == "overwrite")

    def plan(self, schema: Any) -> RowPlan:
        """Return the use of each column of this Spark schema in a write.

        Raises:
            ConfigurationError: an option is wrong, or names a missing column, or one of a wrong
                type.
        """
        fields = [(field["name"], field["type"]) for field in schema.jsonValue()["fields"]]
        return plan_rows(self.write_options(), fields)

    def options(self, tasks: int = 1) -> dict[str, str]:
        """Return the options in Spark's form, for ``tasks`` that run at once."""
        rate = max(1, self.bytes_per_second // tasks) if self.bytes_per_second else None
        named = {
            "coordinators": self.coordinators,
            "keyspace": self.keyspace or None,
            "keyColumn": self.key,
            "keyEncoding": self.key_encoding,
            "valueColumn": self.value,
            "valueEncoding": self.encoding,
            "prefix": self.prefix,
            "ttl": self.ttl,
            "ttlColumn": self.ttl_column,
            "deleteColumn": self.delete_column,
            "orderBy": self.order_by,
            "badRecordsPath": self.bad_records,
            "maxBytesPerSecond": rate,
        }
        return {name: str(value) for name, value in named.items() if value is not None}
