"""Instances with an OpenAI-compatible server of their own: where requests go, what servers get, what clients see."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc, peer_pb2, peer_pb2_grpc
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import salt_of
from pinyon.core.layout import UNKNOWN_PACKING
from pinyon.messages.plan import open_plan
from pinyon.routing.target import Report
from pinyon.routing.two_layers import RoutingChoice, Where
from tests.integration.lb_harness import MODEL, WAIT_S, FakeWorker, spin, tokens
from tests.integration.servers_parts import SECRET, ServerInstance, keys_of, root_of, running_servers, tokens_of
from tests.integration.upstream_parts import DONE, DROP, after, answers, says, streams
from tests.on_compiled import REPLACES_METHODS

LONG = "A prompt of several blocks, which one of the instances holds already, so that it should go there."


def ask(prompt: Any = LONG, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}).encode()


def plan_of(body: bytes) -> Any:
    return open_plan(json.loads(body)["kv_transfer_params"]["pinyon"], SECRET)


# ---------------------------------------------------------------- where requests go


@pytest.mark.parametrize("holder", [0, 1, 2])
async def test_a_prompt_goes_to_the_instance_that_holds_it(holder: int) -> None:
    servers = [ServerInstance(f"i{n}") for n in range(3)]
    async with running_servers(*servers) as bench:
        await bench.holds(servers[holder], keys_of(LONG))
        for _ in range(3):
            assert (await bench.post("/v1/completions", ask())).status == 200
        assert [len(each.bodies) for each in servers] == [3 * (n == holder) for n in range(3)]
        assert bench.world.metric("placements_total", outcome="placed") == 3
        assert (await bench.post("/v1/completions", ask("short"))).status == 200
        assert bench.world.metric("placements_total", outcome="placed") == 4
        await bench.idle()


async def test_a_conversation_goes_by_its_rendered_tokens() -> None:
    servers = [ServerInstance(f"i{n}") for n in range(3)]
    async with running_servers(*servers) as bench:
        messages = [{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "more"}]}]
        await bench.holds(servers[1], _chat_keys(messages))
        reply = await bench.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "unknown": [1]})
        assert reply.status == 200
        assert [len(each.bodies) for each in servers] == [0, 1, 0]


def _chat_keys(messages: list[dict[str, Any]]) -> list[bytes]:
    from pinyon.core.block_keys import chain_block_keys, tokens_to_bytes

    tokens = tokens_of({"messages": messages})
    return chain_block_keys(root_of(), tokens_to_bytes(tokens), 16)


async def test_the_slo_of_the_conductor_is_a_429() -> None:
    go = asyncio.Event()
    server = ServerInstance("i0", answer=after(go))
    async with running_servers(server) as bench:
        first = asyncio.ensure_future(bench.post("/v1/completions", ask("long " * 1600)))
        await spin(lambda: server.bodies)
        reply = await bench.post("/v1/completions", ask(), {"x-pinyon-ttft-slo-ms": "200"})
        assert reply.status == 429
        assert "retry-after" in reply.headers
        assert len(server.bodies) == 1
        go.set()
        assert (await first).status == 200
        await bench.idle()


async def test_without_a_conductor_known_instances_serve() -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        await bench.world.conductor.server.drain(0)
        await spin(lambda: not bench.lb.conductor.connected)
        assert (await bench.post("/v1/completions", ask())).status == 200
        assert plan_of(server.bodies[0]).placement.decode_instance_id == "i0"
        await bench.world.start()


# ---------------------------------------------------------------- what servers get


async def test_a_body_arrives_as_it_was_after_the_plan() -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        body = b' {"odd":{"deep":[1, 2.50,null]},\n"model": "pinyon-tiny", "prompt":"hello", "n":2, "tools":1e-3 }'
        reply = await bench.post("/v1/completions", body, {"x-request-id": "abc", "x-pinyon-session": "s"})
        assert reply.status == 200
        assert reply.headers["x-request-id"] == "abc"
        (sent,) = server.bodies
        plan = plan_of(sent)
        sealed = json.loads(sent)["kv_transfer_params"]["pinyon"]
        added = f'"kv_transfer_params":{{"pinyon":"{sealed}"}},'
        assert sent == body.replace(b"{", b"{" + added.encode(), 1)
        assert plan.request_id.startswith("abc.")
        assert plan.request_class.session == "s"
        assert plan.placement.decode_instance_id == plan.placement.prefill_instance_id == "i0"


async def test_an_instance_without_a_connector_gets_no_plan() -> None:
    server = ServerInstance("i0", keeps_to_itself=True)
    server.packing = UNKNOWN_PACKING
    async with running_servers(server) as bench:
        body = ask()
        assert (await bench.post("/v1/completions", body)).status == 200
        assert server.bodies == [body]


@pytest.mark.parametrize("name", ['"kv_transfer_params"', '"kv\\u005ftransfer_params"'])
async def test_clients_cannot_send_transfer_parameters(name: str) -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        body = b'{"model": "pinyon-tiny", "prompt": "hi", %b: {"pinyon": "mine", "x": 1}}' % name.encode()
        for path in ("/v1/completions", "/v1/embeddings"):
            assert (await bench.post(path, body)).status == 200
        by_key, other = server.bodies
        assert plan_of(by_key).request_id
        assert json.loads(by_key)["kv_transfer_params"].keys() == {"pinyon"}
        assert json.loads(other) == {"model": "pinyon-tiny", "prompt": "hi"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_all_prompts_go_with_a_plan(path: str) -> None:
    server = ServerInstance("i0", keeps_to_itself=True)
    async with running_servers(server) as bench:
        assert (await bench.post(path, ask(), {"x-pinyon-no-store": "true"})).status == 200
        assert plan_of(server.bodies[0]).request_class.no_store


async def test_transfer_parameters_beside_others_are_refused() -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        for name in ("kv_transfer_params", "ec_transfer_params"):
            reply = await bench.post("/v1/completions", ask(vllm_xargs={name: "x"}))
            assert reply.status == 400
            assert name.encode() in reply.body
        assert (await bench.post("/v1/completions", ask(vllm_xargs={"x": 1}, ec_transfer_params={}))).status == 200
        (body,) = server.bodies
        assert "ec_transfer_params" not in json.loads(body)


@pytest.mark.parametrize("tenants", [False, True])
async def test_forms_go_on_where_there_are_no_tenants(tmp_path, tenants: bool) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a tenant-a\n")
    server = ServerInstance("i0", answer=answers())
    async with running_servers(server, **({"api_keys_file": str(file)} if tenants else {})) as bench:
        headers = {"authorization": "Bearer key-a", "content-type": "multipart/form-data; boundary=x"}
        form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\npinyon-tiny\r\n--x--\r\n'
        reply = await bench.post("/v1/audio/transcriptions", form, headers)
        assert (reply.status, server.bodies) == ((400, []) if tenants else (200, [form]))
        assert (b"forms" in reply.body) is tenants


async def test_tenants_and_salts_have_caches_of_their_own(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a tenant-a\nkey-b tenant-b\n")
    server = ServerInstance("i0")
    async with running_servers(server, api_keys_file=str(file)) as bench:
        for key, salt in (("key-a", {}), ("key-b", {}), ("key-b", {"cache_salt": "own"})):
            headers = {"authorization": f"Bearer {key}"}
            assert (await bench.post("/v1/completions", ask(**salt), headers)).status == 200
        salts = [json.loads(body)["cache_salt"] for body in server.bodies]
        owners = (("tenant-a", ""), ("tenant-b", ""), ("tenant-b", "own"))
        assert salts == [salt_of(*owner, SECRET) for owner in owners]
        assert [plan_of(body).request_class.tenant for body in server.bodies] == ["tenant-a", "tenant-b", "tenant-b"]


async def test_the_salt_of_a_client_is_replaced() -> None:
    server = ServerInstance("i0", keeps_to_itself=True)
    async with running_servers(server) as bench:
        assert (await bench.post("/v1/completions", ask(cache_salt="own"))).status == 200
        assert (await bench.post("/v1/completions", ask())).status == 200
        own, none = map(json.loads, server.bodies)
        assert own["cache_salt"] == salt_of("", "own", SECRET)
        assert "cache_salt" not in none


async def test_a_server_at_another_host_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = ServerInstance("i0", address="10.1.2.3:1")
    with caplog.at_level(logging.WARNING):
        async with running_servers(server, known=False, placement_wait_s=0.1) as bench:
            await spin(lambda: bench.lb.clusters.home.servers)
            await spin(lambda: caplog.records)
            assert (await bench.post("/v1/completions", ask())).status == 503
            assert not server.asked
            assert not list(bench.lb.servers)
    assert "register both with one advertise_host" in caplog.text


async def test_other_paths_go_to_an_instance_unchanged() -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        body = b'{"model": "pinyon-tiny", "input": "text"}'
        for path in ("/v1/embeddings", "/v1/rerank", "/tokenize"):
            assert (await bench.post(path, body, {"client": "1"})).status == 200
        assert [each.target for each in server.requests] == ["/v1/embeddings", "/v1/rerank", "/tokenize"]
        assert server.bodies == [body] * 3
        assert (await bench.post("/v1/embeddings", b'{"model": "other"}')).status == 404
        for target in ("http://lb/tokenize", "/v1/load_lora_adapter", "/v1/../tokenize", "/v1/completions#x"):
            assert (await bench.post(target, body)).status == 404, target
        assert len(server.bodies) == 3


# ---------------------------------------------------------------- what clients see


@pytest.mark.parametrize("stream", [False, True])
async def test_no_client_sees_transfer_parameters(stream: bool) -> None:
    told = b'{"text":"a \\"kv_transfer_params\\": {","kv_transfer_params": {"pinyon": {"a": "}"}},"n":null}'
    clean = b'{"text":"a \\"kv_transfer_params\\": {","kv_transfer_params": null,"n":null}'
    event = b"data: %b\n\n"
    answer = streams(event % told, event % told, DONE) if stream else answers(told)
    async with running_servers(ServerInstance("i0", answer=answer)) as bench:
        reply = await bench.post("/v1/completions", ask(stream=stream))
        assert reply.body == ((event % clean) * 2 + DONE if stream else clean)


async def test_a_long_answer_with_transfer_parameters_breaks_off() -> None:
    long = b'{"text":"%b",' % (b"x" * (300 << 10))
    server = ServerInstance("i0", answer=answers(long + b'"kv_transfer_params":{"pinyon":1}}'))
    async with running_servers(server) as bench:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await bench.post("/v1/completions", ask())


async def test_models_and_adapters_are_listed() -> None:
    servers = [ServerInstance("i0"), ServerInstance("i1"), ServerInstance("i2", model="other-model")]
    servers[1].lists = json.dumps(
        {"data": [{"id": MODEL, "root": "/m"}, {"id": "tuned", "parent": MODEL, "root": "/lora"}]}
    ).encode()
    async with running_servers(*servers) as bench:
        await spin(lambda: bench.lb.servers.base_of("tuned") == MODEL)
        listed = {each["id"]: each for each in (await bench.get("/v1/models")).json["data"]}
        assert listed.keys() == {MODEL, "tuned", "other-model"}
        assert listed["tuned"]["parent"] == MODEL
        assert (await bench.get("/v1/models/other-model")).json["max_model_len"] == 8192
        assert (await bench.get("/v1/models/tuned")).json["id"] == "tuned"
        assert (await bench.get("/v1/models/nothing")).status == 404
        for _ in range(4):
            assert (await bench.post("/v1/completions", ask(model="tuned"))).status == 200
        assert [len(each.bodies) for each in servers] == [0, 4, 0]
        assert json.loads(servers[1].bodies[0])["model"] == "tuned"


async def test_an_adapter_has_block_keys_of_its_own() -> None:
    servers = [ServerInstance(f"i{n}") for n in range(3)]
    for server in servers:
        server.lists = json.dumps({"data": [{"id": MODEL}, {"id": "tuned", "parent": MODEL}]}).encode()
    async with running_servers(*servers) as bench:
        await spin(lambda: all(each.adapters for each in bench.lb.servers))
        await bench.holds(servers[1], keys_of(LONG))
        await bench.holds(servers[2], keys_of(LONG, adapter="tuned"))
        assert (await bench.post("/v1/completions", ask(model="tuned"))).status == 200
        assert [len(each.bodies) for each in servers] == [0, 0, 1]


# ---------------------------------------------------------------- tokens


async def test_kinds_that_differ_are_placed_by_text(caplog: pytest.LogCaptureFixture) -> None:
    servers = [ServerInstance(f"i{n}") for n in range(3)]
    for server in servers:
        server.tokens = lambda body: [7, *tokens_of(body)[1:]] if "messages" in body else tokens_of(body)
    with caplog.at_level(logging.WARNING):
        async with running_servers(*servers) as bench:
            messages = [{"role": "user", "content": LONG * 4}]
            await bench.holds(servers[2], _chat_keys(messages))
            await bench.holds(servers[2], keys_of(LONG))
            for _ in range(4):  # the first goes anywhere, the others after it
                assert (await bench.chat(LONG * 4)).status == 200
            counts = sorted(len(each.bodies) for each in servers)
            assert counts == [0, 0, 4]
            assert not bench.world.metric("placements_total", outcome="placed")
            assert (await bench.post("/v1/completions", ask())).status == 200
            assert bench.world.metric("placements_total", outcome="placed") == 1
    (warning,) = [each.message for each in caplog.records if "makes other tokens" in each.message]
    assert "chat (at token 0 it has 7, we have" in warning
    assert "completion" not in warning


async def test_a_server_without_tokenize_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    servers = [ServerInstance("i0"), ServerInstance("i1")]
    for server in servers:
        server.tokens = None
    with caplog.at_level(logging.WARNING):
        async with running_servers(*servers) as bench:
            await bench.holds(servers[1], keys_of(LONG))
            assert (await bench.post("/v1/completions", ask())).status == 200
            assert [len(each.bodies) for each in servers] == [0, 1]
    assert len([each for each in caplog.records if "tell nothing at /tokenize" in each.message]) == 1


@pytest.mark.parametrize("status", [401, 403, 429, 500])
async def test_a_server_that_will_not_tokenize_now_is_asked_again(status: int) -> None:
    server = ServerInstance("i0")
    server.tokens, server.refusal = lambda _: None, status
    async with running_servers(server, known=False) as bench:
        await spin(lambda: any(each.target == "/tokenize" for each in server.asked))
        await spin(lambda: (each := bench.lb.servers.get("i0")) is not None and not each.server.outstanding)
        assert not bench.lb.servers.get("i0").compared
        server.tokens = lambda _: [7]
        await bench.known(server)
        assert "completion" in bench.lb.servers.get("i0").differs


async def test_a_server_that_refuses_all_prompts_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    server = ServerInstance("i0")
    server.tokens = lambda _: None
    with caplog.at_level(logging.WARNING):
        async with running_servers(server):
            pass
    assert len([each for each in caplog.records if "tell nothing at /tokenize" in each.message]) == 1


async def test_a_model_without_a_folder_is_served_by_text(caplog: pytest.LogCaptureFixture) -> None:
    servers = [ServerInstance(f"i{n}", model="big") for n in range(2)]
    with caplog.at_level(logging.WARNING):
        async with running_servers(*servers) as bench:
            for _ in range(4):
                assert (await bench.post("/v1/completions", ask(LONG * 4, model="big"))).status == 200
            assert sorted(len(each.bodies) for each in servers) == [0, 4]
            assert plan_of((servers[0].bodies + servers[1].bodies)[0]).placement.policy.startswith("lb_")
            assert (await bench.get("/health/ready")).status == 200
            for server in servers:
                server.reporter.call.cancel()
    assert any("no folder" in each.message for each in caplog.records)


async def test_what_only_servers_understand_is_not_refused() -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        picture = {"type": "image_url", "image_url": {"url": "data:,"}}
        strange = [
            {"messages": [{"role": "user", "content": [picture]}]},
            {"messages": [{"role": "oracle", "content": "?"}]},
            {"messages": "none"},
            {"messages": [{"role": "user", "content": "x"}], "user": "u" * 400, "cache_salt": "s" * 300},
            {"messages": [{"role": "user", "content": "y" * 9000}]},
            {"messages": [{"role": "assistant", "tool_calls": 5}]},
            {"messages": [{"role": "user", "content": [{"type": []}]}]},
        ]
        for body in strange:
            assert (await bench.post("/v1/chat/completions", {"model": MODEL, **body})).status == 200
        for prompt in (["a", "b"], [[1, 2], [3]], [999_999], ["a"], None):
            assert (await bench.post("/v1/completions", {"model": MODEL, "prompt": prompt})).status == 200
        assert len(server.bodies) == 12
        await bench.idle()


@pytest.mark.parametrize("prompt", [[1 << 31], "much " * 100_000, {"odd": 1}], ids=["token", "long", "odd"])
async def test_prompts_that_make_no_sense_here_are_left_to_the_server(prompt: Any) -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        assert (await bench.post("/v1/completions", ask(prompt))).status == 200
        assert len(server.bodies) == 1


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("answer", [answers(status=429), answers(status=500), answers(status=503), says(DROP)])
async def test_a_request_goes_on_at_another_instance(answer) -> None:
    servers = [ServerInstance("i0", answer=answer), ServerInstance("i1")]
    async with running_servers(*servers) as bench:
        await bench.holds(servers[0], keys_of(LONG))
        reply = await bench.post("/v1/completions", ask())
        assert reply.status == 200
        assert [len(each.bodies) for each in servers] == [1, 1]
        ids = [plan_of(each.bodies[0]).request_id for each in servers]
        assert ids[1] == f"{ids[0]}~1"
        await bench.idle()


async def test_the_access_log_names_instance_and_attempts(caplog: pytest.LogCaptureFixture) -> None:
    servers = [ServerInstance("i0", answer=answers(status=503)), ServerInstance("i1")]
    with caplog.at_level(logging.INFO, "pinyon"):  # a service in this process may have set another level
        async with running_servers(*servers, access_log=True) as bench:
            await bench.holds(servers[0], keys_of(LONG))
            assert (await bench.post("/v1/completions", ask())).status == 200
    (line,) = [
        vars(each) for each in caplog.records if each.name == "pinyon.lb.access" and each.levelno == logging.INFO
    ]
    named = {
        name: line[name] for name in ("route", "model", "instance", "attempts", "prompt_tokens", "completion_tokens")
    }
    assert named == {
        "route": "/v1/completions",
        "model": MODEL,
        "instance": "i1",
        "attempts": 2,
        "prompt_tokens": 5,
        "completion_tokens": 2,
    }


async def test_an_instance_that_does_not_listen_is_avoided() -> None:
    servers = [ServerInstance("i0"), ServerInstance("i1")]
    async with running_servers(*servers) as bench:
        await bench.holds(servers[0], keys_of(LONG))
        servers[0].kill()
        for _ in range(3):
            assert (await bench.post("/v1/completions", ask())).status == 200
        assert len(servers[1].bodies) == 3
        assert bench.gauge("retries_total") == 1
        await bench.idle()


async def test_the_only_instance_that_fails_gives_its_error() -> None:
    async with running_servers(ServerInstance("i0", answer=answers(b'{"its": "words"}', 503))) as bench:
        reply = await bench.post("/v1/completions", ask())
        assert (reply.status, reply.json) == (503, {"its": "words"})
        await bench.idle()


@REPLACES_METHODS
async def test_an_instance_without_a_server_is_unavailable() -> None:
    servers = [ServerInstance("i0"), ServerInstance("i1")]
    async with running_servers(*servers, placement_wait_s=0.1) as bench:
        await bench.holds(servers[0], keys_of(LONG))
        place, asked = bench.lb.clusters.home.conductor.place, []

        async def going(*message: Any) -> Any:
            placement = await place(*message)
            asked.append(placement.decode_instance_id)
            if len(asked) <= gone:
                known = bench.lb.servers._known[asked[-1]]
                bench.lb.servers._drop(asked[-1], known)
                known.task.cancel()
            return placement

        gone = 1
        bench.lb.clusters.home.conductor.place = going  # type: ignore[method-assign]
        assert (await bench.post("/v1/completions", ask())).status == 200
        assert asked == ["i0", "i1"]
        assert not bench.lb.clusters.home.failures.avoided(bench.lb.clock())
        gone = 3
        reply = await bench.post("/v1/completions", ask())
        assert (reply.status, "retry-after" in reply.headers) == (503, True)
        await bench.idle()


@REPLACES_METHODS
async def test_a_server_elsewhere_is_unavailable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_servers(ServerInstance("i0")) as bench:
        elsewhere = RoutingChoice(Where.REMOTE, "lb-us")
        monkeypatch.setattr(type(bench.lb.models), "choose", lambda *_: elsewhere)
        assert (await bench.post("/v1/completions", ask())).status == 503
        await bench.idle()


async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    server = ServerInstance("i0", answer=after(asyncio.Event()))
    async with running_servers(server) as bench:
        async with bench.asking(LONG):
            await spin(lambda: server.bodies)
        await bench.idle()
        assert server.left == 1


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    server = ServerInstance("i0", answer=streams(b'data: {"a":1}\n\n', DROP))
    async with running_servers(server) as bench:
        reply = await bench.post("/v1/completions", ask(stream=True))
        assert reply.status == 200
        assert b'"error"' in reply.body
        assert bench.gauge("requests_total", finish="unavailable", model=MODEL) == 1


# ---------------------------------------------------------------- doors and other instances


async def test_generate_says_that_the_model_needs_http() -> None:
    servers = ServerInstance("i0"), ServerInstance("i1", model="big")
    async with running_servers(*servers) as bench, grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        for model in (MODEL, "big"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(lb_pb2.GenerateRequest(model=model, prompt="hi"), timeout=WAIT_S).read()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "over HTTP" in caught.value.details()


async def test_own_instances_win_over_servers(caplog: pytest.LogCaptureFixture) -> None:
    server, worker = ServerInstance("i0"), FakeWorker("w0")
    await worker.start()
    try:
        with caplog.at_level(logging.WARNING):
            async with running_servers(server) as bench:
                await _registered(bench, worker)
                for _ in range(3):
                    assert (await bench.post("/v1/completions", ask())).status == 200
                assert len(worker.submissions) == 3
                assert not server.bodies
        assert len([each for each in caplog.records if "own instances serve the same model" in each.message]) == 1
    finally:
        await worker.stop()


@pytest.mark.parametrize("model", [MODEL, "big"])
async def test_a_model_of_servers_stays_one_without_them(model: str) -> None:
    server = ServerInstance("i0", model=model)
    async with running_servers(server, placement_wait_s=0.1) as bench:
        await server.reporter.call.write(conductor_pb2.ReportSessionRequest(leaving=True))
        await spin(lambda: not list(bench.lb.servers), 10)
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        bodies = {"chat/completions": {"messages": picture}, "completions": {"prompt": "x"}, "embeddings": {}}
        for path, body in bodies.items():
            reply = await bench.post(f"/v1/{path}", {"model": model, **body})
            assert (reply.status, "retry-after" in reply.headers) == (503, True), path
        await server.register(bench.world)
        await spin(lambda: list(bench.lb.servers))
        assert (await bench.post("/v1/completions", ask(model=model))).status == 200


async def test_forgotten_servers_get_no_questions() -> None:
    servers = [ServerInstance("i0"), ServerInstance("i1")]
    async with running_servers(*servers, instances_grace_s=0.05) as bench:
        for server in servers:
            await server.reporter.call.write(conductor_pb2.ReportSessionRequest(leaving=True))
        await spin(lambda: not bench.lb.clusters.home.servable(MODEL, bench.lb.clock()), 10)
        await spin(lambda: not list(bench.lb.servers), 10)


async def _registered(bench, worker: FakeWorker) -> None:
    from tests.integration.conductor_parts import Reporter

    reporter = Reporter(bench.world.stub, worker.name, common_pb2.ROLE_MIXED)
    reporter.info.address, reporter.info.model = worker.address, MODEL
    reporter.info.model_fingerprint = worker.fingerprint
    reporter.info.key_secret_id = bench.servers[0].reporter.info.key_secret_id
    await reporter.connect()
    await spin(lambda: not list(bench.lb.servers))


async def test_an_instance_that_restarts_is_asked_again() -> None:
    server = ServerInstance("i0")
    async with running_servers(server) as bench:
        first = bench.lb.servers.get("i0")
        server.reporter.call.cancel()
        server.info["boot_id"] = "2"
        await server.register(bench.world)
        await spin(lambda: (now := bench.lb.servers.get("i0")) is not None and now is not first and now.compared)
        assert first.gone
        assert (await bench.post("/v1/completions", ask())).status == 200


# ---------------------------------------------------------------- regions


async def test_in_a_region_servers_are_no_sessions_and_stay_there() -> None:
    servers = [ServerInstance("i0"), ServerInstance("i1", model="big")]
    async with running_servers(*servers, region="eu", pushing="pending") as bench:
        for model in (MODEL, "big"):
            assert (await bench.post("/v1/completions", ask(model=model))).status == 200
        assert not len(bench.lb.clusters.workers)
        assert not bench.lb.serving.states(1, "us")
        bench.lb.models.heard("lb-us", "us", {"big": Report(available=4)}, 0.0, draining=False)
        assert bench.lb.models.by_name["big"].layers.remote.get("lb-us") is None
        await bench.idle()


async def test_other_regions_are_refused_clearly() -> None:
    async with running_servers(ServerInstance("i0"), region="eu") as bench:
        hello = peer_pb2.SessionRequest(hello=peer_pb2.PeerHello(lb_id="lb-us", region="us", version=2))
        submission = worker_pb2.Submission(
            stream_id=1, request_id="r", model=MODEL, prompt_tokens_le32=tokens("hi"), sampling={"max_tokens": 2}
        )
        forwarded = peer_pb2.ForwardedRequest(submission=submission.SerializeToString(), hops=1)
        async with grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
            call = peer_pb2_grpc.PeerServiceStub(channel).Session(timeout=WAIT_S)
            await call.write(hello)
            await call.write(peer_pb2.SessionRequest(requests=[forwarded]))
            async for message in call:
                if message.updates:
                    break
            (update,) = message.updates
            assert update.error.code == "RESOURCE_EXHAUSTED"
            assert "over HTTP" in update.error.message
            call.cancel()
