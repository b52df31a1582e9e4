"""The options of the data source, parsed and checked. Names are case-insensitive, as Spark's are.

docs/spark.md has a table of all of them, with their defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from koinon.core.quantities import parse_duration_ms, parse_size
from koinon.core.target import DEFAULT_OPENED, OpenedKeyspace
from koinon.options import parse
from koinon_proto.contract.bulk_loads import (
    LOAD_NAME_CHARS_MAX,
    LOAD_TEXT_CHARS_MAX,
    LOAD_TIMEOUT_MS_MAX,
    LOAD_TIMEOUT_MS_MIN,
    StreamBatch,
)
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MAX_BATCH_BYTES, MAX_KEY_BYTES, MAX_TTL_MS
from koinon_proto.security.transport import Dialing, dialing

KEY_ENCODINGS = ("binary", "text")
VALUE_ENCODINGS = ("json", "msgpack")
MALFORMED_MODES = FAILFAST, PERMISSIVE, DROPMALFORMED = "failfast", "permissive", "dropmalformed"
MEMORY_BYTES_MIN = 1 << 20
MEMORY_BYTES_MAX = 1 << 30
PAGE_BYTES_MIN = 1 << 10

_COMMON = ("coordinators", "keyspace", "timeout", "tlsBundle", "tokenFile")
_PREFIX = ("prefix", "prefixHex")
WRITE_OPTIONS = (
    *_COMMON,
    *_PREFIX,
    "keyColumn",
    "keyEncoding",
    "valueColumn",
    "valueEncoding",
    "ttl",
    "ttlColumn",
    "deleteColumn",
    "orderBy",
    "ownKeyspace",
    "txnAppId",
    "txnVersion",
    "badRecordsPath",
    "maxBytesPerSecond",
    "memoryBytes",
    "loadTimeout",
    "mergeTimeout",
    "description",
)
READ_OPTIONS = (
    *_COMMON,
    *_PREFIX,
    "keys",
    "keysHex",
    "valueEncoding",
    "mode",
    "columnNameOfCorruptRecord",
    "keysOnly",
    "counts",
    "metadata",
    "partitionsPerTask",
    "pageBytes",
)
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})
"""Spark passes a stream's own options to its sink, too."""
_NO_TABLES = (
    "Spark hands the options of tables to no data source in Python; use CREATE TEMPORARY VIEW … "
    "USING koinon OPTIONS (coordinators '…'), for SELECT and INSERT"
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options of the connection. Files are named, never their contents: options appear in
    Spark's plans, logs and user interface.
    """

    coordinators: str
    """``host:port,host:port``"""
    timeout_s: float
    keyspace: str = ""
    """The given name, "" for ``default``."""
    tls_bundle: str = ""
    token_file: str = ""
    opened: OpenedKeyspace = DEFAULT_OPENED
    """The keyspace that had this name when the job was planned; all processes of the job use it."""

    def dialing(self) -> Dialing:
        """Return the settings for connecting from this machine.

        Raises:
            ConfigurationError: a file cannot be used here.
        """
        return dialing(self.tls_bundle, self.token_file)


@dataclass(frozen=True, kw_only=True)
class WriteOptions(ClusterOptions):
    """The options of a write. ``None`` and 0: not given."""

    key_columns: tuple[str, ...]
    key_encoding: str
    value_column: str
    value_encoding: str
    ttl_ms: int
    ttl_column: str
    delete_column: str
    order_column: str
    prefix: bytes
    own_keyspace: bool
    transaction: StreamBatch | None
    bad_records_path: str
    bytes_per_second_max: int
    memory_bytes: int
    load_timeout_ms: int
    merge_timeout_s: float
    description: str


@dataclass(frozen=True, kw_only=True)
class ReadOptions(ClusterOptions):
    """The options of a read. ``keys`` None: all keys."""

    prefix: bytes
    keys: tuple[bytes, ...] | None
    value_encoding: str
    malformed_mode: str
    corrupt_column: str
    keys_only: bool
    counts: bool
    metadata: bool
    partitions_per_task: int
    page_bytes: int


def cluster_options(given: Mapping[str, str]) -> ClusterOptions:
    """Parse the options that reads and writes share. Raises as ``write_options`` does."""
    return ClusterOptions(**_Given(given, _COMMON).cluster())


def write_options(given: Mapping[str, str], *, overwrite: bool) -> WriteOptions:
    """Parse the options of a write.

    Raises:
        ConfigurationError: an option is unknown, missing or invalid; the text names it.
    """
    options = _Given(given, WRITE_OPTIONS)
    prefix = options.prefix()
    if prefix and not overwrite:
        options.refuse("prefix", "only mode overwrite replaces the rows of a prefix; leave it out")
    value_column, value_encoding = options.text("valueColumn"), options.text("valueEncoding")
    if value_column and value_encoding:
        options.refuse(
            "valueEncoding", "is for whole rows as values; leave it out, or leave valueColumn out"
        )
    return WriteOptions(
        **options.cluster(),
        key_columns=options.names("keyColumn"),
        key_encoding=options.one_of("keyEncoding", KEY_ENCODINGS, "binary"),
        value_column=value_column,
        value_encoding=options.one_of("valueEncoding", VALUE_ENCODINGS, ""),
        ttl_ms=options.duration_ms("ttl", "", most=MAX_TTL_MS),
        ttl_column=options.text("ttlColumn"),
        delete_column=options.text("deleteColumn"),
        order_column=options.text("orderBy"),
        prefix=prefix,
        own_keyspace=options.flag("ownKeyspace"),
        transaction=options.transaction(),
        bad_records_path=options.text("badRecordsPath"),
        bytes_per_second_max=options.size("maxBytesPerSecond", "0", least=1),
        memory_bytes=options.size(
            "memoryBytes", "64MiB", least=MEMORY_BYTES_MIN, most=MEMORY_BYTES_MAX
        ),
        load_timeout_ms=options.duration_ms(
            "loadTimeout", "30m", least=LOAD_TIMEOUT_MS_MIN, most=LOAD_TIMEOUT_MS_MAX
        ),
        merge_timeout_s=options.duration_ms("mergeTimeout", "10m") / 1000,
        description=options.text("description")[:LOAD_TEXT_CHARS_MAX],
    )


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. Raises as ``write_options`` does."""
    options = _Given(given, READ_OPTIONS)
    counts, keys = options.flag("counts"), options.keys()
    if counts and (keys is not None or options.flag("metadata")):
        options.refuse("counts", "is of whole partitions: leave keys and metadata out")
    value_encoding = options.one_of("valueEncoding", VALUE_ENCODINGS, "")
    if value_encoding and (counts or options.flag("keysOnly")):
        options.refuse("valueEncoding", "is for values: leave counts and keysOnly out")
    malformed_mode = options.one_of("mode", MALFORMED_MODES, "")
    if malformed_mode and not value_encoding:
        options.refuse("mode", "is for rows in values: give valueEncoding, or leave mode out")
    return ReadOptions(
        **options.cluster(),
        prefix=options.prefix(),
        keys=keys,
        value_encoding=value_encoding,
        malformed_mode=malformed_mode or FAILFAST,
        corrupt_column=options.text("columnNameOfCorruptRecord", "_corrupt_record"),
        keys_only=options.flag("keysOnly"),
        counts=counts,
        metadata=options.flag("metadata"),
        partitions_per_task=options.number("partitionsPerTask", "256"),
        page_bytes=options.size("pageBytes", "4MiB", least=PAGE_BYTES_MIN, most=MAX_BATCH_BYTES),
    )


class _Given:
    """The given options, by lower-case names; every error names the option."""

    def __init__(self, given: Mapping[str, str], known: Sequence[str]) -> None:
        self._given = {name.lower(): str(value) for name, value in given.items()}
        self._names = {name.lower(): name for name in known}
        for name in self._given:
            if name not in self._names and name not in _SPARKS_OWN:
                self._refuse_unknown(name)

    def _refuse_unknown(self, name: str) -> NoReturn:
        if "owner" in self._given and "provider" in self._given:  # properties of a table
            raise ConfigurationError(reason=f"CREATE TABLE cannot use koinon: {_NO_TABLES}")
        if name == "path":
            self.refuse(
                "path", "Koinon has no paths: call save() and load() without one, or give prefix"
            )
        elsewhere = {n.lower(): n for n in (*WRITE_OPTIONS, *READ_OPTIONS)}
        if name in elsewhere:
            reads = elsewhere[name] in READ_OPTIONS
            self.refuse(elsewhere[name], f"is an option of {'reads' if reads else 'writes'} only")
        near = difflib.get_close_matches(name, self._names, n=1)
        hint = f"did you mean {self._names[near[0]]}?" if near else "known are "
        self.refuse(name, f"unknown; {hint}{'' if near else ', '.join(self._names.values())}")

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise ConfigurationError(reason=f"option {name}: {reason}")

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name.lower(), "").strip() or default

    def cluster(self) -> dict[str, Any]:
        """Parse the fields of ``ClusterOptions``."""
        addresses, named = self.coordinators()
        return {
            "coordinators": addresses,
            "keyspace": self.text("keyspace", named),
            "timeout_s": self.duration_ms("timeout", "2m") / 1000,
            "tls_bundle": self.text("tlsBundle"),
            "token_file": self.text("tokenFile"),
        }

    def coordinators(self) -> tuple[str, str]:
        """Parse the addresses, and the keyspace in a URL ("": none)."""
        text = self.text("coordinators")
        if not text:
            hint = f" (for SQL: {_NO_TABLES})" if not self._given else ""
            self.refuse(
                "coordinators", f"is required: host:port,host:port of the coordinators{hint}"
            )
        if "://" in text and "?" in text:
            self.refuse("coordinators", "give settings as options of their own, not in the URL")
        try:
            addresses, named = parse(text, {})
        except ConfigurationError as error:
            self.refuse("coordinators", error.reason)
        return ",".join(addresses), named.keyspace

    def names(self, option: str) -> tuple[str, ...]:
        text = self.text(option)
        if not text:
            return ()
        names = tuple(part.strip() for part in text.split(","))
        if not all(names):
            self.refuse(option, f"{text!r} has an empty name between commas")
        if len(set(names)) < len(names):
            self.refuse(option, f"{text!r} names a column twice")
        return names

    def one_of(self, name: str, values: Sequence[str], default: str) -> str:
        text = self.text(name).lower()
        if text and text not in values:
            self.refuse(name, f"{text!r} is none of {', '.join(values)}")
        return text or default

    def flag(self, name: str) -> bool:
        return self.one_of(name, ("true", "false"), "false") == "true"

    def number(self, name: str, default: str) -> int:
        text = self.text(name, default)
        if not text.isdecimal() or int(text) < 1:
            self.refuse(name, f"{text!r} is no whole number above 0")
        return int(text)

    def duration_ms(
        self, name: str, default: str, *, least: int = 1, most: int = LOAD_TIMEOUT_MS_MAX
    ) -> int:
        """Parse a duration as milliseconds; 0 if there is neither a value nor a default."""
        text = self.text(name, default).lower()
        if not text:
            return 0
        value = self._parsed(name, text, parse_duration_ms)
        if not least <= value <= most:
            self.refuse(name, f"{text!r} is out of range: {least} to {most} ms")
        return value

    def size(self, name: str, default: str, *, least: int, most: int = 1 << 50) -> int:
        """Parse a size as bytes; the default is not checked."""
        text = self.text(name, default).lower()
        value = self._parsed(name, text, parse_size)
        if text != default.lower() and not least <= value <= most:
            self.refuse(name, f"{text!r} is out of range: {least} to {most} bytes")
        return value

    def transaction(self) -> StreamBatch | None:
        app_id, version = self.text("txnAppId"), self.text("txnVersion")
        if bool(app_id) != bool(version):
            self.refuse("txnVersion", "and txnAppId belong together: give both, or neither")
        if not app_id:
            return None
        if not version.isdecimal() or int(version) >= 1 << 63:
            self.refuse("txnVersion", f"{version[:40]!r} is no whole number of 63 bits")
        if len(app_id) > LOAD_NAME_CHARS_MAX:
            self.refuse("txnAppId", f"has more than {LOAD_NAME_CHARS_MAX} characters")
        return StreamBatch(app_id, int(version))

    def prefix(self) -> bytes:
        text, in_hex = self._given.get("prefix", ""), self.text("prefixHex")
        if text and in_hex:
            self.refuse("prefixHex", "is the same as prefix, in hex: give one of them")
        try:
            prefix = bytes.fromhex(in_hex) if in_hex else text.encode()
        except ValueError:
            self.refuse("prefixHex", f"{in_hex!r} is no bytes in hex")
        if len(prefix) > MAX_KEY_BYTES:
            self.refuse("prefix", f"is longer than a key may be: {MAX_KEY_BYTES} bytes")
        return prefix

    def keys(self) -> tuple[bytes, ...] | None:
        text, in_hex = self._given.get("keys"), self._given.get("keyshex")
        if text is not None and in_hex is not None:
            self.refuse("keysHex", "is the same as keys, in hex: give one of them")
        if in_hex is None:
            return None if text is None else tuple(key.encode() for key in text.split(",") if key)
        try:
            return tuple(bytes.fromhex(key) for key in in_hex.split(",") if key.strip())
        except ValueError:
            self.refuse("keysHex", f"{in_hex[:40]!r} is no list of bytes in hex")

    def _parsed(self, name: str, text: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(text)
        except ValueError as error:
            self.refuse(name, str(error))
        except OverflowError:
            self.refuse(name, f"{text[:40]!r} is far too large")
