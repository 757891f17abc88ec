"""Prompts computed at one server and decoded at another, and streams that go on where their server is gone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.frontdoor.servers import instance_servers
from pinyon.messages.plan import open_plan
from tests.integration.lb_harness import MODEL, spin
from tests.integration.servers_parts import SECRET, ServerInstance, ServersBench, running_servers, tokens_of
from tests.integration.upstream_parts import DONE, DROP, STALL, Asked, Wire, answers, says, streams

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LONG, SHORT = "a long prompt of many words " * 40, "hi"
PROMPT, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(prompt: Any = LONG, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}).encode()


def plan_of(body: bytes) -> Any:
    return open_plan(json.loads(body)["kv_transfer_params"]["pinyon"], SECRET)


def apart(**prefill: Any) -> list[ServerInstance]:
    return [ServerInstance("p", role=PREFILL, **prefill), ServerInstance("d", role=DECODE)]


async def busy(server: ServerInstance) -> None:
    """Makes the instance report that it decodes, so that a long prompt would keep others waiting there."""
    load = conductor_pb2.InstanceLoad(running_requests=8, mean_batch=8, mean_tbt_ms=1, mean_kv_tokens=800)
    await server.reporter.report(stored=(1,), load=load)


# ---------------------------------------------------------------- prefill and decode apart


async def test_a_long_prompt_is_computed_at_the_prefill_server() -> None:
    servers = p, d = apart()
    async with running_servers(*servers) as bench:
        await busy(d)
        assert (await bench.post(PROMPT, ask(priority=3, cache_salt="s"))).status == 200
        (first,), (then,) = p.bodies, d.bodies
        sent = json.loads(first)
        assert sent["prompt"] == tokens_of({"prompt": LONG})
        assert (sent["max_tokens"], sent["priority"], sent["model"]) == (1, 3, MODEL)
        assert sent["cache_salt"] == json.loads(then)["cache_salt"]
        plans = [plan_of(first), plan_of(then)]
        assert plans[0].request_id == plans[1].request_id
        for plan in plans:
            assert (plan.placement.prefill_instance_id, plan.placement.decode_instance_id) == ("p", "d")
        assert plans[1].placement.prefill_address == p.reporter.info.address
        await bench.idle()


async def test_a_short_prompt_stays_whole() -> None:
    servers = p, d = apart()
    async with running_servers(*servers) as bench:
        await busy(d)
        assert (await bench.post(PROMPT, ask(SHORT))).status == 200
        assert not p.bodies
        assert plan_of(d.bodies[0]).placement.prefill_instance_id == "d"


async def test_where_nothing_is_decoded_a_long_prompt_stays_whole() -> None:
    servers = p, _ = apart()
    async with running_servers(*servers) as bench:
        assert (await bench.post(PROMPT, ask())).status == 200
        assert not p.bodies


@pytest.mark.parametrize("answer", [answers(status=500), answers(status=429), answers(status=400), says(DROP)])
async def test_a_prefill_that_fails_is_computed_at_decode(answer: Any) -> None:
    servers = p, d = apart(answer=answer)
    async with running_servers(*servers) as bench:
        await busy(d)
        assert (await bench.post(PROMPT, ask())).status == 200
        assert len(p.bodies) == 1
        placement = plan_of(d.bodies[0]).placement
        assert (placement.prefill_instance_id, placement.ask_store, len(placement.fetches)) == ("d", True, 0)
        await bench.idle()


async def test_a_prefill_that_hangs_is_computed_at_decode() -> None:
    servers = p, d = apart(answer=says(STALL))
    async with running_servers(*servers, upstream_first_byte_s=0.2) as bench:
        await busy(d)
        assert (await bench.post(PROMPT, ask(stream=True))).status == 200
        assert (len(p.bodies), len(d.bodies)) == (1, 1)
        await bench.idle()


async def test_a_prefill_that_lends_nothing_hands_over_by_the_store() -> None:
    servers = _, d = apart(keeps_to_itself=True)
    async with running_servers(*servers) as bench:
        await busy(d)
        assert (await bench.post(PROMPT, ask())).status == 200
        placement = plan_of(d.bodies[0]).placement
        assert (placement.prefill_instance_id, placement.prefill_address) == ("p", "")


async def test_a_client_that_leaves_ends_the_prefill() -> None:
    servers = p, d = apart(answer=says(STALL))
    async with running_servers(*servers) as bench:
        await busy(d)
        call = asyncio.create_task(bench.post(PROMPT, ask()))
        await spin(lambda: bool(p.bodies))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await bench.idle()
        assert not d.bodies


# ---------------------------------------------------------------- streams that outlive their server


def event(head: str, **choice: Any) -> bytes:
    said = {"id": head, "object": "text_completion", "created": 1, "model": MODEL}
    return f"data: {json.dumps({**said, 'choices': [{'index': 0, 'finish_reason': None, **choice}]})}\n\n".encode()


def begins(*steps: Any) -> Any:
    first = {"token_ids": [7], "prompt_token_ids": [1, 2, 3]}
    return streams(event("a", text="one ", **first), event("a", text="two ", token_ids=[8]), *steps)


GOES_ON = streams(event("b", text="three", token_ids=[9], finish_reason="length", prompt_token_ids=[1]), DONE)
GREEDY = {"stream": True, "temperature": 0}


def texts(body: bytes) -> list[str]:
    return [json.loads(each[6:])["choices"][0]["text"] for each in body.decode().split("\n\n") if '"text"' in each]


async def broken(bench: ServersBench, **fields: Any) -> bytes:
    reply = await bench.post(PROMPT, ask(**fields))
    assert reply.status == 200
    await bench.idle()
    return reply.body


@pytest.mark.parametrize(
    "end", [DROP, b'data: {"error":{"message":"dead"}}\n\n', event("a", text="", finish_reason="abort")]
)
async def test_a_greedy_stream_goes_on_at_another_server(end: Any) -> None:
    servers = ServerInstance("i0", answer=begins(end)), ServerInstance("i1", answer=GOES_ON)
    async with running_servers(*servers) as bench:
        await servers[0].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=0))
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        body = await broken(bench, **GREEDY, stop_token_ids=[5])
        assert texts(body) == ["one ", "two ", "three"]
        assert body.endswith(DONE)
        assert b"token_ids" not in body
        assert body.count(b'"id":"a"') + body.count(b'"id": "a"') == 3
        (sent,) = (json.loads(each) for each in servers[1].bodies)
        assert sent["prompt"] == [1, 2, 3, 7, 8]
        assert (sent["max_tokens"], sent["return_token_ids"], sent["stop_token_ids"]) == (2, True, [5])
        assert plan_of(servers[1].bodies[0]).placement.decode_instance_id == "i1"
        assert bench.gauge("resumes_total") == 1


@pytest.mark.parametrize("fields", [{"temperature": 0.7}, {"n": 2}, {"logprobs": 1}], ids=str)
async def test_a_stream_that_is_not_exact_ends_with_an_error(fields: dict[str, Any]) -> None:
    servers = ServerInstance("i0", answer=begins(DROP)), ServerInstance("i1", answer=begins(DROP))
    async with running_servers(*servers) as bench:
        body = await broken(bench, **GREEDY | fields)
        assert len(texts(body)) == 2
        assert b'"error"' in body
        assert sum(len(each.bodies) for each in servers) == 1


async def test_only_the_same_weights_go_on_with_a_stream() -> None:
    other = ServerInstance("i1", answer=GOES_ON, model_fingerprint="others")
    servers = ServerInstance("i0", answer=begins(DROP)), other
    async with running_servers(*servers, placement_wait_s=0.3) as bench:
        await other.reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        body = await broken(bench, **GREEDY)
        assert b'"error"' in body
        assert not other.bodies


@pytest.mark.parametrize("answer", [answers(status=503), answers(status=400), says(DROP), answers()], ids=range(4))
async def test_who_will_not_go_on_with_a_stream_ends_it_clearly(answer: Any) -> None:
    servers = ServerInstance("i0", answer=begins(DROP)), ServerInstance("i1", answer=answer)
    async with running_servers(*servers, placement_wait_s=0.3) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        body = await broken(bench, **GREEDY)
        assert texts(body) == ["one ", "two "]
        assert b'"error"' in body
        assert body.endswith(DONE)


@pytest.mark.parametrize(("says_tokens", "path"), [("one ", PROMPT), ("one <", CHAT)])
async def test_a_chat_goes_on_by_tokens_that_say_what_was_told(says_tokens: str, path: str) -> None:
    first = event("a", delta={"content": "one "}, token_ids=[7], prompt_token_ids=[1, 2])
    again = event("b", delta={"role": "assistant", "content": "one "}, token_ids=[7])
    by_chat = streams(again, event("b", delta={"content": "two"}, token_ids=[8], finish_reason="stop"), DONE)
    by_tokens = streams(event("b", text="two", token_ids=[8], finish_reason="stop"), DONE)

    async def goes_on(asked: Asked, wire: Wire) -> None:
        if asked.target == "/detokenize":
            assert asked.json["tokens"] == [7]
            await wire.whole(json.dumps({"prompt": says_tokens}).encode())
        else:
            await (by_chat if asked.target == CHAT else by_tokens)(asked, wire)

    servers = ServerInstance("i0", answer=streams(first, DROP)), ServerInstance("i1", answer=goes_on)
    async with running_servers(*servers) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        reply = await bench.chat(max_tokens=9, **GREEDY)
        chunks = [json.loads(each[6:]) for each in reply.body.decode().split("\n\n") if each.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [{"content": "one "}, {"content": "two"}]
        assert [asked.target for asked in servers[1].requests] == ["/detokenize", path]
        await bench.idle()


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_whose_answer_has_ended_is_ended_here(usage: bool) -> None:
    last = event("a", text="end", token_ids=[9], finish_reason="stop")
    servers = ServerInstance("i0", answer=begins(last, DROP)), ServerInstance("i1", answer=begins(last, DROP))
    async with running_servers(*servers) as bench:
        body = await broken(bench, **GREEDY, stream_options={"include_usage": usage})
        assert texts(body) == ["one ", "two ", "end"]
        assert body.endswith(DONE)
        assert (b'"completion_tokens":3' in body) is usage
        assert sum(len(each.bodies) for each in servers) == 1
        assert bench.gauge("requests_total", finish="answered", model=MODEL) == 1


async def test_a_silent_stream_of_an_instance_that_is_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_servers, "SILENT_S", 0.1)
    servers = ServerInstance("i0", answer=begins(STALL)), ServerInstance("i1", answer=GOES_ON)
    servers[0].health = 503
    async with running_servers(*servers) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        call = asyncio.create_task(broken(bench, **GREEDY))
        (known,) = [each for each in bench.lb.servers if each.info.instance_id == "i0"]
        await spin(lambda: any(each.passing and each.passing.events == 2 for each in known.answers))
        await servers[0].reporter.call.write(conductor_pb2.ReportSessionRequest(leaving=True))
        assert texts(await call) == ["one ", "two ", "three"]
        assert not known.answers


@pytest.mark.parametrize("fields", [{}, {"stream": True, "temperature": 1}], ids=["whole", "sampled"])
async def test_an_answer_that_a_gone_server_owes_is_asked_for_again(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_servers, "SILENT_S", 0.1)
    servers = ServerInstance("i0", answer=says(STALL)), ServerInstance("i1")
    servers[0].health = 503
    async with running_servers(*servers) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        call = asyncio.create_task(bench.post(PROMPT, ask(**fields)))
        await spin(lambda: bool(servers[0].bodies))
        await servers[0].reporter.call.write(conductor_pb2.ReportSessionRequest(leaving=True))
        assert (await call).status == 200
        assert len(servers[1].bodies) == 1
        await bench.idle()


async def test_a_gone_instance_whose_server_is_well_ends_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_servers, "SILENT_S", 0.02)
    go = asyncio.Event()
    ends = begins(go, event("a", text="end", finish_reason="stop"), DONE)
    servers = ServerInstance("i0", answer=ends), ServerInstance("i1")
    async with running_servers(*servers) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        call = asyncio.create_task(broken(bench, **GREEDY))
        await spin(lambda: bool(servers[0].bodies))
        await servers[0].reporter.call.write(conductor_pb2.ReportSessionRequest(leaving=True))
        await spin(lambda: servers[0].health_asked >= 3)
        go.set()
        assert texts(await call) == ["one ", "two ", "end"]
        assert not servers[1].bodies


@pytest.mark.parametrize(
    "answer",
    [
        answers(b'{"choices":[{"text":"","finish_reason":"abort"}]}'),
        streams(b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n', DONE),
        streams(b'data: {"error":{"message":"dead","code":500}}\n\n', DONE),
        streams(DONE),
    ],
    ids=["whole", "stream", "error", "nothing"],
)
async def test_an_answer_that_is_given_up_is_asked_for_elsewhere(answer: Any) -> None:
    servers = ServerInstance("i0", answer=answer), ServerInstance("i1")
    async with running_servers(*servers) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        reply = await bench.post(PROMPT, ask(**GREEDY))
        assert reply.status == 200
        assert b"error" not in reply.body
        assert [len(each.bodies) for each in servers] == [1, 1]
        await bench.idle()


async def test_a_sampled_stream_that_is_given_up_ends_with_an_error() -> None:
    go = asyncio.Event()
    end = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
    async with running_servers(ServerInstance("i0", answer=streams(event("a", text="one"), go, end, DONE))) as bench:
        call = asyncio.create_task(broken(bench, stream=True, temperature=1))
        (known,) = bench.lb.servers
        await spin(lambda: any(each.passing and each.passing.events for each in known.answers))
        go.set()
        body = await call
        assert texts(body) == ["one"]
        assert b'"error"' in body


async def test_a_server_that_failed_earlier_may_go_on_later() -> None:
    again = event("b", text="three ", token_ids=[9], prompt_token_ids=[1])
    turns = [begins(DROP), GOES_ON]

    async def twice(asked: Asked, wire: Wire) -> None:
        await turns.pop(0)(asked, wire)

    servers = ServerInstance("i0", answer=twice), ServerInstance("i1", answer=streams(again, DROP))
    async with running_servers(*servers) as bench:
        await servers[1].reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9))
        body = await broken(bench, **GREEDY, max_tokens=9)
        assert texts(body) == ["one ", "two ", "three ", "three"]


async def test_a_server_that_has_started_again_may_go_on() -> None:
    turns = [begins(DROP), GOES_ON]

    async def twice(asked: Asked, wire: Wire) -> None:
        await turns.pop(0)(asked, wire)

    server = ServerInstance("i0", answer=twice)
    async with running_servers(server) as bench:
        call = asyncio.create_task(broken(bench, **GREEDY))
        await spin(lambda: len(turns) == 1)
        server.reporter.info.boot_id = "another"
        await server.reporter.connect()
        assert texts(await call) == ["one ", "two ", "three"]


async def test_prompts_by_their_text_go_to_no_prefill_server() -> None:
    servers = p, d = apart()
    async with running_servers(*servers) as bench:
        for number in range(4):
            said = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": f"{number} {LONG}"}]}
            assert (await bench.post("/v1/messages", json.dumps(said).encode())).status == 200
        assert (len(p.bodies), len(d.bodies)) == (0, 4)
        (cluster,) = bench.lb.clusters
        assert cluster.servable(MODEL, 0.0, 1, set())


async def test_a_stream_goes_on_more_than_once() -> None:
    again = event("b", text="three ", token_ids=[9], prompt_token_ids=[1])
    servers = [ServerInstance("i0", answer=begins(DROP)), ServerInstance("i1", answer=streams(again, DROP))]
    servers.append(ServerInstance("i2", answer=GOES_ON))
    async with running_servers(*servers) as bench:
        for number, server in enumerate(servers):
            await server.reporter.report(stored=(1,), load=conductor_pb2.InstanceLoad(running_requests=9 * number))
        body = await broken(bench, **GREEDY, max_tokens=9)
        assert texts(body) == ["one ", "two ", "three ", "three"]
        assert json.loads(servers[2].bodies[0])["prompt"] == [1, 2, 3, 7, 8, 9]
