"""Messages to send to servers: made from the descriptors of every method, right in form and nasty
in content, or bytes that were bent out of shape.

What could by chance be the legal call of an operator or a member, and would then rightly do what it
says, is left out by ``is_harmless``: the fuzzer looks for what strangers' nonsense does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.partitioner import partitioner
from koinon_proto.v1 import (
    admin_pb2,
    kv_pb2,
    loads_pb2,
    membership_pb2,
    raft_pb2,
    replication_pb2,
    table_pb2,
    traffic_pb2,
)

PARTITIONS = 64
OWN_PREFIX = b"beside:"
"""Of the keys of the client that runs beside the fuzzer: no message names one."""
DEPTH_MAX = 4

NODE, COORDINATOR = "n", "c"
_FILES = (
    (kv_pb2, {"KeyValue": NODE}),
    (loads_pb2, {"Bulk": NODE, "Loads": COORDINATOR}),
    (table_pb2, {"TableService": NODE + COORDINATOR}),
    (traffic_pb2, {"Traffic": NODE}),
    (replication_pb2, {"Replication": NODE}),
    (membership_pb2, {"Membership": COORDINATOR}),
    (admin_pb2, {"Admin": COORDINATOR}),
    (raft_pb2, {"Raft": COORDINATOR}),
    (health_pb2, {"Health": NODE + COORDINATOR}),
    (reflection_pb2, {"ServerReflection": NODE + COORDINATOR}),
)

DENIED = {
    "Admin/TransferLeadership": "a legal call: another leader",
    "Admin/RestorePrimaries": "a legal call: other primaries",
    "Admin/ForcePrimaries": "a legal call: gives up acknowledged writes",
    "Admin/SetMoves": "a legal call: other settings",
    "Admin/AddCoordinator": "a legal call: a member that is not there counts for the majority",
    "Admin/RemoveCoordinator": "a legal call: a member less",
    "Admin/SetNodeStatus": "a legal call: a node is drained",
    "Admin/ChangeAccess": "a legal call: roles and users that fill the state",
}
"""Methods that are sent only what is no message of theirs, and why."""


@dataclass(frozen=True)
class Method:
    """One method, and whom it is for."""

    path: str
    servers: str
    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        """The method as ``DENIED`` has it: ``Admin/SetMoves``."""
        return self.path[1:].rpartition(".")[2]

    @property
    def message(self) -> type[Message]:
        return message_factory.GetMessageClass(self.descriptor.input_type)


def _all_methods() -> tuple[Method, ...]:
    return tuple(
        Method(f"/{service.full_name}/{method.name}", servers, method)
        for module, services in _FILES
        for name, servers in services.items()
        for service in (module.DESCRIPTOR.services_by_name[name],)
        for method in service.methods
    )


METHODS = _all_methods()


def is_harmless(method: Method, raw: bytes) -> bool:
    """Tell whether these bytes cannot be a call that rightly changes the cluster."""
    try:
        message: Any = method.message.FromString(raw)
    except DecodeError:
        return True
    if method.name in DENIED:
        return False
    if OWN_PREFIX in raw or re.search(rb"\b[nc][1-9]\b", raw):
        return False
    if method.name == "Membership/Register":
        return bool(message.protocol_version != 1)  # another node for ever
    if method.name == "Loads/OpenLoad":
        return bool(message.mode != loads_pb2.LOAD_MODE_OVERWRITE)  # deletes all other keys
    if method.name == "Admin/AlterKeyspace":
        return message.name not in ("", DEFAULT)  # other rules for the client beside
    return True


_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = (
    *("", "x", "stranger", "a" * 64, "a" * 70_000, "../../etc/passwd", "127.0.0.1:1", "[::1]:0"),
    *("\x1b]52;c;eA==\x07", "line\nbreak", "\u202e\u0000", "\U0010ffff" * 9, "%s%n", "-1", "NaN"),
)
_BYTES = (b"", b"k", b"fuzz:1", bytes(500), bytes(501), b"\xff" * 16, bytes(100_000), b"\x00" * 8)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        nasty = (low, -1, 0, 1, 2, 63, 64, 1023, 1024, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, high)
        return st.sampled_from([n for n in nasty if low <= n <= high]) | st.integers(low, high)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        enum: Any = field.enum_type
        known = [value.number for value in enum.values]
        return st.sampled_from([*known, 99, 2**31 - 1, -1])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from([0.0, -1.0, 1e308, float("nan"), float("inf")])
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        inner: Any = field.message_type
        return messages(inner, depth - 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from(_BYTES) | st.binary(max_size=40)
    return st.sampled_from(_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = DEPTH_MAX) -> Any:
    """Any message of the type: each field there or not, each value usual or at an edge."""
    message: Any = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if (is_message and not depth) or not draw(st.booleans()):
            continue
        values = _values(field, depth)
        if field.is_repeated:
            some = draw(st.lists(values, max_size=4))
            times = draw(st.sampled_from([1, 1, 1, 1, 200])) if not is_message else 1
            getattr(message, field.name).extend(some * times)
        elif is_message:
            getattr(message, field.name).CopyFrom(draw(values))
        else:
            setattr(message, field.name, draw(values))
    if draw(st.booleans()):
        _match_partitions(message)
    return message


def _match_partitions(message: Any) -> None:
    """Give a batch the partitions of its keys, or it is refused for these alone."""
    names = message.DESCRIPTOR.fields_by_name
    if "keys" not in names or "partition_ids" not in names:
        return
    keys = [key for key in message.keys if key]
    del message.keys[:], message.partition_ids[:]
    message.keys.extend(keys)
    message.partition_ids.extend(partitioner("murmur2", PARTITIONS).partitions_of(keys).tolist())
    if "values" in names:
        del message.values[:]
        message.values.extend([b"fuzz"] * len(keys))


@st.composite
def raw_messages(draw: st.DrawFn, method: Method) -> bytes:
    """The bytes of a call: of a message, of one that was mutated, or any."""
    raw: bytes = draw(messages(method.descriptor.input_type)).SerializeToString()
    match draw(st.sampled_from(["whole", "whole", "cut", "flipped", "joined", "any"])):
        case "cut":
            raw = raw[: draw(st.integers(0, len(raw)))]
        case "flipped" if raw:
            bent = bytearray(raw)
            for _ in range(draw(st.integers(1, 8))):
                bent[draw(st.integers(0, len(bent) - 1))] = draw(st.integers(0, 255))
            raw = bytes(bent)
        case "joined":
            raw = raw[len(raw) // 2 :] + raw
        case "any":
            raw = draw(st.binary(max_size=200))
    return raw
