"""Writes the Python modules that follow from the .proto files and their options.

A ``Contract`` is the files' description, as protoc makes it. Each public function takes it
and returns the source of one module; ``generate.py`` has the list.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "koinon.v1"
OPTIONS = "koinon_proto/v1/options.proto"
SETTINGS = Path(__file__).resolve().parents[1] / "pyproject.toml"
NOT_SENT = ("koinon_proto/v1/state.proto",)
"""Files whose messages no process sends to another: the log's entries and snapshots."""
FIELD: Any = descriptor_pb2.FieldDescriptorProto
PYTHON_TYPES = {
    FIELD.TYPE_STRING: ("str", '""'),
    FIELD.TYPE_BYTES: ("bytes", 'b""'),
    FIELD.TYPE_BOOL: ("bool", "False"),
}
FILE_MESSAGES = descriptor_pb2.FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
NUMBERS = {
    getattr(FIELD, f"TYPE_{kind}")
    for kind in (
        *("INT32", "INT64", "UINT32", "UINT64", "SINT32", "SINT64"),
        *("FIXED32", "FIXED64", "SFIXED32", "SFIXED64", "DOUBLE", "FLOAT"),
    )
}


class Contract:
    """The .proto files, with the options of ``options.proto`` understood."""

    def __init__(self, described: bytes) -> None:
        """``described``: a serialized FileDescriptorSet, in which each file follows its imports."""
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
            pool.Add(file)
        # Options are extensions of the messages in descriptor.proto. Those of this pool know them.
        set_class = message_factory.GetMessageClass(
            pool.FindMessageTypeByName("google.protobuf.FileDescriptorSet")
        )
        message_factory.GetMessageClassesForFiles([OPTIONS], pool)
        self._extensions = pool.FindFileByName(OPTIONS).extensions_by_name
        files: Any = set_class.FromString(described)
        self.files: list[Any] = [file for file in files.file if file.package == PACKAGE]
        of_options = next(file for file in self.files if file.name == OPTIONS)
        self.files.remove(of_options)
        self._number = next(m for m in of_options.message_type if m.name == "Number")

    def option(self, described: Any, name: str) -> Any:
        """Return the option of a field, message, method or service; None where it has none."""
        extension = self._extensions[name]
        options = described.options
        return options.Extensions[extension] if options.HasExtension(extension) else None

    def methods(self) -> Iterator[tuple[str, Any]]:
        """Yield each method's path and its callers."""
        for file in self.files:
            for service in file.service:
                of_all = self.option(service, "callers_of_all")
                for method in service.method:
                    path = f"/{PACKAGE}.{service.name}/{method.name}"
                    callers = self.option(method, "callers") or of_all
                    if callers is None:
                        raise SystemExit(f"{path}: no option says who may call it")
                    yield path, callers

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Yield the messages that processes send to one another, those within others before these,
        by their names without the package.
        """
        for file in self.files:
            if file.name not in NOT_SENT:
                for message in file.message_type:
                    yield from _with_inner(message, message.name)

    def kinds(self) -> dict[int, tuple[str, int | None]]:
        """Return the kinds of numbers: each one's name, and the greatest number; None: any."""
        return {
            kind.number: (kind.name, self.option(kind, "greatest"))
            for kind in self._number.enum_type[0].value
        }

    def bounds(self, name: str, message: Any) -> dict[str, int]:
        """Return the greatest numbers of the message's own fields that are bounded."""
        kinds, found = self.kinds(), {}
        for field in message.field:
            kind = self.option(field, "at_most")
            if (kind is not None) != (field.type in NUMBERS):
                raise SystemExit(f"{name}.{field.name}: each number has a bound, and nothing else")
            if kind and (greatest := kinds[kind][1]) is not None:
                found[field.name] = greatest
        return found


def _with_inner(message: Any, name: str) -> Iterator[tuple[str, Any]]:
    for inner in message.nested_type:
        yield from _with_inner(inner, f"{name}.{inner.name}")
    yield name, message


class _Checks:
    """The checks of messages that have a bounded number, in themselves or in a message within."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._messages = dict(contract.messages())
        self.names: dict[str, str] = {}  # by message; "": it needs no check
        self.sources: list[str] = []  # a check stands before those that call it
        for message in self._messages:
            self.name_of(message)

    def name_of(self, message: str) -> str:
        """Return the name of a message's check, which is written if it is not yet; "": none."""
        if message not in self.names:
            lines = "".join(self._lines(message))
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", message.replace(".", "_")).lower()
            self.names[message] = f"_{snake}" if lines else ""
            if lines:
                self.sources.append(f"def _{snake}(m: Any) -> None:\n{lines}\n")
        return self.names[message]

    def _lines(self, message: str) -> Iterator[str]:
        greatest = self._contract.bounds(message, self._messages[message])
        for field in self._messages[message].field:
            if field.type == FIELD.TYPE_MESSAGE:
                yield self._inner(field)
            elif (bound := greatest.get(field.name)) is not None:
                yield _compare(field, bound)

    def _inner(self, field: Any) -> str:
        check = self.name_of(field.type_name.removeprefix(f".{PACKAGE}."))
        if not check:
            return ""
        if field.label == FIELD.LABEL_REPEATED:
            return f"    for part in m.{field.name}:\n        {check}(part)\n"
        return f'    if m.HasField("{field.name}"):\n        {check}(m.{field.name})\n'


