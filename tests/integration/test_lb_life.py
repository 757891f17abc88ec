"""Requests with disturbances: disconnects in every phase, instances that die, no conductor, full queues."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.messages.logprobs import logprobs_from_proto
from tests.integration.lb_harness import (
    MODEL,
    WAIT_S,
    Connection,
    ask,
    expected_logprobs,
    expected_text,
    running_lb,
    spin,
    tokens,
)

# ---------------------------------------------------------------- clients that go away


async def test_a_client_that_leaves_the_queue():
    async with running_lb(in_flight_limit=1) as bench:
        bench.workers[0].hold()
        async with Connection(bench.http) as first, Connection(bench.http) as second:
            first.send("POST", "/v1/completions", ask("first", max_tokens=2))
            await bench.workers[0].until(lambda: bench.workers[0].open)
            second.send("POST", "/v1/completions", ask("second", max_tokens=2))
            await spin(lambda: bench.gauge("queue_requests") == 1)
            second.drop()
            await spin(lambda: bench.gauge("queue_requests") == 0)
            bench.workers[0].go.set()
            assert (await first.reply()).status == 200
        await bench.idle()
        assert len(bench.workers[0].submissions) == 1


async def test_a_client_that_leaves_while_being_placed():
    async with running_lb(conductor_timeout_s=30) as bench:
        bench.conductor.silent = True
        async with bench.asking(max_tokens=2) as connection:
            await bench.conductor.until(lambda: bench.conductor.requests)
            connection.drop()
            await bench.idle()
        assert not bench.workers[0].submissions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_client_that_leaves_an_instance(stream, after):
    async with running_lb() as bench:
        worker = bench.workers[0].hold(after)
        async with bench.asking(max_tokens=10, stream=stream) as connection:
            await worker.until(lambda: worker.open)
            if stream and after:
                await connection.head()
                await connection.chunk()
            connection.drop()
            await bench.idle()
        await worker.until(lambda: worker.cancelled == [1])
        await bench.conductor.until(lambda: bench.conductor.released)
        assert bench.registry.get_sample_value("pinyon_lb_requests_total", {"finish": "cancelled", "model": MODEL}) == 1


@pytest.mark.parametrize("limits", [{"unread_tokens": 1000}, {"write_stall_s": 0.2}], ids=["too-much", "too-long"])
async def test_a_client_that_does_not_read_is_cut(limits):
    """The kernel buffers less than these 8 MB. The instance is not held up, and others are served meanwhile."""
    async with running_lb(**limits) as bench:
        worker = bench.workers[0]
        worker.padding = "x" * 2000
        async with Connection(bench.http) as connection:
            connection.writer.transport.pause_reading()
            connection.send("POST", "/v1/completions", ask(max_tokens=4000, stream=True))
            await worker.until(lambda: worker.submissions)
            assert (await bench.complete("other", max_tokens=3)).status == 200
            if "unread_tokens" in limits:
                await worker.until(lambda: worker.cancelled == [1])
                assert bench.gauge("worker_streams") == 0
            else:
                await bench.idle()


# ---------------------------------------------------------------- instances that disappear


@pytest.mark.parametrize("die_at", [0, 1, 7, 19])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_survives_its_instance(die_at, stream):
    async with running_lb() as bench:
        first, second = bench.workers
        first.die_at = die_at
        reply = await bench.complete("resume me", max_tokens=20, stream=stream)
        if stream:
            events = [json.loads(event) for event in reply.events[:-1]]
            text = "".join(event["choices"][0]["text"] for event in events)
        else:
            text = reply.json["choices"][0]["text"]
            assert reply.json["usage"]["completion_tokens"] == 20
            assert reply.json["usage"]["prompt_tokens"] == 9
        assert text == expected_text(9, 20)
        resumed = second.submissions[0]
        assert resumed.generated_tokens == die_at
        assert resumed.prompt_tokens_le32 == tokens("resume me" + expected_text(9, die_at))
        assert list(bench.conductor.requests[1].exclude_instance_ids) == ["w0"]
        assert bench.conductor.requests[1].request_id != bench.conductor.requests[0].request_id
        await bench.conductor.until(lambda: bench.conductor.requests[0].request_id in bench.conductor.released)
        await bench.idle()
        assert bench.registry.get_sample_value("pinyon_lb_retries_total") == 1


async def test_a_prefill_instance_that_failed_is_the_one_excluded():
    async with running_lb(workers=3) as bench:
        decode, prefill, _ = bench.workers
        bench.conductor.prefill = prefill
        decode.error = common_pb2.Error(code="UNAVAILABLE", message="prefill died", field="prefill_instance")
        failed = asyncio.ensure_future(bench.complete(max_tokens=2))
        await bench.conductor.until(lambda: len(bench.conductor.requests) >= 2)
        assert list(bench.conductor.requests[1].exclude_instance_ids) == ["w1"]
        # The fake then computes the prompt itself and reports this failure again, so it is passed over too.
        assert (await failed).status == 200
        assert list(bench.conductor.requests[2].exclude_instance_ids) == ["w0", "w1"]
        await bench.idle()


async def test_when_every_instance_fails_it_is_503_in_time():
    async with running_lb(placement_wait_s=0.3) as bench:
        for worker in bench.workers:
            worker.die_at = 0
        reply = await bench.complete(max_tokens=2)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        for worker in bench.workers:
            worker.die_at = 2
        reply = await bench.complete("stream", max_tokens=5, stream=True)
        assert reply.status == 200  # the answer had begun
        assert json.loads(reply.events[-2])["error"]["code"] == "unavailable"
        assert reply.events[-1] == "[DONE]"
        assert bench.gauge("http_requests_total", route="completions", status="200") == 1, "as its client saw it"
        assert bench.gauge("http_requests_total", route="completions", status="503") == 1, "the other one"
        assert bench.gauge("http_broken_streams_total", error="unavailable") == 1
        await bench.idle()


async def test_an_instance_that_is_not_there_is_passed_over():
    async with running_lb() as bench:
        await bench.workers[0].stop()
        assert (await bench.complete(max_tokens=2)).json["choices"][0]["text"] == expected_text(5, 2)
        assert len(bench.workers[1].submissions) == 1
        await bench.idle()


async def test_a_worker_s_refusal_reaches_the_client():
    async with running_lb() as bench:
        bench.workers[0].error = common_pb2.Error(code="RESOURCE_EXHAUSTED", message="full", retry_after_ms=2500)
        reply = await bench.complete(max_tokens=2)
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        bench.workers[0].error = common_pb2.Error(code="INTERNAL", message="broken")
        assert (await bench.complete(max_tokens=2)).status == 500
        await bench.idle()


@pytest.mark.parametrize("field", ["decode_instance", "prefill_instance"])
@pytest.mark.parametrize("conductor", [True, False])
async def test_a_full_instance_is_passed_over_while_another_has_room(field, conductor):
    full = common_pb2.Error(code="RESOURCE_EXHAUSTED", message="full", field=field, retry_after_ms=2500)
    async with running_lb() as bench:
        if not conductor:
            await bench.lose_conductor()
        bench.workers[0].error = full
        for _ in range(3):
            assert (await bench.complete(max_tokens=2)).json["choices"][0]["text"] == expected_text(5, 2)
        if conductor:
            assert len(bench.workers[0].submissions) == 3, "it is full, not broken: it is asked again"
        bench.workers[1].error = full
        reply = await bench.complete(max_tokens=2)
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        bench.workers[0].error = bench.workers[1].error = None
        assert (await bench.complete(max_tokens=2)).status == 200
        await bench.idle()


# ---------------------------------------------------------------- no conductor


async def test_serving_goes_on_without_the_conductor_until_it_is_back():
    async with running_lb() as bench:
        port = int(bench.conductor.address.rpartition(":")[2])
        await bench.lose_conductor()
        for _ in range(4):
            assert (await bench.complete(max_tokens=2)).status == 200
        placement = bench.workers[0].submissions[0].placement
        assert placement.policy == "lb_skywalker"
        assert placement.ask_store, "nobody has planned fetches"
        assert bench.registry.get_sample_value("pinyon_lb_fallback_placements_total") == 4
        await bench.conductor.start(port)
        await bench.connected()
        await bench.complete(max_tokens=2)
        assert len(bench.conductor.requests) == 1
        assert [each.placement.ask_store for each in bench.workers[0].submissions][-1:] == [False]
        assert bench.lb.conductor.sessions == 2
        await bench.idle()


async def test_without_the_conductor_prompts_go_where_it_sent_them():
    prompts = {0: "Once upon a time there was a king. " * 4, 1: "It is a truth universally acknowledged. " * 4}
    async with running_lb() as bench:
        for number, prompt in prompts.items():
            bench.conductor.workers = [bench.workers[number], bench.workers[1 - number]]
            assert (await bench.complete(prompt, max_tokens=2)).status == 200
        await bench.lose_conductor()
        for number, prompt in prompts.items():
            assert (await bench.complete(prompt + "And then?", max_tokens=2)).status == 200
            again = bench.workers[number].submissions[1]
            assert again.placement.policy == "lb_skywalker"
        await bench.idle()


async def test_a_silent_conductor_costs_one_timeout():
    async with running_lb(conductor_timeout_s=0.1) as bench:
        bench.conductor.silent = True
        assert (await bench.complete(max_tokens=2)).status == 200
        assert bench.workers[0].submissions[0].placement.policy == "lb_skywalker"
        await bench.idle()


async def test_an_answer_that_comes_too_late_is_given_back():
    async with running_lb(conductor_timeout_s=30) as bench:
        bench.conductor.late.clear()
        async with bench.asking(max_tokens=2) as connection:
            await bench.conductor.until(lambda: bench.conductor.requests)
            connection.drop()
            await bench.idle()
        bench.conductor.late.set()
        await bench.conductor.until(lambda: bench.conductor.released)
        assert bench.conductor.released == [bench.conductor.requests[0].request_id]
        assert not bench.workers[0].submissions


async def test_requests_in_flight_outlive_the_conductor():
    async with running_lb() as bench:
        worker = bench.workers[0]
        running = await bench.held(max_tokens=6, after=2)
        await bench.conductor.stop()
        worker.go.set()
        assert (await running).json["choices"][0]["text"] == expected_text(5, 6)
        await bench.idle()


async def test_without_any_instance_it_is_503():
    async with running_lb(conductor=False, placement_wait_s=0.1) as bench:
        assert (await bench.complete(max_tokens=2)).status == 503
        assert (await bench.get("/health/ready")).status == 503
        await bench.idle()


async def test_a_request_waits_for_an_instance_to_come():
    # Known instances are soon forgotten.
    async with running_lb(instances_grace_s=0.05, placement_wait_s=WAIT_S) as bench:
        here = bench.conductor.workers
        bench.conductor.push([])
        await spin(lambda: not bench.lb.view.addresses)
        waiting = asyncio.ensure_future(bench.complete(max_tokens=2))
        await bench.conductor.until(lambda: bench.conductor.requests)
        bench.conductor.push(here)
        assert (await waiting).status == 200
        assert len(bench.conductor.requests) == 2, "asked again when there was one"
        await bench.idle()


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_504(stream):
    async with running_lb(request_timeout_s=1.5) as bench:
        worker = bench.workers[0].hold()
        reply = await bench.complete(max_tokens=5, stream=stream)
        assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
        labels = {"finish": "deadline_exceeded", "model": MODEL}
        assert bench.registry.get_sample_value("pinyon_lb_requests_total", labels) == 1
        await bench.idle()
        # On a very busy machine the time was over before the request got there, so there is nothing to cancel.
        await worker.until(lambda: worker.cancelled or not worker.submissions)


# ---------------------------------------------------------------- shutdown


async def test_closing_lets_requests_finish():
    async with running_lb() as bench:
        worker = bench.workers[0].hold()
        async with Connection(bench.http) as connection, Connection(bench.http) as idle:
            idle.send("GET", "/health")
            await idle.reply()
            connection.send("POST", "/v1/completions", ask(max_tokens=3))
            await worker.until(lambda: worker.open)
            closing = asyncio.ensure_future(bench.lb.close(WAIT_S))
            assert await idle.reader.read() == b""
            worker.go.set()
            reply = await connection.reply()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            await closing
        assert not bench.leftovers()


async def test_closing_ends_what_does_not_finish():
    async with running_lb() as bench:
        bench.workers[0].hold()
        async with bench.asking(max_tokens=3) as connection:
            await bench.workers[0].until(lambda: bench.workers[0].open)
            await bench.lb.close(0)
            reply = await connection.reply()
            assert (reply.status, reply.json["error"]["code"]) == (503, "unavailable")
        assert not bench.leftovers()


# ---------------------------------------------------------------- gRPC


def stub(channel) -> lb_pb2_grpc.LbServiceStub:
    return lb_pb2_grpc.LbServiceStub(channel)


async def test_grpc_generates():
    async with running_lb() as bench, grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
        models = (await stub(channel).ListModels(lb_pb2.ListModelsRequest())).models
        assert [(model.name, model.max_context_tokens) for model in models] == [(MODEL, 4096)]
        inputs = [
            (lb_pb2.GenerateRequest(prompt="jay"), 3),
            (lb_pb2.GenerateRequest(prompt_tokens_le32=tokens("pine")), 4),
            (lb_pb2.GenerateRequest(model=MODEL, conversation=lb_pb2.Conversation(
                messages=[lb_pb2.ChatMessage(role="user", content="hi")])), 6),
        ]  # fmt: skip
        for request, length in inputs:
            request.sampling.max_tokens = 5
            replies = [reply async for reply in stub(channel).Generate(request)]
            assert "".join(reply.text for reply in replies) == expected_text(length, 5)
            assert "".join(chr(token) for reply in replies for token in reply.tokens) == expected_text(length, 5)
            assert replies[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert replies[-1].usage.prompt_tokens == length
            assert len({reply.request_id for reply in replies}) == 1
        assert bench.workers[0].submissions[0].sampling.temperature == 0
        await bench.idle()


@pytest.mark.parametrize("die_at", [-1, 3])
async def test_grpc_tells_log_probabilities_also_after_a_failover(die_at):
    async with running_lb(workers=2) as bench, grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
        bench.workers[0].die_at = die_at
        sampling = common_pb2.SamplingParams
        request = lb_pb2.GenerateRequest(
            prompt="pine", sampling=sampling(max_tokens=6, logprobs=2, prompt_logprobs=True)
        )
        replies = [reply async for reply in stub(channel).Generate(request)]
        assert len(bench.workers[1].submissions) == (die_at > 0)
        generated = [token for reply in replies for token in reply.tokens]
        assert generated == list(expected_text(4, 6).encode())
        told = [one for reply in replies for one in logprobs_from_proto(reply.logprobs)]
        assert told == expected_logprobs(generated, 2)
        assert [reply.HasField("prompt_logprobs") for reply in replies] == [True] + [False] * (len(replies) - 1)
        assert logprobs_from_proto(replies[0].prompt_logprobs) == expected_logprobs(b"ine", 2)
        (plain,) = [reply async for reply in stub(channel).Generate(
            lb_pb2.GenerateRequest(prompt="pine", sampling=sampling(max_tokens=1)))]  # fmt: skip
        assert not plain.HasField("logprobs")
        assert not plain.HasField("prompt_logprobs")
        await bench.idle()


async def test_grpc_errors_name_the_field(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# keys\nsk-a anna geographies=eu-west\n")
    metadata = (("authorization", "Bearer sk-a"),)
    code = grpc.StatusCode
    async with (
        running_lb(api_keys_file=str(keys)) as bench,
        grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel,
    ):
        params, labels = common_pb2.SamplingParams, lb_pb2.RequestLabels
        cases = [
            (lb_pb2.GenerateRequest(), code.INVALID_ARGUMENT, "input"),
            (lb_pb2.GenerateRequest(prompt=""), code.INVALID_ARGUMENT, "prompt"),
            (lb_pb2.GenerateRequest(prompt="x" * 5000), code.INVALID_ARGUMENT, "prompt"),
            (lb_pb2.GenerateRequest(prompt_tokens_le32=b"abc"), code.INVALID_ARGUMENT, "prompt_tokens_le32"),
            (lb_pb2.GenerateRequest(prompt_tokens_le32=b"\xff" * 4), code.INVALID_ARGUMENT, "prompt_tokens_le32"),
            (lb_pb2.GenerateRequest(conversation=lb_pb2.Conversation()), code.INVALID_ARGUMENT, "conversation"),
            (lb_pb2.GenerateRequest(prompt="a", sampling=params(temperature=-1)), code.INVALID_ARGUMENT,
             "sampling.temperature"),
            (lb_pb2.GenerateRequest(prompt="a", sampling=params(max_tokens=9999)), code.INVALID_ARGUMENT,
             "sampling.max_tokens"),
            (lb_pb2.GenerateRequest(prompt="a", labels=labels(kind="a b")), code.INVALID_ARGUMENT, "labels.kind"),
            (lb_pb2.GenerateRequest(prompt="a", labels=labels(turn=1 << 30)), code.INVALID_ARGUMENT, "labels.turn"),
            (lb_pb2.GenerateRequest(prompt="a", labels=labels(priority=1001)), code.INVALID_ARGUMENT,
             "labels.priority"),
            (lb_pb2.GenerateRequest(prompt="a", labels=labels(session="x" * 257)), code.INVALID_ARGUMENT,
             "labels.session"),
            (lb_pb2.GenerateRequest(prompt="a", labels=labels(geographies=["us"])), code.INVALID_ARGUMENT,
             "labels.geographies"),
            (lb_pb2.GenerateRequest(prompt="a", model="nobody"), code.NOT_FOUND, "model"),
        ]  # fmt: skip
        for request, status, field in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(channel).Generate(request, metadata=metadata).read()
            assert (caught.value.code(), caught.value.details().split(": ")[0]) == (status, field), request
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).Generate(lb_pb2.GenerateRequest(prompt="a")).read()
        assert caught.value.code() is code.UNAUTHENTICATED
        await bench.idle()


async def test_grpc_labels():
    async with running_lb() as bench, grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
        labels = lb_pb2.RequestLabels(kind="file", turn=4, session="s", user="u", priority=0, geographies=["eu-west"])
        request = lb_pb2.GenerateRequest(prompt="a", labels=labels)
        await read_all(stub(channel).Generate(request))
        sent = bench.workers[0].submissions[0].request_class
        assert sent == bench.conductor.requests[0].request_class
        assert sent.arrived_unix_s > 1.7e9
        sent.arrived_unix_s = 0
        assert sent == common_pb2.RequestClass(
            kind="file", turn=4, session="s", user="u", tenant="public", geographies=["eu-west"]
        )


async def read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_grpc_clients_that_leave(how):
    async with running_lb() as bench, grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
        worker = bench.workers[0].hold(2)
        request = lb_pb2.GenerateRequest(prompt="jay", sampling=common_pb2.SamplingParams(max_tokens=9))
        call = stub(channel).Generate(request, timeout=5 if how == "deadline" else None)
        await call.read()
        if how == "cancel":
            call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await bench.idle()
        await worker.until(lambda: worker.cancelled)


@pytest.mark.parametrize(("code", "status"), [("INVALID_ARGUMENT", 400), ("INTERNAL", 500)])
async def test_what_no_waiting_mends_is_told_at_once(code, status):
    async with running_lb(placement_wait_s=600.0) as bench:
        bench.conductor.error = common_pb2.Error(code=code, message="too large for every instance", field="max_tokens")
        reply = await bench.complete(max_tokens=5)
        assert (reply.status, len(bench.conductor.requests)) == (status, 1)
        assert "too large for every instance" in reply.json["error"]["message"] or status == 500
