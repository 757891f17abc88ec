"""A server as every service runs it: statuses, no leaked details, health, reflection, one owner per port."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from pinyon.runtime.channel import open_channel
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.interceptors import error_from_rpc

KV_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"]
WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
STREAMING = (
    ("unary_stream", f"/{WORKER_SERVICE.full_name}/Generate"),
    ("stream_stream", f"/{WORKER_SERVICE.full_name}/Session"),
    ("stream_stream", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ("unary_stream", "/grpc.health.v1.Health/Watch"),
)


class Failing(kvstore_pb2_grpc.KvStoreServiceServicer):
    async def Exists(self, request, context):
        raise InvalidArgument("must be whole keys", field="keys")

    async def Remove(self, request, context):
        raise ResourceExhausted("too many", retry_after_s=2.5)

    async def GetNodeStatus(self, request, context):
        raise RuntimeError("secret detail")


class FailingStreams(worker_pb2_grpc.WorkerServiceServicer):
    async def Generate(self, request, context):
        yield worker_pb2.GenerateResponse()
        raise Unavailable("gone")

    async def Session(self, request_iterator, context):
        async for _ in request_iterator:
            raise KeyError("secret detail")
            yield

    async def PrefillSession(self, _, context):
        """Writes by itself, and fails while the first message is on its way."""
        writing = asyncio.ensure_future(context.write(worker_pb2.PrefillSessionResponse()))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait({writing})
        raise Unavailable("gone")


@pytest.fixture(params=[False, True], ids=["by grpcio", "within the loop"])
async def address(request):
    server = GrpcServer("127.0.0.1:0", sessions=request.param)
    server.add(Failing(), KV_SERVICE)
    server.add(FailingStreams(), WORKER_SERVICE)
    yield await server.start()
    await server.drain(0)


@pytest.fixture
async def channel(address):
    async with open_channel(address) as channel:
        yield channel


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_our_errors_become_their_status_with_the_fields_name(channel):
    error = await failure(kvstore_pb2_grpc.KvStoreServiceStub(channel).Exists(kvstore_pb2.ExistsRequest()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "keys: must be whole keys"
    ours = error_from_rpc(error)
    assert isinstance(ours, InvalidArgument)
    assert ours.field == "keys"


async def test_retry_hints_travel(channel):
    error = await failure(kvstore_pb2_grpc.KvStoreServiceStub(channel).Remove(kvstore_pb2.RemoveRequest()))
    assert error_from_rpc(error).retry_after_s == 2.5


async def test_other_exceptions_are_internal_and_tell_nothing(channel, caplog):
    error = await failure(
        kvstore_pb2_grpc.KvStoreServiceStub(channel).GetNodeStatus(kvstore_pb2.GetNodeStatusRequest())
    )
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "secret detail" in caplog.text


async def test_errors_in_streams(channel):
    stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def read_all():
        return [message async for message in stub.Generate(worker_pb2.GenerateRequest())]

    assert (await failure(read_all())).code() is grpc.StatusCode.UNAVAILABLE

    async def talk():
        call = stub.Session(iter([worker_pb2.SessionRequest()]))
        return [message async for message in call]

    error = await failure(talk())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()


async def test_messages_that_cannot_be_parsed_are_the_callers_fault(channel, caplog):
    for kind, path in (("unary_unary", f"/{KV_SERVICE.full_name}/Exists"), *STREAMING):
        call = getattr(channel, kind)(path)
        garbage = b"\xff" * 9
        answer = call(iter([garbage]) if kind == "stream_stream" else garbage)

        async def read_all(answer=answer, kind=kind):
            return await answer if kind == "unary_unary" else [message async for message in answer]

        error = await failure(read_all())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, path
        assert isinstance(error_from_rpc(error), InvalidArgument)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


async def test_a_status_arrives_though_the_first_write_was_cut_off(channel):
    call = channel.stream_stream(f"/{WORKER_SERVICE.full_name}/PrefillSession")(timeout=60)

    async def read_all():
        while await call.read() is not grpc.aio.EOF:
            pass

    assert (await failure(read_all())).code() is grpc.StatusCode.UNAVAILABLE


async def test_health_is_told_for_services_that_it_stands_for() -> None:
    server = GrpcServer("127.0.0.1:0")
    server.stands_for.append("a.Service")
    channel = open_channel(await server.start())
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="a.Service")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    await server.set_serving(False)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await channel.close()
    await server.drain(0)


async def test_health_of_the_whole_and_of_each_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", KV_SERVICE.full_name, WORKER_SERVICE.full_name):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_drain_reports_not_serving_first():
    server = GrpcServer("127.0.0.1:0")
    server.add(Failing(), KV_SERVICE)
    address = await server.start()
    async with open_channel(address) as channel:
        await server.begin_drain()
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.drain(0)


async def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name async for reply in call for service in reply.list_services_response.service}
    assert {KV_SERVICE.full_name, WORKER_SERVICE.full_name, "grpc.health.v1.Health"} <= names


async def test_a_taken_port_is_an_error(address):
    for sessions in (False, True):
        second = GrpcServer(address, sessions=sessions)
        with pytest.raises(Unavailable, match="cannot listen"):
            await second.start()
        await second.drain(0)
