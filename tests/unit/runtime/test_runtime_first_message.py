"""Calls before their method runs: the caller is checked first, and the wait for its message is short."""

import asyncio

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import ResourceExhausted, Unauthenticated
from pinyon.runtime.channel import open_channel
from pinyon.runtime.first_message import EACH_MAX
from pinyon.runtime.grpc_server import GrpcServer

WAIT_S = 30.0
MESSAGE_S = 0.05
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CODE = grpc.StatusCode


class Answering(worker_pb2_grpc.WorkerServiceServicer):
    async def GetStatus(self, request, context):
        return worker_pb2.GetStatusResponse()

    async def Generate(self, request, context):
        yield worker_pb2.GenerateResponse()

    async def PrefillSession(self, requests, context):
        async for _ in requests:
            yield worker_pb2.PrefillSessionResponse()


def who(context) -> str:
    for key, value in context.invocation_metadata():
        if key == "authorization":
            return value
    raise Unauthenticated("no key")


def nobody(context) -> str:
    raise ResourceExhausted("full")


class Served:
    def __init__(self, message_s, doors):
        self.server = GrpcServer("127.0.0.1:0", message_s=message_s)
        self.server.add(Answering(), SERVICE, doors=doors)

    async def __aenter__(self):
        self.channel = open_channel(await self.server.start())
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.drain(0)

    def call(self, method, messages, metadata=()):
        """Opens a call with any number of messages, whatever the method takes."""
        return self.channel.stream_stream(method if method.startswith("/") else f"/{SERVICE.full_name}/{method}")(
            messages, metadata=metadata
        )

    async def outcome(self, *arguments):
        """Returns the call's status and number of answers."""
        call = self.call(*arguments)
        answers = 0
        try:
            async with asyncio.timeout(WAIT_S):
                async for _ in call:
                    answers += 1
        except grpc.aio.AioRpcError as error:
            return error.code(), answers
        return CODE.OK, answers


async def never():
    await asyncio.Event().wait()
    yield b""


async def some(count):
    for _ in range(count):
        yield b""


@pytest.mark.parametrize("method", ["GetStatus", "Generate", REFLECTION])
async def test_a_message_that_does_not_come_is_not_waited_for(method):
    async with Served(MESSAGE_S, {}) as served:
        assert await served.outcome(method, never()) == (CODE.DEADLINE_EXCEEDED, 0)


async def test_sessions_see_to_their_messages_themselves():
    async with Served(MESSAGE_S, {}) as served:
        call = served.call("PrefillSession", never())
        for _ in range(4):  # each call begins later, and ends at the limit that the session does not have
            assert await served.outcome("GetStatus", never()) == (CODE.DEADLINE_EXCEEDED, 0)
        assert not call.done()
        call.cancel()


@pytest.mark.parametrize("method", ["GetStatus", "Generate"])
async def test_who_is_refused_is_told_before_a_message_has_come(method):
    async with Served(WAIT_S, {method: who}) as served:
        assert await served.outcome(method, never()) == (CODE.UNAUTHENTICATED, 0)
        assert await served.outcome(method, some(1), (("authorization", "key"),)) == (CODE.OK, 1)
    async with Served(WAIT_S, {method: nobody}) as served:
        assert await served.outcome(method, never()) == (CODE.RESOURCE_EXHAUSTED, 0)


@pytest.mark.parametrize("method", ["GetStatus", "Generate"])
@pytest.mark.parametrize(("messages", "outcome"), [(0, (CODE.INVALID_ARGUMENT, 0)), (1, (CODE.OK, 1))])
async def test_no_message_is_an_error(method, messages, outcome):
    async with Served(WAIT_S, {}) as served:
        assert await served.outcome(method, some(messages)) == outcome


async def test_reflection_still_answers():
    async with Served(WAIT_S, {}) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        asked = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = [service.name async for reply in asked for service in reply.list_services_response.service]
    assert SERVICE.full_name in names


async def test_one_senders_stalled_messages_leave_room_for_others():
    async with Served(WAIT_S, {"GetStatus": who}) as served:
        silent = [served.call("GetStatus", never(), (("authorization", "a"),)) for _ in range(2 * EACH_MAX)]
        assert await served.outcome("GetStatus", some(1), (("authorization", "b"),)) == (CODE.OK, 1)
        for call in silent:
            call.cancel()
        assert await served.outcome("GetStatus", some(1), (("authorization", "a"),)) == (CODE.OK, 1)


async def test_streams_for_anybody_are_few():
    async with Served(WAIT_S, {"GetStatus": who}) as served:
        watching = [served.call("/grpc.health.v1.Health/Watch", some(1)) for _ in range(EACH_MAX)]
        for call in watching:
            assert await call.read()
        # Without a message: grpcio's client sometimes says INTERNAL when a call is refused while it is still sending.
        assert await served.outcome("/grpc.health.v1.Health/Watch", never()) == (CODE.RESOURCE_EXHAUSTED, 0)
        assert await served.outcome("/grpc.health.v1.Health/Check", some(1)) == (CODE.OK, 1)
        for call in watching:
            call.cancel()
