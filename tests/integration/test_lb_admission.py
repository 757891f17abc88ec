"""Limits between tenants: no tenant fills the queue alone or exceeds its rates."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from tests.integration.lb_harness import WAIT_S, Connection, ask, expected_text, running_lb, spin
from tests.long import usually

NOW_S = 1000.0
"""A fixed time, so that no rate recovers during a test."""


def keyed(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path) -> str:
    path = tmp_path / "keys"
    path.write_text("sk-a anna\nsk-b bert\nsk-c carl rpm=2\nsk-d dora tpm=30\nsk-e emil rpm=0 tpm=0\n")
    return str(path)


async def test_a_tenant_s_flood_leaves_places_and_turns_to_others(keys):
    async with running_lb(workers=1, api_keys_file=keys, in_flight_limit=2, queue_limit=40) as bench:
        (worker,) = bench.workers
        worker.hold()
        flood = [asyncio.ensure_future(bench.complete(f"{n:03}", keyed("sk-a"), max_tokens=1)) for n in range(42)]
        await spin(lambda: bench.gauge("queue_requests") == 40)
        reply = await bench.complete("more", keyed("sk-a"), max_tokens=1)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        quiet = [asyncio.ensure_future(bench.complete(f"b{n}", keyed("sk-b"), max_tokens=1)) for n in range(3)]
        await spin(lambda: sum(each.done() for each in flood) == 3)
        assert bench.gauge("queue_requests") == 40
        assert not any(each.done() for each in quiet)
        worker.go.set()
        assert {reply.status for reply in await asyncio.gather(*quiet)} == {200}
        assert sorted(reply.status for reply in await asyncio.gather(*flood)) == [200] * 39 + [429] * 3
        order = [each.request_class.tenant for each in worker.submissions]
        assert sorted(order[:8]).count("bert") == 3, f"in turn with the flood: {order}"
        assert bench.gauge("refused_total", reason="displaced") == 3
        assert bench.gauge("refused_total", reason="queue_full") == 1
        await bench.idle()


async def test_requests_per_minute(keys):
    async with running_lb(api_keys_file=keys, tenant_rpm=1, clock=lambda: NOW_S) as bench:
        for left in (1, 0):
            reply = await bench.complete("hello", keyed("sk-c"), max_tokens=2, stream=not left)
            assert reply.status == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "2"
            assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
            assert "x-ratelimit-limit-tokens" not in reply.headers
        reply = await bench.complete("hello", keyed("sk-c"), max_tokens=2)
        assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert reply.headers["retry-after"] == "30"
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
        assert (await bench.complete("hello", keyed("sk-b"), max_tokens=2)).status == 200
        assert (await bench.complete("hello", keyed("sk-b"), max_tokens=2)).status == 429, "the default"
        for _ in range(3):
            assert (await bench.complete("hello", keyed("sk-e"), max_tokens=2)).status == 200, "no limit"
        async with Connection(bench.http) as connection:
            connection.send("POST", "/v1/completions", headers={**keyed("sk-c"), "content-length": "1000000"})
            assert (await connection.head())[0] == 429, "before its body"
        assert bench.gauge("refused_total", reason="requests_per_minute") == 3
        await bench.idle()


async def test_tokens_per_minute_count_what_was_used(keys):
    async with running_lb(api_keys_file=keys, clock=lambda: NOW_S) as bench:
        bench.workers[0].error = common_pb2.Error(code="INTERNAL", message="broken")
        assert (await bench.complete("hello", keyed("sk-d"), max_tokens=20)).status == 500
        bench.workers[0].error = None
        await bench.idle()
        # The 5 tokens of the prompt are spent; those not generated came back.
        reply = await bench.complete("hello", keyed("sk-d"), max_tokens=15)
        assert reply.status == 200
        assert reply.headers["x-ratelimit-limit-tokens"] == "30"
        assert reply.headers["x-ratelimit-remaining-tokens"] == "5"
        reply = await bench.complete("hello", keyed("sk-d"), max_tokens=15)
        assert reply.status == 429
        assert reply.headers["retry-after"] == "30"
        reply = await bench.complete("hello", keyed("sk-d"), max_tokens=26)
        assert reply.status == 429
        assert "retry-after" not in reply.headers, "it never may"
        assert bench.gauge("refused_total", reason="tokens_per_minute") == 2
        await bench.idle()


async def test_the_same_by_grpc(keys):
    async with (
        running_lb(api_keys_file=keys, clock=lambda: NOW_S) as bench,
        grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel,
    ):
        generate = lb_pb2_grpc.LbServiceStub(channel).Generate
        request = lb_pb2.GenerateRequest(prompt="jay", sampling=common_pb2.SamplingParams(max_tokens=2))
        metadata = (("authorization", "Bearer sk-c"),)
        for _ in range(2):
            assert [reply async for reply in generate(request, metadata=metadata)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(request, metadata=metadata).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 requests per minute" in caught.value.details()
        await bench.idle()


async def test_a_tenant_s_bodies_leave_room_for_those_of_others(keys):
    """A tenant alone cannot fill the room shared by all, as with the queue, not even by sending slowly."""
    size = (4 << 20) - 100
    async with running_lb(api_keys_file=keys, bodies_limit_mib=16, body_timeout_s=WAIT_S) as bench:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(6):
                connection = await stack.enter_async_context(Connection(bench.http))
                connection.send(
                    "POST", "/v1/completions", b" " * (size - 10), {**keyed("sk-a"), "content-length": str(size)}
                )
                await connection.writer.drain()
            await spin(lambda: bench.lb.bodies.used > 6 << 20)
            for key in ("sk-b", "sk-e"):
                body = ask() + b" " * (1 << 20)
                assert (await bench.post("/v1/completions", body, keyed(key))).status == 200
        await spin(lambda: not bench.lb.bodies.used)
        await bench.idle()


async def test_grpc_calls_without_key_or_place_are_refused_unread(keys):
    """A client of the port could otherwise make the load balancer hold 4 MiB a call for any time."""

    async def never():
        await asyncio.Event().wait()
        yield b""

    async with (
        running_lb(api_keys_file=keys, in_flight_limit=1, queue_limit=0) as bench,
        grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel,
    ):
        generate = channel.stream_stream("/pinyon.api.lb.v1.LbService/Generate")
        models = channel.stream_stream("/pinyon.api.lb.v1.LbService/ListModels")
        key = (("authorization", "Bearer sk-a"),)
        for method, keys_sent in ((generate, ()), (generate, (("authorization", "Bearer sk-z"),)), (models, ())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(method(never(), metadata=keys_sent).read(), WAIT_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        running = await bench.held(headers={"authorization": "Bearer sk-a"}, max_tokens=2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(generate(never(), metadata=key).read(), WAIT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        bench.workers[0].go.set()
        assert (await running).status == 200
        await bench.idle()


@pytest.mark.parametrize("body", [b"{", ask(max_tokens=9999)])
async def test_what_is_refused_for_itself_leaves_its_place(body):
    async with running_lb(in_flight_limit=1, queue_limit=0) as bench:
        for _ in range(3):
            assert (await bench.post("/v1/completions", body)).status == 400
        assert (await bench.complete(max_tokens=1)).status == 200
        await bench.idle()


@pytest.mark.slow
async def test_hundreds_of_streams_at_once():
    """All have their first token before any has its last, with default limits. (test_cluster_streams.py has 2,000.)"""
    count = usually(500, long=2000)
    async with running_lb(workers=1, conductor_timeout_s=60) as bench:
        (worker,) = bench.workers
        worker.hold(1)
        begun: list[int] = []

        async def client(number: int) -> str:
            async with bench.asking(f"{number:05}", max_tokens=4, stream=True) as connection:
                status, _ = await connection.head()
                begun.append(status)
                events = b""
                while chunk := await connection.chunk():
                    events += chunk
            texts = [json.loads(event[6:]) for event in events.decode().split("\n\n")[:-2]]
            return "".join(each["choices"][0]["text"] for each in texts)

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client(number)) for number in range(count)]
            await spin(lambda: len(begun) == count, 4 * WAIT_S)
            assert set(begun) == {200}
            assert bench.gauge("worker_streams") == bench.gauge("in_flight_requests") == count
            worker.go.set()
        assert {task.result() for task in clients} == {expected_text(5, 4)}
        await bench.idle()
