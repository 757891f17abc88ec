"""Calls for several texts: choices, prompts, echoes, log-probabilities, and their cost."""

from __future__ import annotations

import asyncio
import json

import pytest

from pinyon.core.logprobs import TokenLogprob
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.frontdoor.instances import completions
from pinyon.frontdoor.instances.request import Request, Terms
from pinyon.frontdoor.request_loop import LoopLimits
from pinyon.frontdoor.served_models import ANY_DEMAND
from pinyon.openai import choices as openai_choices
from tests.integration.lb_harness import MODEL, WAIT_S, expected_text, running_lb, spin

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def client_of(bench):
    import openai  # here, as importing it takes half a second in every worker that collects this file

    return openai.AsyncOpenAI(base_url=f"http://{bench.http}/v1", api_key="unused", max_retries=0, timeout=WAIT_S)


def bad_request() -> type[Exception]:
    from openai import BadRequestError

    return BadRequestError


def texts(choices) -> list[str]:
    return [choice.text for choice in choices]


# ---------------------------------------------------------------- several choices and prompts


async def test_a_call_waits_before_the_keys_of_its_prompts_are_made():
    """A long prompt's keys take a third of a millisecond on the event loop, and choices need theirs when they run."""
    async with running_lb() as bench:
        whose, sampling, terms = RequestClass(), SamplingParams(5), Terms(0.0, WAIT_S)
        request = Request("id", MODEL, whose, b"\1\0\0\0" * 64, b"", sampling, terms)
        assert bench.lb.dispatcher.demand(request) == ANY_DEMAND
        assert not hasattr(request, "route")


async def test_choices_and_prompts_come_in_order_and_are_summed_up():
    prompts = ["a", "bb", "ccc"]
    async with running_lb() as bench, client_of(bench) as client:
        answer = await client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=4, seed=7)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert texts(answer.choices) == [expected_text(length, 4) for length in (1, 1, 2, 2, 3, 3)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 24)
        assert answer.usage.prompt_tokens_details.cached_tokens == 6
        sent = {submission.request_id: submission for submission in bench.workers[0].submissions}
        assert len(sent) == 6
        seeds = [sent[name].sampling.seed for name in sorted(sent, key=lambda name: int(name.rpartition("-")[2]))]
        assert seeds == [7, 8] * 3
        ids = [list(map(ord, prompt)) for prompt in prompts]
        again = await client.completions.create(model=MODEL, prompt=ids, n=2, max_tokens=4, seed=7)
        assert texts(again.choices) == texts(answer.choices)
        await bench.idle()


async def test_streams_of_one_call_are_told_apart_by_index():
    async with running_lb() as bench, client_of(bench) as client:
        ask = {"model": MODEL, "max_tokens": 5, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        found: dict[int, str] = {}
        ends, parts = [], [part async for part in await client.completions.create(**ask, prompt=["jay", "pine"])]
        for part in parts[:-1]:
            (choice,) = part.choices
            found[choice.index] = found.get(choice.index, "") + choice.text
            ends += [choice.index] * (choice.finish_reason is not None)
        assert found == {index: expected_text(3 if index < 3 else 4, 5) for index in range(6)}
        assert sorted(ends) == list(range(6))
        assert (parts[-1].choices, parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens) == ([], 7, 30)

        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, messages=HI)]
        roles = [chunk.choices[0].index for chunk in chunks[:-1] if chunk.choices[0].delta.role == "assistant"]
        assert sorted(roles) == [0, 1, 2]
        for index in range(3):
            deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1] if chunk.choices[0].index == index]
            assert "".join(deltas) == expected_text(6, 5)
        await bench.idle()


async def test_choices_run_side_by_side_on_what_slots_there_are():
    async with running_lb(in_flight_limit=8) as bench:
        worker = bench.workers[0].hold()
        call = asyncio.ensure_future(bench.complete(["a", "b", "c"], n=2, max_tokens=2))
        await worker.until(lambda: len(worker.open) == 6)
        assert bench.gauge("in_flight_requests") == 6
        worker.go.set()
        assert len((await call).json["choices"]) == 6
        await bench.idle()


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_call_needs_no_more_than_one_slot(slots):
    """The call neither waits for a second slot nor takes it from a waiting request."""
    async with running_lb(in_flight_limit=slots, queue_limit=1) as bench:
        worker = bench.workers[0].hold()
        call = asyncio.ensure_future(bench.complete("aa", n=5, max_tokens=2))
        await worker.until(lambda: len(worker.open) == slots)
        other = asyncio.ensure_future(bench.complete("bbb", max_tokens=2))
        await spin(lambda: bench.gauge("queue_requests") == 1)
        worker.go.set()
        assert [choice["text"] for choice in (await call).json["choices"]] == [expected_text(2, 2)] * 5
        assert (await other).json["choices"][0]["text"] == expected_text(3, 2)
        await bench.idle()


