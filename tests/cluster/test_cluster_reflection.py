"""A client like grpcurl, without proto files: it lists, describes and calls the conductor, in both versions."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pinyon.runtime.identity import LB

SERVICE = "pinyon.api.conductor.v1.ConductorService"


class Reflector(ProtoReflectionDescriptorDatabase):
    """A small grpcurl over one channel."""

    def __init__(self, channel: grpc.Channel, version: str) -> None:
        super().__init__(channel)
        self._channel = channel
        # Both versions have the same messages on the wire.
        self._stub.ServerReflectionInfo = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        self._pool = descriptor_pool.DescriptorPool(self)

    def method(self, service: str, method: str):
        return self._pool.FindServiceByName(service).FindMethodByName(method)

    def call(self, service: str, method: str, request: dict) -> dict:
        found = self.method(service, method)
        request_class = message_factory.GetMessageClass(found.input_type)
        response_class = message_factory.GetMessageClass(found.output_type)
        call = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_class.FromString,
        )
        reply = call(json_format.ParseDict(request, request_class()), timeout=60)
        return json_format.MessageToDict(reply, preserving_proto_field_name=True)


VERSIONS = ("v1", "v1alpha")


@pytest.fixture(params=VERSIONS)
def reflector(cluster, request):
    with cluster.access.channel(cluster.services["conductor"], role=LB) as channel:
        yield Reflector(channel, request.param)


def test_list(reflector):
    itself = {f"grpc.reflection.{version}.ServerReflection" for version in VERSIONS}
    assert {SERVICE, "grpc.health.v1.Health", *itself} <= set(reflector.get_services())


@pytest.mark.parametrize("version", VERSIONS)
def test_reflection_describes_itself(reflector, version):
    method = reflector.method(f"grpc.reflection.{version}.ServerReflection", "ServerReflectionInfo")
    assert method.input_type.full_name == f"grpc.reflection.{version}.ServerReflectionRequest"
    assert method.output_type.file.package == f"grpc.reflection.{version}"


@pytest.mark.parametrize("name", ["lb-0", "prefill-0", "decode-0", "kvstore-0"])
def test_every_service_answers_by_both_versions(cluster, name):
    with cluster.access.channel(cluster.services[name]) as channel:
        listed = [set(Reflector(channel, version).get_services()) for version in VERSIONS]
    assert listed[0] == listed[1]
    assert len(listed[0]) >= 4


def test_list_instances(reflector):
    instances = reflector.call(SERVICE, "ListInstances", {})["instances"]
    roles = sorted(instance["info"]["role"] for instance in instances)
    assert roles == ["ROLE_DECODE"] * 2 + ["ROLE_PREFILL"] * 2 + ["ROLE_STORE"]


def test_schedule(reflector):
    reply = reflector.call(SERVICE, "Schedule", {"model": "pinyon-tiny", "prompt_tokens": 100, "request_id": "r1"})
    assert reply["request_id"] == "r1"
    assert reply["placement"]["prefill_instance_id"].startswith("prefill-")
    assert reply["placement"]["decode_instance_id"].startswith("decode-")
    assert reflector.call(SERVICE, "Release", {"request_id": "r1"}) == {"released": True}
