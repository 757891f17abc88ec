"""The front door beside generations: other routes, web pages, compressed bodies, ids, clients that end sending."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from pathlib import Path

import pytest

from pinyon.core.compiled import version_line
from pinyon.runtime.metrics import new_registry
from tests.integration.lb_harness import MODEL, VERSION, WAIT_S, Connection, ask, expected_text, running_lb, spin

# ---------------------------------------------------------------- routes


async def test_texts_become_tokens_and_back():
    async with running_lb() as bench:
        for body in ({"prompt": "né"}, {"model": MODEL, "prompt": "né", "add_special_tokens": False}):
            found = (await bench.post("/tokenize", body)).json
            assert found == {"count": 3, "max_model_len": 4096, "tokens": list("né".encode()), "token_strs": None}
        found = (await bench.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json
        assert found["token_strs"] == ["a", "b"]
        back = await bench.post("/detokenize", {"model": MODEL, "tokens": list("né".encode())})
        assert back.json == {"prompt": "né"}
        long = "é" * 20_000  # longer than the context, and written outside the event loop
        found = (await bench.post("/tokenize", {"prompt": long})).json
        assert (found["count"], bytes(found["tokens"])) == (40_000, long.encode())
        assert (await bench.post("/detokenize", {"tokens": found["tokens"]})).json == {"prompt": long}
        refused = await bench.post("/tokenize", {"prompt": "x" * (64 * 4096 + 1)})
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
        refused = await bench.post("/detokenize", {"tokens": [97] * (64 * 4096 + 1)})
        assert (refused.status, refused.json["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("vocabulary", ["llama-bytes-bos", "llama-pieces-bos"])
async def test_many_tokens_are_decoded_piece_by_piece(monkeypatch, vocabulary):
    """Decoding at once would block all other requests, even in a thread: the tokenizer keeps the GIL."""
    folder = Path(__file__).parents[1] / "data" / "golden_text" / vocabulary
    async with running_lb(1, model=str(folder), served_model_name=MODEL) as bench:
        tokenizer, sizes = bench.lb.prompts[MODEL].tokenizer, []
        tokens = [token % tokenizer.vocab_size for token in range(10_000)]
        decode = tokenizer.decode
        expected = decode(tokens, skip_special_tokens=False)

        def seen(ids, **how):
            sizes.append(len(ids))
            return decode(ids, **how)

        monkeypatch.setattr(tokenizer, "decode", seen)
        assert (await bench.post("/detokenize", {"tokens": tokens})).json == {"prompt": expected}
        assert max(sizes, default=0) <= 4096


HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, [262, 260]),
        ({"add_generation_prompt": True}, [262, 260]),
        ({"add_generation_prompt": False}, [262]),
        ({"continue_final_message": True}, []),
        ({"continue_final_message": True, "add_generation_prompt": False}, []),
    ],
)
async def test_how_a_conversation_ends_is_the_clients_choice(fields, end):
    async with running_lb() as bench:
        expected = [256, 259, *b"hi", 262, 260, *b"yo", *end]
        found = (await bench.post("/tokenize", {"messages": [HI, YO], **fields})).json
        assert found["tokens"] == expected
        body = {"model": MODEL, "messages": [HI, YO], "max_tokens": 1, **fields}
        assert (await bench.post("/v1/chat/completions", body)).json["usage"]["prompt_tokens"] == len(expected)


async def test_version_and_models():
    async with running_lb() as bench:
        assert (await bench.get("/version")).json == VERSION
        (model,) = (await bench.get("/v1/models")).json["data"]
        assert (model["id"], model["root"], model["parent"], model["permission"]) == (MODEL, MODEL, None, [])
        assert model["max_model_len"] == 4096


async def test_version_says_how_it_runs_as_others_do():
    async with running_lb() as bench:
        told = (await bench.get("/version")).json
    assert version_line() == f"pinyon {told['version']} ({'compiled' if told['compiled'] else 'Python'})"
    labels = {"version": told["version"], "compiled": json.dumps(told["compiled"])}
    assert new_registry().get_sample_value("pinyon_build_info", labels) == 1
    assert told["python"].startswith("{}.{}.{}".format(*sys.version_info))


async def test_tokenizing_needs_a_key_where_there_are_some(keys):
    async with running_lb(api_keys_file=keys) as bench:
        for path in ("/tokenize", "/detokenize"):
            assert (await bench.post(path, {"prompt": "a"})).status == 401
        assert (await bench.post("/tokenize", {"prompt": "a"}, {"authorization": "Bearer sk-a"})).status == 200
        assert (await bench.get("/version")).status == 200


async def test_tokenizing_is_a_request_of_the_tenants_limit(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-a anna rpm=3\nsk-b bert rpm=3\n")
    anna, bert = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    async with running_lb(api_keys_file=str(keys)) as bench:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]}), ("/tokenize", {})):
            assert (await bench.post(path, body, anna)).status in (200, 400)
        refused = await bench.post("/detokenize", {"tokens": [97]}, anna)
        assert (refused.status, refused.headers["x-ratelimit-limit-requests"]) == (429, "3")
        assert (await bench.complete("a", anna, max_tokens=1)).status == 429
        assert (await bench.post("/tokenize", {"prompt": "a"}, bert)).status == 200
        assert (await bench.complete("a", bert, max_tokens=1)).status == 200


# ---------------------------------------------------------------- web pages

PREFLIGHT = {
    "origin": "https://A.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize(
    ("origins", "allowed"), [("https://a.example, http://b:3000", "https://a.example"), ("*", "*")]
)
async def test_pages_of_these_origins_may_ask(origins, allowed, keys):
    async with running_lb(cors_origins=origins, api_keys_file=keys) as bench, Connection(bench.http) as connection:
        connection.send("OPTIONS", "/v1/completions", None, PREFLIGHT)
        reply = await connection.reply()
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, allowed)
        assert reply.headers["access-control-allow-methods"] == "GET, POST"
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
        for headers, status in (({}, 401), ({"authorization": "Bearer sk-a"}, 200)):
            connection.send("POST", "/v1/completions", ask(max_tokens=1), {"origin": "https://a.example", **headers})
            reply = await connection.reply()
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, allowed)
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in reply.headers
            assert reply.headers.get("vary") == (None if origins == "*" else "origin")
        connection.send("OPTIONS", "/nowhere", None, PREFLIGHT)
        assert (await connection.reply()).status == 404
        await bench.idle()


async def test_other_pages_are_told_nothing():
    other = {**PREFLIGHT, "origin": "https://a.example.evil"}
    for settings in ({}, {"cors_origins": "https://a.example"}):
        async with running_lb(**settings) as bench, Connection(bench.http) as connection:
            for method, headers in (("OPTIONS", other), ("GET", other), ("GET", {})):
                connection.send(method, "/v1/models", None, headers)
                reply = await connection.reply()
                assert not [name for name in reply.headers if name.startswith("access-control")]
            connection.send("OPTIONS", "/v1/models", None, PREFLIGHT)
            assert (await connection.reply()).status == (200 if settings else 405)


async def test_headers_that_a_page_asks_for_are_no_way_to_write_others():
    async with running_lb(cors_origins="*") as bench, Connection(bench.http) as connection:
        for names in ("a\tb", "a, (b)", "x" * 65, ", ".join(["x"] * 65)):
            connection.send("OPTIONS", "/v1/models", None, {**PREFLIGHT, "access-control-request-headers": names})
            assert "access-control-allow-headers" not in (await connection.reply()).headers


# ---------------------------------------------------------------- compressed bodies


async def test_compressed_bodies_are_read():
    async with running_lb() as bench:
        for prompt in ("hello", "x" * 3000, [1] * 3000):
            body = gzip.compress(ask(prompt=prompt, max_tokens=2))
            for coding in ("gzip", "x-gzip", "GZIP"):
                reply = await bench.post("/v1/completions", body, {"content-encoding": coding})
                assert reply.json["choices"][0]["text"] == expected_text(len(prompt), 2)
        large = ask(prompt="a", metadata={"x": "y" * 200_000}, max_tokens=1)  # inflated in a thread
        reply = await bench.post("/v1/chat/completions", gzip.compress(large), {"content-encoding": "gzip"})
        assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")
        reply = await bench.post("/v1/completions", gzip.compress(large), {"content-encoding": "gzip"})
        assert reply.status == 200
        plain = await bench.post("/v1/completions", ask(max_tokens=1), {"content-encoding": "identity"})
        assert plain.status == 200
        assert bench.lb.bodies.used == 0
        await bench.idle()


def lying(body: bytes, size: int) -> bytes:
    return gzip.compress(body)[:-4] + size.to_bytes(4, "little")


BOMB = b"0" * (1 << 20)
BAD_GZIP = [
    (gzip.compress(BOMB), {413}),
    (lying(BOMB, 100), {400}),
    (lying(BOMB, 8192), {400}),
    (lying(b"{}", 3), {400}),
    (gzip.compress(ask(max_tokens=1))[:-9], {400, 413}),  # after the cut, its end may claim any size
    (gzip.compress(ask(max_tokens=1)) * 2, {400}),
    (zlib.compress(ask(max_tokens=1)), {400, 413}),
    (b"", {400}),
    (b"\x1f\x8b" + bytes(30), {400}),
]


async def test_compressed_bodies_are_bounded():
    async with running_lb(body_limit_bytes=8192) as bench:
        for body, statuses in BAD_GZIP:
            reply = await bench.post("/v1/completions", body, {"content-encoding": "gzip"})
            assert reply.status in statuses, body[:40]
            assert bench.lb.bodies.used == 0
        await bench.idle()


async def test_what_is_inflated_counts_with_all_bodies(monkeypatch):
    async with running_lb(bodies_limit_mib=1, body_limit_bytes=1 << 20) as bench:
        worker = bench.workers[0].hold()
        body = gzip.compress(ask(metadata={"x": "y" * 900_000}, max_tokens=1))
        first = asyncio.ensure_future(bench.post("/v1/completions", body, {"content-encoding": "gzip"}))
        await worker.until(lambda: worker.open)
        assert bench.lb.bodies.used > 900_000
        second = await bench.post("/v1/completions", body, {"content-encoding": "gzip"})
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        worker.go.set()
        assert (await first).status == 200
        await spin(lambda: not bench.lb.bodies.used)


# ---------------------------------------------------------------- ids


async def test_every_answer_has_an_id(keys):
    async with running_lb(api_keys_file=keys, requests_per_peer=1) as bench:
        asked = {"authorization": "Bearer sk-a"}
        seen = []
        for method, path, body, headers, status in [
            ("GET", "/health", None, {}, 200),
            ("GET", "/metrics", None, {}, 200),
            ("GET", "/v1/models", None, asked, 200),
            ("GET", "/v1/models", None, {}, 401),
            ("GET", "/nowhere", None, {}, 404),
            ("GET", "/v1/completions", None, {}, 405),
            ("POST", "/v1/completions", b"{", asked, 400),
            ("POST", "/v1/completions", ask(), {**asked, "content-encoding": "br"}, 415),
            ("POST", "/v1/completions", ask(), {**asked, "x-pinyon-priority": "x"}, 400),
            ("POST", "/v1/completions", b"", {**asked, "content-length": "99999999999"}, 413),
            ("POST", "/v1/completions", ask(max_tokens=1), asked, 200),
            ("POST", "/v1/completions", ask(max_tokens=1, stream=True), asked, 200),
            ("POST", "/v1/completions", ask(max_tokens=1, n=2), asked, 200),
            ("POST", "/v1/completions", ask(max_tokens=1, n=2, stream=True), asked, 200),
        ]:
            for own in ({}, {"x-request-id": "mine-1"}):
                async with Connection(bench.http) as connection:
                    connection.send(method, path, body, headers | own)
                    reply = await connection.reply()
                assert reply.status == status, (method, path)
                found = reply.headers["x-request-id"]
                assert found == own.get("x-request-id", found)
                seen += [] if own else [found]
        assert len(set(seen)) == len(seen)
        async with Connection(bench.http) as connection:
            connection.send("GET", "/" + "x" * 9000)
            reply = await connection.reply()
            assert (reply.status, len(reply.headers["x-request-id"])) == (414, 20)
        async with Connection(bench.http) as connection:
            connection.writer.write(b"HELLO\r\n\r\n")
            reply = await connection.reply()
            assert (reply.status, len(reply.headers["x-request-id"])) == (400, 20)


@pytest.mark.parametrize(
    ("target", "fields", "status", "limit"),
    [
        ("/health?" + "x" * 9000, {}, 414, "8192 bytes"),
        ("/health?" + "x" * 8000, {}, 200, "ok"),
        ("/health", {"x": "y" * 33_000}, 431, "32768 bytes"),
        ("/health", {"x": "y" * 30_000}, 200, "ok"),
        ("/health", {f"x{number}": "y" for number in range(100)}, 431, "100 header fields"),
        ("/health", {f"x{number}": "y" for number in range(99)}, 200, "ok"),
    ],
    ids=["line", "short line", "head", "small head", "fields", "few fields"],
)
async def test_urls_and_heads_are_bounded(target, fields, status, limit):
    async with running_lb() as bench:
        reply = await bench.get(target, fields)
        assert (reply.status, limit in reply.body.decode()) == (status, True)


# ---------------------------------------------------------------- clients that send nothing more


async def answer_after_end(connection: Connection) -> tuple[int, bytes]:
    """Returns the status and all that follows the head, without interim answers."""
    while (head := await connection.head())[0] == 100:
        pass
    async with asyncio.timeout(WAIT_S):
        return head[0], await connection.reader.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_shuts_its_sending_side_has_its_answer(stream):
    async with running_lb() as bench:
        worker = bench.workers[0].hold(int(stream))
        async with bench.asking(max_tokens=3, stream=stream) as connection:
            await worker.until(lambda: worker.open)
            (served,) = bench.lb.http._shared.connections
            connection.writer.write_eof()
            await spin(lambda: served._visitor.ended)
            worker.go.set()
            status, body = await answer_after_end(connection)
        assert status == 200
        if stream:
            assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            assert json.loads(body)["choices"][0]["text"] == expected_text(5, 3)
        await spin(lambda: not bench.lb.http._shared.connections)
        await bench.idle()


async def test_what_was_pipelined_before_the_end_is_answered_too():
    async with running_lb() as bench, Connection(bench.http) as connection:
        for _ in range(3):
            connection.send("POST", "/v1/completions", ask(max_tokens=1))
        connection.writer.write(b"GET /hea")
        connection.writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            everything = await connection.reader.read()
        assert everything.count(b"HTTP/1.1 200 OK") == 3
        await spin(lambda: not bench.lb.http._shared.connections)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_socket_is_known_to_be_gone(stream):
    async with running_lb() as bench:
        worker = bench.workers[0].hold(int(stream))
        async with bench.asking(max_tokens=3, stream=stream) as connection:
            if stream:
                await connection.head()
                await connection.chunk()
            await worker.until(lambda: worker.open)
            connection.writer.close()
            if stream:  # writing to the client shows that it is gone
                worker.hold_after = 2
                worker.go.set()
            else:
                await worker.until(lambda: worker.cancelled)
        await spin(lambda: not bench.lb.http._shared.connections)
        await bench.idle()


async def test_http_1_0_has_no_interim_answers():
    async with running_lb() as bench:
        worker = bench.workers[0].hold()
        async with Connection(bench.http) as connection:
            body = ask(max_tokens=1)
            connection.writer.write(
                b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            await worker.until(lambda: worker.open)
            connection.writer.write_eof()
            await worker.until(lambda: worker.cancelled)
            assert await connection.reader.read() == b""
        await bench.idle()
