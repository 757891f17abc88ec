"""A worker's reaction to failures of a peer, a reader, the engine, or the caller's input."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import pytest_asyncio

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import Internal, ResourceExhausted
from pinyon.core.request import SamplingParams
from pinyon.messages.orders import hello_to_proto
from pinyon.messages.segment import segment_from_proto
from pinyon.model import load_card
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.transfer import Opcode, Reason, TransferEngine, TransferRequest, TransferStatus
from services.worker.report import WorkerReport
from services.worker.servicer import WorkerServicer
from tests.integration.worker_parts import (
    BLOCK_TOKENS,
    PROMPT,
    SHORT,
    WAIT_S,
    Answer,
    ended,
    gauge,
    reference,
    submission,
    worker_process,
)

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


# -- the prefill instance


async def test_a_prefill_instance_that_breaks_off_is_named(fleet):
    p, d, client = await fleet.serving()
    answer = await client.held(p, PROMPT, SHORT, prefill=p, decode=d)
    await p.server.drain(0)
    await answer.wait()
    error = answer.last.error
    assert (error.code, error.field) == ("UNAVAILABLE", "prefill_instance")
    assert "p0" in error.message


class FakePrefill(worker_pb2_grpc.WorkerServiceServicer):
    """A prefill instance that does what the test says."""

    def __init__(self, on_start=lambda start: None, on_cancel=lambda stream_id: None) -> None:
        self.on_start, self.on_cancel = on_start, on_cancel
        self.hello = None
        self.context = None
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def say(self, result):
        await self._answer(self.context, result)

    async def PrefillSession(self, _, context):
        self.context = context
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("hello"):
                self.hello = message.hello
            for stream_id in message.cancel_stream_ids:
                self.cancelled.set()
                await self._answer(context, self.on_cancel(stream_id))
            for start in message.starts:
                self.start = start
                self.started.set()
                await self._answer(context, self.on_start(start))

    async def _answer(self, context, result):
        if result is not None:
            await context.write(worker_pb2.PrefillSessionResponse(results=[result]))


@pytest_asyncio.fixture
async def fake_server():
    servers = []

    async def start(servicer: FakePrefill) -> str:
        server = GrpcServer("127.0.0.1:0")
        server.add(servicer, worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])
        servers.append(server)
        return await server.start()

    yield start
    for server in servers:
        await server.drain(0)


def at(address: str, decode, prompt=PROMPT, name="fake"):
    prefill = SimpleNamespace(served=SimpleNamespace(instance_id=name), address=address)
    return submission(prompt, SHORT, prefill=prefill, decode=decode)


def late_writer(fake: FakePrefill, engine: TransferEngine, opcode=Opcode.WRITE, shift=0):
    """Writes to the first target block, as a peer would that was too slow."""
    source = engine.register_local_memory(bytearray(64))
    segment = segment_from_proto(fake.hello.segment)
    assert not segment.regions
    offset = fake.start.target_offsets_bytes[0] + shift
    request = TransferRequest(opcode, source.key, 0, segment, fake.start.target_region.key, offset, 64)
    return engine.transfer_async([request])


async def test_a_peer_that_ignores_cancels_loses_its_key(fleet, fake_server):
    fake = FakePrefill()
    address = await fake_server(fake)
    d, client = await fleet.decode(settle_s=0.05)
    (answer,) = await client.submit(at(address, d))
    await fake.started.wait()
    with TransferEngine() as engine:
        assert (await late_writer(fake, engine))[0].status is TransferStatus.COMPLETED
        await client.cancel(answer)
        await answer.wait()
        await fake.cancelled.wait()
        await fleet.idle()  # blocks are free only when the key is revoked
        assert (await late_writer(fake, engine))[0].status is TransferStatus.REFUSED


async def test_a_prefills_key_opens_only_its_targets_only_for_writing(fleet, fake_server):
    fake = FakePrefill(on_cancel=lambda number: worker_pb2.PrefillResult(stream_id=number))
    d, client = await fleet.decode()
    (answer,) = await client.submit(at(await fake_server(fake), d))
    await fake.started.wait()
    size, targets = d.served.layout.block_bytes, sorted(fake.start.target_offsets_bytes)
    with TransferEngine() as engine:
        assert (await late_writer(fake, engine))[0].ok
        assert (await late_writer(fake, engine, Opcode.READ))[0].reason is Reason.ACCESS_DENIED
        first = fake.start.target_offsets_bytes[0]
        others = set(range(0, d.served.pool_blocks * size, size)) - set(targets)
        assert others
        # All at once: a decode instance waits for a silent prefill instance for a limited time.
        outcomes = await asyncio.gather(*(late_writer(fake, engine, shift=offset - first) for offset in others))
        assert {outcome[0].reason for outcome in outcomes} == {Reason.OUT_OF_RANGE}
        await client.cancel(answer)
        await answer.wait()
        await fleet.idle()
        assert (await late_writer(fake, engine))[0].reason is Reason.UNKNOWN_REGION
    assert d.transfer.stats().grants_now == 0


@pytest.mark.parametrize("well", [True, False])
async def test_a_prefill_cannot_write_after_its_end(fleet, fake_server, well):
    """The blocks then serve other readers, or are reused: late bytes would cause wrong tokens."""
    with TransferEngine() as engine:
        fake = FakePrefill()
        d, client = await fleet.decode()
        (answer,) = await client.submit(at(await fake_server(fake), d))
        await fake.started.wait()
        assert (await late_writer(fake, engine))[0].ok
        error = common_pb2.Error(code="UNAVAILABLE", message="lost")
        end = worker_pb2.PrefillResult(stream_id=fake.start.stream_id, first_token=5, error=None if well else error)
        d.engine.hold()  # keeps the request, and its blocks, alive
        await fake.say(end)
        if well:
            await d.engine.entered()
            assert gauge(d, "used_blocks") > 0
        else:
            await answer.wait()
            assert answer.last.error.code == "UNAVAILABLE"
        late = await late_writer(fake, engine)
        d.engine.release()
        assert late[0].reason is Reason.UNKNOWN_REGION
        await answer.wait()
        await fleet.idle()


async def test_a_token_outside_the_vocabulary_is_refused(fleet, fake_server):
    fake = FakePrefill(lambda start: worker_pb2.PrefillResult(stream_id=start.stream_id, first_token=10**6))
    d, client = await fleet.decode()
    (answer,) = await client.submit(at(await fake_server(fake), d))
    await answer.wait()
    assert answer.last.error.code == "INTERNAL"
    await fleet.idle()
    assert gauge(d, "cached_blocks") == 0


async def test_an_address_where_nobody_is(fleet):
    d, client = await fleet.decode()
    (answer,) = await client.submit(at("127.0.0.1:1", d))
    await answer.wait()
    assert (answer.last.error.code, answer.last.error.field) == ("UNAVAILABLE", "prefill_instance")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_prefill_process_that_is_killed_or_frozen(fleet, sign):
    arguments = ("--role", "prefill", "--instance-id", "other", "--block-tokens", str(BLOCK_TOKENS))
    async with worker_process(*arguments) as (process, address):
        # This worker serves the same built-in model as the process.
        d, client = await fleet.decode(engine="instant", card=load_card())
        (answer,) = await client.submit(at(address, d, name="other"))
        await answer.wait()
        assert answer.finish == "length"
        process.send_signal(sign)
        (answer,) = await client.submit(at(address, d, PROMPT[::-1], "other"))
        await answer.wait()
        assert (answer.last.error.code, answer.last.error.field) == ("UNAVAILABLE", "prefill_instance")
        await fleet.idle()  # although the other process is still there, frozen


# -- the load balancer


class StuckContext:
    """A stream whose other side sends one message and takes none."""

    def __init__(self, message) -> None:
        self._messages = [message]

    async def read(self):
        if self._messages:
            return self._messages.pop()
        await asyncio.Event().wait()

    async def write(self, message):
        await asyncio.Event().wait()


@pytest.mark.parametrize("limit", [{"outbox_tokens": 5}, {"write_timeout_s": 0.05}], ids=["tokens", "time"])
async def test_a_reader_that_is_too_slow_is_cut_off(fleet, limit):
    m = await fleet.start("mixed", "m0", **limit)
    message = submission(PROMPT, LONG, stream_id=1)
    with pytest.raises(ResourceExhausted):
        await m.sessions.run(StuckContext(worker_pb2.SessionRequest(submissions=[message])))
    await fleet.idle()
    assert gauge(m, "cut_sessions_total") == 1
    assert gauge(m, "lb_sessions") == 0


async def test_a_client_that_takes_nothing_is_cut_off(fleet):
    m = await fleet.start("mixed", "m0", write_timeout_s=0.05)
    servicer = WorkerServicer(m.parts, m.prefills, m.sessions, m.load)
    request = worker_pb2.GenerateRequest(submission=submission(PROMPT, LONG))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ResourceExhausted):
            await servicer.Generate(request, StuckContext(None))


async def test_tokens_of_one_step_travel_in_one_message(fleet):
    m, client = await fleet.mixed()
    m.engine.hold()
    answers = await client.submit(*(submission([40 + n, 50, 60], LONG) for n in range(4)))
    await m.engine.entered()
    m.engine.release()
    await ended(answers)
    tokens = sum(len(answer.tokens) for answer in answers)
    decode_steps = sum(decodes > 0 for _, decodes in m.engine.steps)
    assert tokens == 4 * 40
    assert len(client.messages) <= decode_steps + len(answers) + 1
    assert max(len(message.updates) for message in client.messages) == 4


async def test_closing_the_sending_side_still_gives_the_answers(fleet):
    _, client = await fleet.mixed()
    (answer,) = await client.submit(submission(PROMPT, SHORT))
    await client.call.done_writing()
    assert (await answer.wait()).tokens == reference(PROMPT, SHORT)
    await asyncio.wait_for(asyncio.shield(client._reader), WAIT_S)
    assert await client.call.code() is grpc.StatusCode.OK


# -- the engine


async def test_a_failing_step_fails_only_the_guilty(fleet):
    m, client = await fleet.mixed()
    bad = [99] * 20

    def fail(prefills, decodes):
        if any(99 in chunk.tokens for chunk in prefills):
            return Internal("the model computed a logit that is not finite")
        return None

    m.engine.fail = fail
    m.engine.hold()
    answers = await client.submit(
        submission(PROMPT, SHORT), submission(bad, SHORT), submission(list(reversed(PROMPT)), SHORT)
    )
    await m.engine.entered()
    m.engine.release()
    await ended(answers)
    assert answers[0].tokens == reference(PROMPT, SHORT)
    assert answers[2].tokens == reference(list(reversed(PROMPT)), SHORT)
    assert answers[1].last.error.code == "INTERNAL"
    m.engine.fail = lambda prefills, decodes: RuntimeError("secret") if decodes else None
    answer = await client.answer(PROMPT, SHORT)
    assert answer.last.error.code == "INTERNAL"
    assert "secret" not in answer.last.error.message
    m.engine.fail = lambda prefills, decodes: None
    assert (await client.answer(PROMPT, SHORT)).tokens == reference(PROMPT, SHORT)


# -- input


BAD = [
    ({"prompt_tokens_le32": b""}, "INVALID_ARGUMENT", "prompt_tokens_le32"),
    ({"prompt_tokens_le32": b"\x01\0\0"}, "INVALID_ARGUMENT", "prompt_tokens_le32"),
    ({"prompt_tokens_le32": np.array([10**6], "<u4").tobytes()}, "INVALID_ARGUMENT", "prompt_tokens_le32"),
    ({"block_keys": b"x" * 15}, "INVALID_ARGUMENT", "block_keys"),
    ({"block_keys": b"x" * 16}, "INVALID_ARGUMENT", "block_keys"),
    ({"model": "nobody"}, "NOT_FOUND", "model"),
    ({"model_fingerprint": "of other weights"}, "FAILED_PRECONDITION", "model_fingerprint"),
    ({"request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id"),
    ({"request_class": common_pb2.RequestClass(tenant="x" * 129)}, "INVALID_ARGUMENT", "request_class.tenant"),
    ({"generated_tokens": 4}, "INVALID_ARGUMENT", "generated_tokens"),
    ({"generated_tokens": 1000}, "INVALID_ARGUMENT", "generated_tokens"),
    ({"request_class": common_pb2.RequestClass(turn=1 << 30)}, "INVALID_ARGUMENT", "request_class.turn"),
    ({"request_class": common_pb2.RequestClass(user="\x1b[2J")}, "INVALID_ARGUMENT", "request_class.user"),
    ({"sampling": common_pb2.SamplingParams()}, "INVALID_ARGUMENT", "max_tokens"),
    ({"sampling": common_pb2.SamplingParams(max_tokens=1, temperature=3)}, "INVALID_ARGUMENT", "temperature"),
    (
        {"sampling": common_pb2.SamplingParams(max_tokens=1, temperature=float("nan"))},
        "INVALID_ARGUMENT",
        "temperature",
    ),
    ({"sampling": common_pb2.SamplingParams(max_tokens=1, top_p=2)}, "INVALID_ARGUMENT", "top_p"),
    ({"sampling": common_pb2.SamplingParams(max_tokens=1, stop=[""])}, "INVALID_ARGUMENT", "stop"),
    ({"sampling": common_pb2.SamplingParams(max_tokens=600)}, "INVALID_ARGUMENT", "max_tokens"),
    ({"placement": common_pb2.Placement(decode_instance_id="x")}, "FAILED_PRECONDITION", "placement"),
    ({"placement": common_pb2.Placement(decode_instance_id="m0")}, "INVALID_ARGUMENT", "placement"),
    (
        {
            "placement": common_pb2.Placement(
                decode_instance_id="m0",
                prefill_instance_id="m0",
                fetches=[common_pb2.FetchSpan(first_block=9, block_count=1)],
            )
        },
        "INVALID_ARGUMENT",
        "fetches",
    ),
]


async def test_bad_input_ends_its_own_stream_only(fleet):
    m, client = await fleet.mixed()
    m.engine.hold()
    (good,) = await client.submit(submission(PROMPT, SHORT))
    messages = []
    for change, _, _ in BAD:
        message = submission(PROMPT, SHORT)
        for field in change:
            message.ClearField(field)
        message.MergeFrom(worker_pb2.Submission(**change))
        messages.append(message)
    answers = await client.submit(*messages)
    for (change, code, field), answer in zip(BAD, answers, strict=True):
        await answer.wait()
        assert (answer.last.error.code, answer.last.error.field) == (code, field), change
    m.engine.release()
    assert (await good.wait()).tokens == reference(PROMPT, SHORT)


async def test_a_stream_id_in_use_is_refused_and_the_stream_lives_on(fleet):
    m, client = await fleet.mixed()
    good = await client.held(m, PROMPT, SHORT)
    bad = await client.answer(PROMPT, SHORT, stream_id=1)
    assert (bad.last.error.code, bad.last.error.field) == ("INVALID_ARGUMENT", "stream_id")
    client.answers[1] = good
    m.engine.release()
    assert (await good.wait()).tokens == reference(PROMPT, SHORT)


async def test_a_refusal_is_not_merged_with_what_the_stream_says(fleet):
    m, client = await fleet.mixed()
    good = await client.held(m, PROMPT, SHORT)
    (session,) = m.sessions._open
    session.updates.update(1).text = "said"
    session._take(worker_pb2.SessionRequest(submissions=[submission(PROMPT, SHORT, stream_id=1)]))
    session.updates.update(1).text += " before"
    told = [(each.text, each.error.field) for each in session.updates._message.updates]
    assert told == [("said before", ""), ("", "stream_id")]
    client.answers[1] = bad = Answer()
    await bad.wait()
    client.answers[1] = good
    m.engine.release()
    assert (await good.wait()).tokens == reference(PROMPT, SHORT)


@pytest.mark.parametrize("change", ["layout", "model_fingerprint", "segment", None])
async def test_a_hello_that_does_not_fit(fleet, change):
    p = await fleet.start("prefill", "p0")
    d = await fleet.start("decode", "d0")
    hello = hello_to_proto(d.served, d.transfer.descriptor())
    if change is not None:
        hello.ClearField(change)
    async with grpc.aio.insecure_channel(p.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).PrefillSession()
        await call.write(worker_pb2.PrefillSessionRequest(hello=hello))
        if change is None:
            start = worker_pb2.PrefillStart(
                stream_id=5, prompt_tokens_le32=b"\x21\0\0\0", sampling=common_pb2.SamplingParams(max_tokens=1)
            )

            async def refused() -> tuple[int, str]:
                await call.write(worker_pb2.PrefillSessionRequest(starts=[start]))
                (result,) = (await call.read()).results
                return result.stream_id, result.error.field

            assert await refused() == (5, "target_offsets_bytes")
            start.target_offsets_bytes.append(2**40)
            assert await refused() == (5, "target_region")
            start.target_region.CopyFrom(common_pb2.Region(key=bytes(16), location="cpu:0", length_bytes=2**40))
            assert await refused() == (5, "target_offsets_bytes")
        else:
            assert await call.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
            assert change in await call.details()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_roles_refuse_what_they_do_not_do(fleet, role):
    worker = await fleet.start(role, "w0")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(worker_pb2.GenerateRequest(submission=submission(PROMPT, SHORT))):
                pass
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        if role == "decode":
            call = stub.PrefillSession()
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION


# -- operators, and the end


async def test_generate_and_status_by_themselves(fleet):
    m = await fleet.start("mixed", "m0")
    async with grpc.aio.insecure_channel(m.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        tokens = []
        async for reply in stub.Generate(worker_pb2.GenerateRequest(submission=submission(PROMPT, SHORT))):
            tokens += reply.update.tokens
        assert tokens == reference(PROMPT, SHORT)
        status = await stub.GetStatus(worker_pb2.GetStatusRequest())
        assert (status.instance_id, status.total_blocks, status.used_blocks) == ("m0", 128, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(worker_pb2.GenerateRequest(submission=submission([], SHORT))):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "prompt_tokens_le32" in caught.value.details()
        m.engine.hold()
        call = stub.Generate(worker_pb2.GenerateRequest(submission=submission(PROMPT, LONG)))
        reading = asyncio.ensure_future(call.read())
        await m.engine.entered()
        call.cancel()
        await asyncio.wait((reading,))


async def test_draining_finishes_what_is_here_and_takes_nothing_new(fleet):
    p, d, client = await fleet.serving()
    answer = await client.held(d, PROMPT, LONG, prefill=p, decode=d)
    stopping = asyncio.ensure_future(d.stop(WAIT_S))
    await asyncio.sleep(0)
    late = await client.answer(PROMPT, SHORT, prefill=p, decode=d)
    assert (late.last.error.code, late.last.error.field) == ("UNAVAILABLE", "decode_instance")
    d.engine.release()
    assert (await answer.wait()).tokens == reference(PROMPT, LONG)
    await stopping
    assert d.parts.cache.pool.used == 0
    fleet.workers.remove(d)


def told(report: WorkerReport) -> tuple[list[str], list[str], list[str]]:
    """Returns the requests that began to decode, and those whose prefill and decode ended."""
    news = report.news()
    return [*news.begun_decode_request_ids], [*news.ended_prefill_request_ids], [*news.ended_decode_request_ids]


async def test_reports_name_the_requests_that_came_and_that_ended(fleet):
    p, d, client = await fleet.serving()
    report = d.reports
    answer = await client.held(d, PROMPT, SHORT, prefill=p, decode=d, request_id="taken")
    refused = await client.answer(PROMPT, SHORT, request_id="refused")
    assert refused.finish == "error"
    assert told(report) == (["taken"], [], [])
    assert report.decoding() == ["taken"]
    d.engine.release()
    await answer.wait()
    await fleet.idle()
    assert told(report) == ([], [], ["taken"])
    assert report.decoding() == []