async def test_a_call_that_is_left_leaves_nothing():
    async with running_lb() as bench:
        worker = bench.workers[0].hold()
        for stream in (False, True):
            worker.hold_after = int(stream)
            async with bench.asking(["a", "b"], n=2, max_tokens=4, stream=stream) as connection:
                await worker.until(lambda: len(worker.open) == 4)
                connection.drop()
                await worker.until(lambda: not worker.open)
            await bench.idle()
        assert len(worker.cancelled) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_fails_ends_all(stream):
    async with running_lb() as bench:
        worker = bench.workers[0].hold(int(stream))
        async with bench.asking("a", n=3, max_tokens=4, stream=stream) as connection:
            await worker.until(lambda: len(worker.open) == 3)
            events = b""
            if stream:
                assert (await connection.head())[0] == 200
                events = await connection.chunk()
            bench.lb.dispatcher._loop._kind.limits = LoopLimits(attempts=1)
            bench.conductor.workers = []
            worker.die_at = 1
            worker.go.set()
            if stream:
                while chunk := await connection.chunk():
                    events += chunk
                *_, error, done, end = events.decode().split("\n\n")
                assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
                assert (done, end) == ("data: [DONE]", "")
            else:
                reply = await connection.reply()
                assert (reply.status, reply.json["error"]["code"]) == (503, "unavailable")
        await bench.idle()