def _compare(field: Any, bound: int) -> str:
    value = f"m.{field.name}"
    beyond = f"{value} > {bound}"
    if field.label == FIELD.LABEL_REPEATED:
        beyond, value = f"{value} and max({value}) > {bound}", f"max({value})"
    elif field.type == FIELD.TYPE_DOUBLE:  # NaN is beyond its bound, too
        beyond = f"not 0 <= {value} <= {bound}"
    return f'    if {beyond}:\n        _refuse("{field.name}", {bound}, {value})\n'


def bounds(contract: Contract) -> str:
    """Return the checks of numbers, by messages."""
    checks = _Checks(contract)
    limits = "\n".join(f"{kind} = {n}" for kind, n in contract.kinds().values() if n is not None)
    table = "\n".join(
        f'    "{PACKAGE}.{name}": {function},'
        for name, function in checks.names.items()
        if function
    )
    return f'''"""Checks of the numbers in messages (options.proto, Number)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from koinon_proto.contract.errors import InvalidArgumentError

{limits}


def _refuse(field: str, bound: int, actual: int | float) -> None:
    whole = isinstance(actual, int)
    raise InvalidArgumentError(
        field=field,
        reason="beyond what anybody could mean" if whole else f"{{actual}} makes no sense",
        limit=bound,
        actual=actual if isinstance(actual, int) else 0,
    )


{"".join(checks.sources)}
CHECKS: dict[str, Callable[[Any], None]] = {{
{table}
}}
"""By the messages' full names; a message without bounded numbers is not here."""
'''


class _Errors:
    """The classes of the errors that are kinds of ``Error``."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        file = next(file for file in contract.files if file.name.endswith("/errors.proto"))
        self._messages = {message.name: message for message in file.message_type}
        self._comments = {
            file.message_type[place.path[1]].name: place.leading_comments
            for place in file.source_code_info.location
            if len(place.path) == 2 and place.path[0] == FILE_MESSAGES
        }
        self.kinds = {  # in the order of the messages: a base stands before what derives from it
            name: next(
                f.name for f in self._messages["Error"].field if f.type_name.endswith(dotted)
            )
            for name in self._messages
            if (dotted := f".{name}") != ".Error"
        }

    def facts(self, name: str) -> Any:
        return self._contract.option(self._messages[name], "error")

    def source(self, name: str) -> str:
        """Return the source of one class."""
        facts, lines = self.facts(name), []
        base = facts.base or "KoinonError"
        if base.endswith("Words"):
            base += ", KoinonError"
        if facts.words:
            lines += [f"    template: ClassVar[str] = {facts.words!r}"]
        for fact in ("retriable", "stale_table", "maybe_applied"):
            if getattr(facts, fact):
                lines += [f"    {fact}: ClassVar[bool] = True"]
        lines += ["", *map(self._field, self._messages[name].field)]
        words = " ".join(self._comments[name].replace("`", "``").split())
        text = textwrap.fill(words, 92, break_on_hyphens=False).replace("\n", "\n    ")
        closing = "\n    " if "\n" in text else ""
        body = "\n".join(lines)
        return f'''
@dataclass(kw_only=True, eq=False)
class {name}({base}):
    """{text}{closing}"""

{body}

'''

    def _field(self, field: Any) -> str:
        kind, empty = PYTHON_TYPES.get(field.type, ("int", "0"))
        if field.label == FIELD.LABEL_REPEATED:
            kind, empty = f"tuple[{kind}, ...]", "()"
        may_lack = self._contract.option(field, "may_lack")
        return f"    {field.name}: {kind}" + (f" = {empty}" if may_lack else "")


def errors(contract: Contract) -> str:
    """Return the errors of the wire as dataclasses."""
    made = _Errors(contract)
    bases = sorted(
        {b for name in made.kinds if (b := made.facts(name).base) and b.endswith("Words")}
    )
    sources = "\n".join(map(made.source, made.kinds))
    kinds = "\n".join(
        f"    {name}: ({kind!r}, {made.facts(name).status or 'INTERNAL'!r}),"
        for name, kind in made.kinds.items()
    )
    return f'''"""Errors of the wire: errors.proto has their fields, facts and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from koinon_proto.contract.error_words import KoinonError, {", ".join(bases)}

{sources}

KINDS: dict[type[KoinonError], tuple[str, str]] = {{
{kinds}
}}
"""Each error's field in the message ``Error``, and the gRPC status of a call that ends so."""
'''


def callers(contract: Contract) -> str:
    """Return the table of who may call which method."""
    rows = "\n".join(
        f"    {path!r}: {(tuple(c.servers), tuple(c.users), c.speaks_as)!r},"
        for path, c in contract.methods()
    )
    return f'''"""Callers that may call each method: kinds of servers, actions of users, and the
field in which the calling server names itself (options.proto, Callers).
"""

CALLERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {{
{rows}
}}
'''


def formatted(source: str) -> str:
    """Return the module as ``ruff format`` writes it, marked as generated."""
    command = f"-m ruff format --config {SETTINGS} --stdin-filename module_gen.py -"
    return subprocess.run(
        [sys.executable, *command.split()],
        input=f"# Generated by proto/generate.py from the .proto files. Do not edit.\n{source}",
        capture_output=True,
        check=True,
        text=True,
    ).stdout
