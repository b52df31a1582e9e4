"""etcd: three servers for the length of a ``with`` block, and the part of its API that is compared.

The messages are built here from etcd's published ones (api/etcdserverpb/rpc.proto, mvccpb/kv.proto;
fields that are not used are left out), so that no client library is needed.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from bench.peers.servers import PeerServers
from koinon.local.files import choose_addresses

READY_S = 20.0
POLL_S = 0.1
OPERATIONS_MAX = 2_000  # of a transaction; a batch of 1,000 is one

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {"bytes": _FIELD.TYPE_BYTES, "int64": _FIELD.TYPE_INT64}
_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    # message: (field, number, type or message, repeated)
    "KeyValue": [("key", 1, "bytes", False), ("value", 5, "bytes", False)],
    "RangeRequest": [
        ("key", 1, "bytes", False),
        ("range_end", 2, "bytes", False),
        ("limit", 3, "int64", False),
    ],
    "RangeResponse": [("kvs", 2, "KeyValue", True)],
    "PutRequest": [("key", 1, "bytes", False), ("value", 2, "bytes", False)],
    "PutResponse": [],
    # Of these, one field is set: as in the oneof of the original, which reads the same.
    "RequestOp": [
        ("request_range", 1, "RangeRequest", False),
        ("request_put", 2, "PutRequest", False),
    ],
    "ResponseOp": [
        ("response_range", 1, "RangeResponse", False),
        ("response_put", 2, "PutResponse", False),
    ],
    "TxnRequest": [("success", 2, "RequestOp", True)],
    "TxnResponse": [("responses", 3, "ResponseOp", True)],
}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="bench/etcd.proto", package="koinon.bench.etcd", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            added.type = _TYPES.get(kind, _FIELD.TYPE_MESSAGE)
            if kind not in _TYPES:
                added.type_name = f".koinon.bench.etcd.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"koinon.bench.etcd.{name}") for name in _MESSAGES}
    return {name: GetMessageClass(descriptor) for name, descriptor in found.items()}


MESSAGES = _messages()


def stub(channel: Any) -> dict[str, Any]:
    """Return the calls of etcd's KV service on a channel, blocking or for asyncio, by name."""
    return {
        call: channel.unary_unary(
            f"/etcdserverpb.KV/{call}",
            request_serializer=MESSAGES[f"{call}Request"].SerializeToString,
            response_deserializer=MESSAGES[f"{call}Response"].FromString,
        )
        for call in ("Range", "Put", "Txn")
    }


def missing() -> str:
    """Return what this machine lacks for etcd; '' if it lacks nothing."""
    return "" if shutil.which("etcd") else "etcd is not installed (Debian's package etcd-server)"


class EtcdServers(PeerServers):
    """A cluster of so many; ``addresses`` are where clients connect."""

    def __init__(self, servers: int = 3) -> None:
        super().__init__("etcd")
        self._count = servers
        self.addresses: list[str] = []

    def _start(self, directory: Path) -> None:
        chosen = choose_addresses(2 * self._count, 0)
        self.addresses, peers = chosen[: self._count], chosen[self._count :]
        names = [f"e{n + 1}" for n in range(self._count)]
        cluster = ",".join(f"{name}=http://{peer}" for name, peer in zip(names, peers, strict=True))
        for name, address, peer in zip(names, self.addresses, peers, strict=True):
            argv = ["etcd", "--name", name, "--data-dir", str(directory / name)]
            argv += ["--listen-client-urls", f"http://{address}"]
            argv += ["--advertise-client-urls", f"http://{address}"]
            argv += ["--listen-peer-urls", f"http://{peer}"]
            argv += ["--initial-advertise-peer-urls", f"http://{peer}"]
            argv += ["--initial-cluster", cluster, "--max-txn-ops", str(OPERATIONS_MAX)]
            argv += ["--max-request-bytes", str(16 << 20), "--log-level", "error"]
            argv += ["--quota-backend-bytes", str(8 << 30), "--auto-compaction-retention", "1m"]
            self._spawn(name, argv, directory / f"{name}.log")
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        for address in self.addresses:
            with grpc.insecure_channel(address) as channel:
                while True:
                    try:
                        stub(channel)["Range"](MESSAGES["RangeRequest"](key=b"?"), timeout=1.0)
                        break
                    except grpc.RpcError:
                        if time.monotonic() > deadline:
                            text = f"etcd does not answer\n{self._log_tails()}"
                            raise TimeoutError(text) from None
                        time.sleep(POLL_S)