async def test_limits_count_all_choices_of_a_call(tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-a": {"tenant": "anna", "tpm": 100, "rpm": 5}}))
    key = {"authorization": "Bearer sk-a"}
    async with running_lb(api_keys_file=str(keys), clock=lambda: 1000.0) as bench:  # no rate recovers meanwhile
        over = await bench.complete("aaaa", key, n=10, max_tokens=7)
        assert (over.status, over.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "may need 110" in over.json["error"]["message"]
        assert not bench.workers[0].submissions
        reply = await bench.complete("aaaa", key, n=8, max_tokens=7)
        assert reply.status == 200
        assert reply.headers["x-ratelimit-remaining-tokens"] == "12"
        assert reply.headers["x-ratelimit-remaining-requests"] == "3"
        await bench.idle()


async def test_too_many_prompts_are_refused():
    async with running_lb() as bench:
        reply = await bench.complete(["a"] * 256, n=5, max_tokens=1)
        assert (reply.status, reply.json["error"]["param"]) == (400, "n")
        long = await bench.complete(["a", "b" * 5000], max_tokens=1)
        assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
        long = await bench.complete("a", n=2, max_tokens=4096)
        assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
        assert len((await bench.complete(["a"] * 256, max_tokens=1)).json["choices"]) == 256
        await bench.idle()


# ---------------------------------------------------------------- sampling, and what is reported beside the text

SAMPLED = {
    "repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_p": 0.25, "min_tokens": 2,
}  # fmt: skip
NEUTRAL = {
    "repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0, "min_tokens": 0,
    "top_k": -1, "top_p": 1, "stop_token_ids": [], "logit_bias": {}, "n": 1, "best_of": 1, "use_beam_search": False,
    "length_penalty": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "ignore_eos": False,
    "include_stop_str_in_output": False, "truncate_prompt_tokens": None, "return_tokens_as_token_ids": False,
    "kv_transfer_params": None, "store": False, "stop": [], "return_token_ids": False, "vllm_xargs": None,
    "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"},
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_sampling_travels_and_neutral_values_are_none(path):
    said = {"messages": HI} if path == CHAT else {"prompt": "aaaaaa"}
    async with running_lb() as bench:
        plain = await bench.post(path, {"model": MODEL, **said, "max_tokens": 4, "seed": 1})
        neutral = await bench.post(path, {"model": MODEL, **said, "max_tokens": 4, "seed": 1, **NEUTRAL})
        body = {**SAMPLED, "stop_token_ids": [5, 257], "logit_bias": {"7": -100, "3": 1.5, "9": 0}}
        assert (await bench.post(path, {"model": MODEL, **said, "max_tokens": 4, "seed": 1, **body})).status == 200
        assert plain.json["choices"] == neutral.json["choices"]
        first, second, third = (submission.sampling for submission in bench.workers[0].submissions)
        assert first == second
        for name, value in SAMPLED.items():
            assert getattr(third, name) == value, name
        assert list(third.stop_token_ids) == [5, 257]
        assert [(each.token, each.bias) for each in third.logit_bias] == [(3, 1.5), (7, -100)]
        assert not third.HasField("logprobs")


@pytest.mark.parametrize("prompts", [["jay ", "pi"], [list(b"jay "), list(b"pi")]])
async def test_an_echo_comes_before_the_text(prompts):
    async with running_lb() as bench, client_of(bench) as client:
        ask = {"model": MODEL, "prompt": prompts, "max_tokens": 3, "echo": True}
        answer = await client.completions.create(**ask)
        assert texts(answer.choices) == ["jay " + expected_text(4, 3), "pi" + expected_text(2, 3)]
        found = {0: "", 1: ""}
        async for part in await client.completions.create(**ask, stream=True):
            found[part.choices[0].index] += part.choices[0].text
        assert list(found.values()) == texts(answer.choices)
        only = await client.completions.create(**{**ask, "max_tokens": 0})
        assert texts(only.choices) == ["jay ", "pi"]
        assert [choice.finish_reason for choice in only.choices] == ["length"] * 2
        assert (only.usage.prompt_tokens, only.usage.completion_tokens) == (6, 0)
        parts = [part async for part in await client.completions.create(**{**ask, "max_tokens": 0}, stream=True)]
        assert sorted(part.choices[0].text for part in parts) == ["jay ", "pi"]
        with pytest.raises(bad_request(), match="only with echo"):
            await client.completions.create(model=MODEL, prompt="a", max_tokens=0)
        await bench.idle()


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_usage_is_told_all_along_if_asked_for(path):
    """guidellm asks for usage with every stream, and ``vllm bench serve`` with the last chunk."""
    said = {"messages": HI} if path == CHAT else {"prompt": "aaaaaa"}
    async with running_lb() as bench:
        body = {"model": MODEL, **said, "max_tokens": 3, "stream": True, "repetition_penalty": 1.0}
        options = {"include_usage": True, "continuous_usage_stats": True}
        reply = await bench.post(path, {**body, "stream_options": options})
        *chunks, last = [json.loads(event) for event in reply.events[:-1]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 3
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {6}
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 9)
        reply = await bench.post(path, {**body, "stream_options": {"continuous_usage_stats": True}})
        chunks = [json.loads(event) for event in reply.events[:-1]]
        assert chunks[-1]["usage"]["total_tokens"] == 9
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        await bench.idle()


async def test_token_ids_are_returned_if_asked_for():
    async with running_lb() as bench:
        made = list(expected_text(3, 4).encode())
        reply = await bench.complete("jay", max_tokens=4, return_token_ids=True)
        (choice,) = reply.json["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(b"jay"), made)
        reply = await bench.complete("jay", max_tokens=4, return_token_ids=True, stream=True)
        parts = [json.loads(event)["choices"][0] for event in reply.events[:-1]]
        assert parts[0]["prompt_token_ids"] == list(b"jay")
        assert not any("prompt_token_ids" in part for part in parts[1:])
        assert [token for part in parts for token in part["token_ids"]] == made
        body = {"model": MODEL, "messages": HI, "max_tokens": 4, "return_token_ids": True}
        answer = (await bench.post(CHAT, body)).json
        assert answer["prompt_token_ids"] == [256, 259, *b"hi", 262, 260]
        assert answer["choices"][0]["token_ids"] == list(expected_text(6, 4).encode())
        events = (await bench.post(CHAT, {**body, "stream": True})).events[:-1]
        chunks = [json.loads(event) for event in events]
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
            answer["prompt_token_ids"]
        ]
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == list(
            expected_text(6, 4).encode()
        )


async def test_reports_of_several_choices():
    async with running_lb() as bench:
        asked = {"x-pinyon-report": "1"}
        whole = (await bench.complete("ab", asked, n=2, max_tokens=1)).json["pinyon"]
        assert [report["prefill_instance"] for report in whole["choices"]] == ["w0", "w0"]
        events = (await bench.complete("ab", asked, n=2, max_tokens=1, stream=True)).events
        assert len(json.loads(events[-2])["pinyon"]["choices"]) == 2
        await bench.idle()


# ---------------------------------------------------------------- log-probabilities

GENERATED = "né!".encode()
"""Four tokens, two of which are half a character each."""
SAID = tuple(zip(("n", "", "é", "!"), GENERATED, strict=True))


def likely(tokens, count: int) -> list[TokenLogprob]:
    """Returns log-probabilities that fall with the token's id; the likeliest tokens are others."""
    top = tuple((97 + rank, -rank / 10) for rank in range(count))
    return [TokenLogprob(-token / 100, top) for token in tokens]


@pytest.fixture
async def told():
    """A client of a load balancer, and its instance, which generates ``GENERATED`` with log-probabilities."""
    async with running_lb(workers=1) as bench:
        (worker,) = bench.workers
        worker.says, worker.logprobs_of = SAID, likely
        async with client_of(bench) as client:
            yield client, worker


async def test_log_probabilities_of_a_completion(told):
    client, worker = told
    answer = await client.completions.create(model=MODEL, prompt="ab", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "né!"
    assert logprobs.tokens == ["n", "\ufffd", "\ufffd", "!"]
    assert logprobs.token_logprobs == pytest.approx([-token / 100 for token in GENERATED])
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs[0] == pytest.approx({"a": 0.0, "b": -0.1, "n": -1.1})
    asked = worker.submissions[0].sampling
    assert (asked.logprobs, asked.prompt_logprobs) == (2, False)
    none = await client.completions.create(model=MODEL, prompt="ab", max_tokens=4, logprobs=0)
    assert none.choices[0].logprobs.top_logprobs[3] == pytest.approx({"!": -0.33})
    assert (await client.completions.create(model=MODEL, prompt="ab", max_tokens=4)).choices[0].logprobs is None


async def test_of_two_tokens_with_one_text_the_likelier_is_told(told):
    """Clients take the largest log-probability of a text to learn whether its token was the likeliest."""
    client, worker = told
    worker.logprobs_of = lambda tokens, _: [TokenLogprob(-3.0, ((0xC2, -1.0), (0xC4, -2.0))) for _ in tokens]
    answer = await client.completions.create(model=MODEL, prompt="ab", max_tokens=2, logprobs=2)
    assert answer.choices[0].logprobs.top_logprobs[1] == {"\ufffd": -1.0}
    assert answer.choices[0].logprobs.token_logprobs[1] == -3.0
    ids = await client.completions.create(
        model=MODEL, prompt="ab", max_tokens=2, logprobs=2, extra_body={"return_tokens_as_token_ids": True}
    )
    assert ids.choices[0].logprobs.top_logprobs[1] == {"token_id:194": -1.0, "token_id:196": -2.0, "token_id:195": -3.0}


async def test_what_lm_eval_sends(told):
    """Lists of tokens, an echo, one token that is not used, and log-probabilities of the prompt."""
    client, worker = told
    prompts = [list("né".encode()), list(b"abc")]
    for max_tokens in (1, 0):
        ask = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1,
               "seed": 1234, "echo": True}  # fmt: skip
        answer = await client.completions.create(**ask)
        assert all(each.sampling.prompt_logprobs and each.sampling.max_tokens == 1 for each in worker.submissions)
        first, second = (choice.logprobs for choice in answer.choices)
        assert second.tokens == [*"abc", *"n"[:max_tokens]]
        assert second.token_logprobs[0] is None
        assert second.token_logprobs[1:] == pytest.approx([-0.98, -0.99, *[-1.1][:max_tokens]])
        assert second.top_logprobs[0] is None
        assert second.top_logprobs[1] == pytest.approx({"a": 0.0, "b": -0.98})
        assert second.top_logprobs[2] == pytest.approx({"a": 0.0, "c": -0.99})
        assert second.text_offset == [0, 1, 2, *[3][:max_tokens]]
        assert first.text_offset == [0, 1, 1, *[2][:max_tokens]]
        assert texts(answer.choices) == ["né" + "n"[:max_tokens], "abc" + "n"[:max_tokens]]
        assert answer.usage.completion_tokens == 2 * max_tokens
        streamed: dict[int, list] = {0: [], 1: []}
        async for part in await client.completions.create(**ask, stream=True):
            streamed[part.choices[0].index].append(part.choices[0].logprobs)
        for index, whole in ((0, first), (1, second)):
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                found = [entry for part in streamed[index] for entry in getattr(part, name)]
                assert found == getattr(whole, name)


async def test_log_probabilities_of_a_chat(told):
    client, worker = told
    ask = {"model": MODEL, "messages": HI, "max_tokens": 4}
    answer = await client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["n", "\ufffd", "\ufffd", "!"]
    assert b"".join(bytes(entry.bytes) for entry in content) == GENERATED
    assert [(top.token, top.logprob, top.bytes) for top in content[0].top_logprobs] == [
        ("a", 0.0, [97]),
        ("b", pytest.approx(-0.1), [98]),
    ]
    assert worker.submissions[0].sampling.logprobs == 2
    chunks = [chunk async for chunk in await client.chat.completions.create(**ask, logprobs=True, stream=True, n=2)]
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        entries = [entry for choice in own if choice.logprobs for entry in choice.logprobs.content]
        assert [entry.logprob for entry in entries] == pytest.approx([-token / 100 for token in GENERATED])
        assert not any(entry.top_logprobs for entry in entries)
        assert "".join(choice.delta.content or "" for choice in own) == "né!"
    with pytest.raises(bad_request(), match="needs logprobs"):
        await client.chat.completions.create(**ask, top_logprobs=2)


async def test_a_call_fails_where_an_instance_tells_no_logprobs():
    async with running_lb() as bench:
        for worker in bench.workers:
            worker.tells_logprobs = False
        reply = await bench.complete("a", logprobs=1, max_tokens=2)
        assert (reply.status, reply.json["error"]["code"]) == (500, "internal_error")
        await bench.idle()


async def test_many_log_probabilities_are_as_few_are(told):
    client, _ = told
    prompt = [97 + index % 26 for index in range(3000)]
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, logprobs=3, echo=True)
    assert len(answer.choices[0].logprobs.tokens) == 3001
    assert answer.choices[0].logprobs.text_offset == list(range(3001))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [[97] * 3000] * 2, "echo": True, "logprobs": 5}),
        ("/v1/completions", {"prompt": [[97] * 3000] * 2, "n": 2, "return_token_ids": True}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}], "n": 2, "return_token_ids": True}),
    ],
    ids=["log-probabilities", "token ids", "token ids of a conversation"],
)
async def test_long_answers_are_written_in_pieces_off_the_event_loop(monkeypatch, stream, path, fields):
    beside, pieces = [], []
    written = openai_choices._json
    monkeypatch.setattr(openai_choices, "PIECE_ENTRIES", 512)
    monkeypatch.setattr(completions, "INLINE_ENTRIES", 2048)

    def seen(value):
        text = written(value)
        pieces.append(0 if type(value) is openai_choices.Written else len(text))
        return text

    monkeypatch.setattr(openai_choices, "_json", seen)
    async with running_lb(1) as bench:
        run = bench.lb.off_loop.run

        def spy(name, work, *arguments):
            beside.append(work.__name__)
            return run(name, work, *arguments)

        monkeypatch.setattr(bench.lb.off_loop, "run", spy)
        reply = await bench.post(path, {"model": MODEL, "max_tokens": 2, "stream": stream, **fields})
        assert reply.status == 200
        assert len(reply.body) > 12_000
        assert ("event" if stream else "whole") in beside
        assert max(pieces) < 20_000
        if not stream:
            choices = reply.json["choices"]
            if "echo" in fields:
                told = choices[0]["logprobs"]
                assert [len(told[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [3002] * 3
                assert all(len(top) >= 5 for top in told["top_logprobs"][1:])
                assert told["text_offset"] == list(range(3002))
            elif path == CHAT:
                assert len(reply.json["prompt_token_ids"]) > 3000
            else:
                assert [choice["prompt_token_ids"] for choice in choices] == [[97] * 3000] * 4
        await bench.idle()


async def test_log_probabilities_of_all_prompts_of_a_call_are_bounded():
    """Each prompt alone has few enough for an instance."""
    async with running_lb(1) as bench:
        ask = {"prompt": [[97] * 4000] * 5, "echo": True, "max_tokens": 0}
        refused = await bench.post("/v1/completions", {"model": MODEL, **ask, "n": 4, "logprobs": 20})
        assert (refused.status, refused.json["error"]["param"]) == (400, "logprobs")
        assert "1680000" in refused.json["error"]["message"]
        assert not bench.workers[0].submissions
