"""Server reflection as ``grpc.reflection.v1`` beside ``v1alpha``.

grpcio-reflection serves v1alpha only, but newer clients ask for v1 first, and some for nothing else. Only the package's
name differs, so v1 is made from v1alpha, with the same messages on the wire and the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_METHOD = "ServerReflectionInfo"


def _v1_service() -> ServiceDescriptor:
    """Returns v1's service from the default pool, where v1alpha's file is added under the other name if need be."""
    pool = descriptor_pool.Default()
    name = f"{_V1}.ServerReflection"
    try:
        return pool.FindServiceByName(name)
    except KeyError:
        pass
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _V1
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(f".{_ALPHA}.", f".{_V1}.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{_ALPHA}.", f".{_V1}.")
            method.output_type = method.output_type.replace(f".{_ALPHA}.", f".{_V1}.")
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName(name)


SERVICES: tuple[ServiceDescriptor, ...] = (
    _v1_service(),
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS = frozenset(f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods)


def enable_reflection(names: Iterable[str], server: Any) -> None:
    """Adds both versions of reflection, for the services of these full names and for reflection itself."""
    own = (service.full_name for service in SERVICES)
    servicer: Any = reflection.aio.ReflectionServicer((*names, *own))  # type: ignore[attr-defined]
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICES[0].full_name, {_METHOD: handler})
