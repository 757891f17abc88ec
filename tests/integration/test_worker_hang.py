"""An engine step that does not end: who is told, what happens to the requests, and what happens when it ends."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.block_keys import tokens_to_bytes
from pinyon.core.request import SamplingParams
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.lb.app import Lb
from services.lb.settings import LbSettings
from tests.integration.worker_parts import PROMPT, SHORT, WAIT_S, Gate, gauge, reference, submission

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
HANG = {"step_timeout_s": 2.0}


class Health:
    """The health service's states as a probe sees them."""

    def __init__(self, worker) -> None:
        self._channel = grpc.aio.insecure_channel(worker.address)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest())

    async def becomes(self, status: str) -> None:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if health_pb2.HealthCheckResponse.ServingStatus.Name(message.status) == status:
                return
        raise AssertionError("the watch ended")

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_an_engine_that_hangs_fails_requests_then_serves_again(fleet, caplog, phase):
    m, client = await fleet.mixed(**HANG)
    health = Health(m)
    await health.becomes("SERVING")
    # At the first step, or the first with decodes: a later one may be over before the test hears of the one before.
    gate = Gate(lambda decodes: bool(decodes) == (phase == "decode"), m.engine)
    (answer,) = await client.submit(submission(PROMPT, LONG))
    await gate.reached()
    with caplog.at_level(logging.ERROR):
        await answer.wait()
        await health.becomes("NOT_SERVING")
    assert (answer.last.error.code, answer.last.error.field) == ("UNAVAILABLE", "decode_instance")
    assert answer.tokens == reference(PROMPT, LONG)[: len(answer.tokens)]
    assert any("in step" in record.stacks for record in caplog.records if hasattr(record, "stacks"))
    assert gauge(m, "used_blocks") > 0, "the step may still write to them"
    assert gauge(m, "engine_hangs") == 1
    assert m.load().draining
    refused = await client.answer(PROMPT, SHORT)
    assert (refused.last.error.code, refused.last.error.field) == ("UNAVAILABLE", "decode_instance")
    gate.open()
    await health.becomes("SERVING")
    assert not m.load().draining
    assert (await client.answer(PROMPT, LONG)).tokens == reference(PROMPT, LONG)
    await health.close()


async def test_a_hanging_prefill_instance_tells_the_decode_instance(fleet):
    p = await fleet.start("prefill", "p0", **HANG)
    other = await fleet.start("prefill", "p1")
    d, client = await fleet.decode()
    answer = await client.held(p, PROMPT, SHORT, prefill=p, decode=d)
    await answer.wait()
    assert (answer.last.error.code, answer.last.error.field) == ("UNAVAILABLE", "prefill_instance")
    assert gauge(p, "used_blocks") > 0, "the step may still write to them"
    refused = await client.answer(PROMPT, SHORT, prefill=p, decode=d)
    assert (refused.last.error.code, refused.last.error.field) == ("UNAVAILABLE", "prefill_instance")
    assert await d.decodes.drained(WAIT_S)
    assert gauge(d, "used_blocks") == 0, "nobody writes there: the prefill instance said so while its step hung"
    assert (await client.answer(PROMPT, SHORT, prefill=other, decode=d)).tokens == reference(PROMPT, SHORT)
    p.engine.release()
    await p.parts.engine_loop.step_over()
    assert (await client.answer(PROMPT, SHORT, prefill=p, decode=d)).tokens == reference(PROMPT, SHORT)


async def test_a_step_that_hangs_does_not_keep_the_process(fleet):
    m, client = await fleet.mixed(**HANG)
    answer = await client.held(m, PROMPT, SHORT)
    await answer.wait()
    fleet.workers.remove(m)
    await m.stop(60.0)
    assert m.parts.cache.pool.used == 0
    m.engine.release()


async def test_status_tells_people(fleet):
    m, client = await fleet.mixed(**HANG)
    m.engine.hold()
    await client.answer(PROMPT, SHORT)
    async with grpc.aio.insecure_channel(m.address) as channel:
        status = await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest())
    assert status.draining
    m.engine.release()
    await m.parts.engine_loop.step_over()
    assert not m.load().draining


async def test_the_conductor_places_nothing_on_an_engine_that_hangs(fleet):
    conductor = await fleet.start_conductor()
    m = await fleet.start("mixed", "m0", conductor=conductor, **HANG)
    await fleet.known("m0", lambda state: state.schedulable)
    client = await fleet.client(m)
    m.engine.hold()
    (answer,) = await client.submit(submission(PROMPT, SHORT))
    await fleet.known("m0", lambda state: not state.schedulable)
    await answer.wait()
    m.engine.release()
    await fleet.known("m0", lambda state: state.schedulable)
    assert (await client.answer(PROMPT, SHORT)).tokens == reference(PROMPT, SHORT)


async def test_a_request_of_a_hung_engine_goes_on_elsewhere_exactly(fleet):
    """Load balancer, conductor and two workers are all real."""
    conductor = await fleet.start_conductor()
    workers = [await fleet.start("mixed", name, conductor=conductor, **HANG) for name in ("m0", "m1")]
    for name in ("m0", "m1"):
        await fleet.known(name, lambda state: state.schedulable)
    settings = LbSettings(conductor=conductor, listen="127.0.0.1:0", http_listen="127.0.0.1:0", metrics_listen="")
    lb = Lb(settings, ServiceContext("lb", "lb0", Telemetry("lb", "lb0"), CollectorRegistry(), asyncio.Event()))
    address = (await lb.start())["grpc"]
    gate = Gate(
        lambda decodes: any(slot.position >= len(PROMPT) + 5 for slot in decodes),
        *(worker.engine for worker in workers),
    )
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            request = lb_pb2.GenerateRequest(
                prompt_tokens_le32=tokens_to_bytes(PROMPT),
                sampling=common_pb2.SamplingParams(max_tokens=40, ignore_eos=True),
            )
            tokens: list[int] = []
            async for reply in lb_pb2_grpc.LbServiceStub(channel).Generate(request):
                tokens += reply.tokens
        assert tokens == reference(PROMPT, LONG)
        hung = [worker.parts.engine_loop.hangs for worker in workers]
        assert sorted(hung) == [False, True], "the request did not wait for its end"
    finally:
        gate.open()
        await lb.close(0)
