"""The HTTP front door as clients see it: OpenAI's formats, the official client, errors, limits."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import pytest
from xxhash import xxh3_128_hexdigest

from pinyon.api.common.v1 import common_pb2
from tests.integration.lb_harness import MODEL, WAIT_S, Connection, expected_text, running_lb, spin


async def test_a_completion_has_openai_s_shape():
    async with running_lb() as bench:
        reply = await bench.complete("hello", max_tokens=4, temperature=0)
        body = reply.json
        assert reply.status == 200
        assert re.fullmatch(r"cmpl-[0-9a-f]{20}", body.pop("id"))
        assert body.pop("created") > 1_700_000_000
        assert body == {
            "object": "text_completion",
            "model": MODEL,
            "choices": [{"index": 0, "text": expected_text(5, 4), "logprobs": None, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 4,
                "total_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 5},
            },
        }
        assert reply.headers["content-type"] == "application/json"
        assert "date" in reply.headers
        await bench.idle()


async def test_a_streamed_chat_has_openai_s_events():
    async with running_lb() as bench:
        bench.workers[0].per_update = 2
        messages = [{"role": "user", "content": "hi"}]
        reply = await bench.post(
            "/v1/chat/completions",
            {"model": MODEL, "messages": messages, "max_tokens": 3, "stream": True,
             "stream_options": {"include_usage": True}},
        )  # fmt: skip
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in reply.events[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert re.fullmatch(r"chatcmpl-[0-9a-f]{20}", chunks[0]["id"])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        # BOS, role, two bytes, end of turn, assistant
        assert "".join(delta.get("content", "") for delta in deltas) == expected_text(6, 3)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] == 9
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_the_official_client_works():
    import openai  # here, as importing it takes half a second in every worker that collects this file

    async with running_lb() as bench:
        client = openai.AsyncOpenAI(base_url=f"http://{bench.http}/v1", api_key="unused", max_retries=0, timeout=WAIT_S)
        async with client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).object == "model"
            whole = await client.completions.create(model=MODEL, prompt="jay", max_tokens=6)
            assert whole.choices[0].text == expected_text(3, 6)
            stream = await client.completions.create(
                model=MODEL, prompt="jay", max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
            assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
            assert parts[-1].usage == whole.usage
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "pines"}], "max_completion_tokens": 5}
            chat = await client.chat.completions.create(**ask)
            stream = await client.chat.completions.create(**ask, stream=True)
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
            assert chat.choices[0].message.role == "assistant"
            assert chat.usage.prompt_tokens_details.cached_tokens > 0
            with pytest.raises(openai.NotFoundError) as caught:
                await client.completions.create(model="nobody", prompt="a")
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model=MODEL, prompt="a", n=17)
            assert refused.value.param == "n"
        await bench.idle()


async def test_what_a_submission_carries():
    async with running_lb() as bench:
        headers = {"x-pinyon-no-reuse": "1", "x-pinyon-ttft-slo-ms": "250", "x-request-id": "abc-1"}
        headers["traceparent"] = f"00-{'a' * 32}-{'b' * 16}-01"
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -1, "stop": ["x"], "ignore_eos": True}
        reply = await bench.complete("p" * 100, headers, max_tokens=2, **fields)
        assert reply.headers["x-request-id"] == "abc-1"
        asked, sent = bench.conductor.requests[0], bench.workers[0].submissions[0]
        assert asked.request_id == sent.request_id
        assert asked.request_id.startswith("abc-1.")
        assert (asked.no_reuse, asked.ttft_slo_ms, asked.prompt_tokens) == (True, 250, 100)
        assert asked.request_class == sent.request_class
        assert asked.request_class.tenant == "public"
        assert len(asked.block_keys) == 16 * 3
        assert sent.block_keys == asked.block_keys
        assert sent.prompt_tokens_le32 == b"p\0\0\0" * 100
        assert sent.traceparent == asked.traceparent == headers["traceparent"]
        assert 0 < sent.timeout_ms <= 600_000
        sampling = sent.sampling
        assert (sampling.top_k, sampling.seed, list(sampling.stop), sampling.ignore_eos) == (7, 2**64 - 1, ["x"], True)
        # Without a seed, two sampled requests differ; invalid ids are replaced.
        for _ in range(2):
            reply = await bench.complete("p", {"x-request-id": "spaces are bad"}, max_tokens=1)
            assert "spaces" not in reply.headers["x-request-id"]
        assert bench.workers[0].submissions[1].sampling.seed != bench.workers[0].submissions[2].sampling.seed


async def test_the_report_comes_only_when_asked_for():
    async with running_lb() as bench:
        assert "pinyon" not in (await bench.complete(max_tokens=1)).json
        asked = {"x-pinyon-report": "1"}
        report = (await bench.complete(headers=asked, max_tokens=1)).json["pinyon"]
        assert report["prefill_instance"] == "w0"
        assert report["computed_tokens"] == 5
        events = (await bench.complete(headers=asked, max_tokens=1, stream=True)).events
        assert json.loads(events[-2])["pinyon"]["attempts"] == 1


async def test_api_keys_make_tenants(tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-a": "anna", "sk-b": "bert"}))
    async with running_lb(api_keys_file=str(keys)) as bench:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sk-a"}):
            reply = await bench.complete("x" * 40, headers, max_tokens=1)
            assert reply.status == 401
            assert reply.json["error"]["code"] == "invalid_api_key"
        assert (await bench.get("/v1/models")).status == 401
        assert (await bench.get("/health")).status == 200
        for key in ("sk-a", "sk-b"):
            assert (await bench.complete("x" * 40, {"authorization": f"Bearer {key}"}, max_tokens=1)).status == 200
        first, second = bench.conductor.requests
        assert (first.request_class.tenant, second.request_class.tenant) == ("anna", "bert")
        assert first.block_keys != second.block_keys  # tenants never share KV


async def test_a_class_travels_with_its_request(tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-a": {"tenant": "anna", "priority": 5, "geographies": ["eu-west", "eu-north"]}}))
    headers = {"authorization": "Bearer sk-a", "x-session-id": "s1", "x-pinyon-geographies": "eu-north"}
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "user": "bert"}
    async with running_lb(api_keys_file=str(keys)) as bench:
        assert (await bench.post("/v1/chat/completions", body, headers)).status == 200
        asked, sent = bench.conductor.requests[0].request_class, bench.workers[0].submissions[0].request_class
        assert asked == sent
        assert sent.arrived_unix_s > 1.7e9
        sent.arrived_unix_s = 0
        assert sent == common_pb2.RequestClass(
            kind="chat",
            turn=2,
            session=xxh3_128_hexdigest(b"s1"),
            user="bert",
            priority=5,
            tenant="anna",
            geographies=["eu-north"],
        )
        wider = await bench.post("/v1/chat/completions", body, headers | {"x-pinyon-geographies": "us-east"})
        assert (wider.status, wider.json["error"]["param"]) == (400, "x-pinyon-geographies")


BAD_REQUESTS = [
    ("POST", "/v1/completions", b"{", {}, 400, None),
    ("POST", "/v1/completions", b"[1]", {}, 400, None),
    ("POST", "/v1/completions", b'{"model":"\xff"}', {}, 400, None),
    ("POST", "/v1/completions", b"", {}, 400, None),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny"}', {}, 400, "prompt"),
    ("POST", "/v1/completions", b'{"prompt":"a"}', {}, 400, "model"),
    ("POST", "/v1/completions", b'{"model":"nobody","prompt":"a"}', {}, 404, "model"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":""}', {}, 400, "prompt"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":"a","logit_bias":{"272":1}}', {}, 400, "logit_bias"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":"a","stop_token_ids":[272]}', {}, 400,
     "stop_token_ids"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":"a","min_tokens":17}', {}, 400, "min_tokens"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[{"role":"user","content":"a"}],'
     b'"chat_template_kwargs":{"enable_thinking":false}}', {}, 400, "chat_template_kwargs"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[{"role":"user","content":"a"}],'
     b'"reasoning_effort":"high"}', {}, 400, "reasoning_effort"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[{"role":"user","content":"a"}],'
     b'"reasoning_effort":"none","chat_template_kwargs":{"reasoning_effort":"low"}}', {}, 400, "reasoning_effort"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[{"role":"user","content":"a","name":"jay"}]}',
     {}, 400, "messages"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[{"role":"user","content":[{"type":"text",'
     b'"text":"a","language":"en"}]}]}', {}, 400, "messages"),
    ("POST", "/tokenize", b'{"prompt":"a","messages":[]}', {}, 400, "messages"),
    ("POST", "/tokenize", b"{}", {}, 400, "prompt"),
    ("POST", "/tokenize", b'{"model":"nobody","prompt":"a"}', {}, 404, "model"),
    ("POST", "/detokenize", b'{"tokens":[272]}', {}, 400, "tokens"),
    ("POST", "/detokenize", b'{"tokens":"a"}', {}, 400, "tokens"),
    ("OPTIONS", "/v1/completions", None, {"origin": "https://a.example"}, 405, None),
    ("POST", "/v1/completions", b"x", {"content-encoding": "br"}, 415, None),
    ("POST", "/v1/completions", b"x", {"content-encoding": "gzip, gzip"}, 415, None),
    ("POST", "/v1/completions", b"\0" * 40, {"content-encoding": "gzip"}, 400, None),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":[300]}', {}, 400, "prompt"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":"a","max_tokens":true}', {}, 400, "max_tokens"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":"a","max_tokens":5000}', {}, 400, "max_tokens"),
    ("POST", "/v1/completions", b'{"model":"pinyon-tiny","prompt":"a"}', {"x-pinyon-ttft-slo-ms": "-1"}, 400,
     "x-pinyon-ttft-slo-ms"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[]}', {}, 400, "messages"),
    ("POST", "/v1/chat/completions", b'{"model":"pinyon-tiny","messages":[{"role":"elf","content":"a"}]}', {}, 400,
     "messages"),
    ("GET", "/v1/completions", None, {}, 405, None),
    ("POST", "/v1/models", b"{}", {}, 405, None),
    ("GET", "/nowhere", None, {}, 404, None),
    ("GET", "/v1/models/nobody", None, {}, 404, "model"),
]  # fmt: skip


async def test_bad_requests_are_openai_errors():
    async with running_lb() as bench:
        for method, path, body, headers, status, param in BAD_REQUESTS:
            async with Connection(bench.http) as connection:
                connection.send(method, path, body, headers)
                reply = await connection.reply()
                assert (reply.status, reply.json["error"]["param"]) == (status, param), (method, path, body, reply)
                assert set(reply.json["error"]) == {"message", "type", "param", "code"}
                # The connection still works.
                connection.send("GET", "/health")
                assert (await connection.reply()).status == 200
        cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []}
        body = {"model": "pinyon-tiny", "messages": [{"role": "user", "content": [cached]}], "max_tokens": 1}
        assert (await bench.post("/v1/chat/completions", body)).status == 200
        bench.workers[0].submissions.clear()
        too_long = await bench.complete("x" * 4096, max_tokens=1)
        assert (too_long.status, too_long.json["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 4096 tokens" in too_long.json["error"]["message"]
        assert too_long.json["error"]["message"].endswith("Shorten the prompt.")
        too_much = await bench.complete("x" * 4000, max_tokens=97)
        assert (too_much.status, too_much.json["error"]["code"]) == (400, "context_length_exceeded")
        assert too_much.json["error"]["message"].endswith("ask for at most 96.")
        assert (await bench.complete("x" * 4000, max_tokens=96)).status == 200
        bench.workers[0].submissions.clear()
        assert not bench.workers[0].submissions
        await bench.idle()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/responses", "The Responses API is not served here: there are /v1/chat/completions and /v1/completions."),
        ("/v1/embeddings", "Making embeddings is not served here: there are "),
        ("/v1/audio/speech", "Speech is not served here: there are "),
        ("/chat/completions", "It is /v1/chat/completions: a client's base URL ends with /v1."),
    ],
)
async def test_paths_that_are_not_served_say_what_is(path: str, said: str):
    async with running_lb() as bench:
        reply = await bench.post(path, {"model": "pinyon-tiny"})
        error = reply.json["error"]
        assert (reply.status, error["type"], error["param"], error["code"]) == (
            404,
            "invalid_request_error",
            None,
            None,
        )
        assert error["message"].startswith(f"Invalid URL (POST {path}). {said}")


async def test_bodies_over_the_limit_are_refused():
    async with running_lb(body_limit_bytes=2048) as bench:
        large = b'{"model":"pinyon-tiny","prompt":"' + b"x" * 4000 + b'"}'
        cases = [
            (large, {}),
            (b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large), {"transfer-encoding": "chunked"}),
            (b"", {"content-length": "99999999999"}),
            (b"", {"content-length": "4000", "expect": "100-continue"}),
        ]
        for body, headers in cases:
            reply = await bench.post("/v1/completions", body, headers)
            assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")
        chunked = b'{"model":"pinyon-tiny","prompt":"abc","max_tokens":2}'
        reply = await bench.post(
            "/v1/completions", b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunked), chunked), {"transfer-encoding": "chunked"}
        )
        assert reply.json["choices"][0]["text"] == expected_text(3, 2)


async def test_what_is_not_http_gets_an_error_object():
    async with running_lb(head_limit_bytes=2048, body_timeout_s=0.2) as bench:
        async with Connection(bench.http) as connection:
            connection.writer.write(b"NOT HTTP AT ALL\r\n\r\n")
            assert (await connection.reply()).status == 400
        assert (await bench.get("/health", {f"x-{n}": "y" * 100 for n in range(30)})).status == 431
        for unfinished in (b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: lb\r\ncontent-length: 100\r\n\r\n{"):
            async with Connection(bench.http) as connection:
                connection.writer.write(unfinished)
                assert (await connection.reply()).status == 408
                assert await connection.reader.read() == b""
        async with Connection(bench.http) as connection:  # sends nothing at all
            assert (await asyncio.wait_for(connection.reader.read(), WAIT_S)) == b""
        await bench.idle()


async def test_the_tail_of_a_stream_is_not_held_back():
    async with running_lb() as bench, Connection(bench.http) as connection:
        connection.send("GET", "/health")
        await connection.reply()
        (served,) = bench.lb.http._shared.connections
        option = served._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert option


async def test_health_and_metrics():
    async with running_lb(workers=1) as bench:
        assert (await bench.get("/health")).json == {"status": "ok"}
        assert (await bench.get("/health/ready")).status == 200
        await bench.complete(max_tokens=3)
        text = (await bench.get("/metrics")).body.decode()
        assert 'pinyon_lb_http_requests_total{route="completions",status="200"} 1.0' in text
        assert 'pinyon_lb_generated_tokens_total{model="pinyon-tiny"} 3.0' in text
        assert 'pinyon_lb_cached_tokens_total{model="pinyon-tiny"} 5.0' in text
        assert "pinyon_lb_conductor_connected 1.0" in text
        bench.conductor.push([])
        await spin(lambda: not bench.lb.view.addresses)
        assert (await bench.get("/health/ready")).status == 503


async def test_tokens_count_before_their_request_has_ended():
    async with running_lb() as bench:
        worker = bench.workers[0].hold(2)
        running = asyncio.ensure_future(bench.complete(max_tokens=6))
        await spin(lambda: bench.gauge("unfinished_tokens") == 2)
        assert bench.gauge("generated_tokens_total", model=MODEL) == 0
        worker.go.set()
        assert (await running).status == 200
        await bench.idle()
        assert bench.gauge("unfinished_tokens") == 0
        assert bench.gauge("generated_tokens_total", model=MODEL) == 6


async def test_time_between_tokens_is_of_requests_with_several():
    async with running_lb() as bench:
        for count in (1, 4):
            assert (await bench.complete(max_tokens=count)).status == 200
        await bench.idle()
        assert bench.gauge("ttft_seconds_count", model=MODEL) == 2
        assert bench.gauge("tbt_seconds_count", model=MODEL) == 1
        assert bench.gauge("tbt_seconds_sum", model=MODEL) <= bench.gauge("e2e_seconds_sum", model=MODEL)


async def test_a_rejection_is_429_with_a_hint():
    async with running_lb() as bench:
        bench.conductor.error = common_pb2.Error(code="RESOURCE_EXHAUSTED", message="no room", retry_after_ms=7000)
        reply = await bench.complete(max_tokens=1, stream=True)
        assert (reply.status, reply.headers["retry-after"]) == (429, "7")
        assert reply.json["error"]["type"] == "rate_limit_error"
        await bench.idle()
