"""Another language's view: a generic client that knows only the address and reflection."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from koinon.client import Client
from koinon.local import LocalCluster


class GenericClient:
    """Calls methods by name with dictionaries, as grpcurl does."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self._pool = descriptor_pool.DescriptorPool(self.database)

    def call(self, method: str, **fields: Any) -> Any:
        service_name, _, name = method.rpartition("/")
        descriptor = self._pool.FindServiceByName(service_name).FindMethodByName(name)
        request_class = message_factory.GetMessageClass(descriptor.input_type)
        reply_class = message_factory.GetMessageClass(descriptor.output_type)
        invoke = self.channel.unary_unary(
            f"/{method}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=reply_class.FromString,
        )
        return invoke(request_class(**fields), timeout=10)


def test_reflection_client_puts_and_gets_at_the_primary(
    cluster: LocalCluster, client: Client
) -> None:
    key = b"reflected"
    partition = client._engine.routing().partitioner.partition_of(key)
    primary = client.table().primary_of(partition)
    assert primary is not None
    generic = GenericClient(primary.address)
    put = generic.call("koinon.v1.KeyValue/Put", key=key, value=b"by reflection")
    assert client.get(key) == b"by reflection"
    got = generic.call("koinon.v1.KeyValue/Get", key=key)
    assert (got.found, got.value, got.version) == (True, b"by reflection", put.version)
    other = next(n for n in client.table().nodes.values() if n.node_id != primary.node_id)
    with pytest.raises(grpc.RpcError, match=f"led by {primary.node_id} at {primary.address}"):
        GenericClient(other.address).call("koinon.v1.KeyValue/Get", key=key)


def test_reflection_lists_services_and_health_serves(cluster: LocalCluster) -> None:
    for name, service in (("n1", "koinon.v1.KeyValue"), ("c1", "koinon.v1.Admin")):
        generic = GenericClient(cluster.address(name))
        services = set(generic.database.get_services())
        assert {service, "koinon.v1.TableService", "grpc.health.v1.Health"} <= services
        health: Any = health_pb2_grpc.HealthStub(generic.channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
