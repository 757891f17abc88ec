"""Streams that go on at another server, against a plain model of vLLM's servers: the client sees one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.servers.so_far import StreamSoFar, followed
from tests.long import usually

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PIECES = ("a", "b", "ab", "ba", " ", "", "é", "aab", '"token_ids":[1]')
HALF, REST, END = 20, 21, 30
"""Two tokens that are one character together, and the one that ends an answer."""


def next_token(tokens: list[int]) -> int:
    """Returns the likeliest token: it depends on all before it."""
    number = crc32(json.dumps(tokens).encode())
    if tokens[-1] == HALF:
        return REST
    return END if number % 40 == 7 else HALF if number % 9 == 3 else number % len(PIECES)


def text_of(tokens: list[int]) -> str:
    """Returns what ``/detokenize`` says: a half character at either end shows as such."""
    text = ""
    for before, token in zip([0, *tokens], tokens, strict=False):
        text += PIECES[token] if token < len(PIECES) else ""
        text += {REST: "ł" if before == HALF else "\ufffd", END: "<end>"}.get(token, "")
    return text + ("\ufffd" if tokens[-1:] == [HALF] else "")


class Server:
    """A model of vLLM's streams: the text after each token, with stop strings, and what it holds back for them. Its
    route for chats ``parses``: an "a" at the end could become a call, and is told with the next token."""

    def __init__(self, prompt: list[int], rng: Random, *, parses: bool = False) -> None:
        self.prompt, self.rng, self.parses = prompt, rng, parses

    def events(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        prompt = body["prompt"] if type(body.get("prompt")) is list else self.prompt
        chat, name = path == CHAT, f"id-{self.rng.random()}"
        head = {"id": name, "object": "chunk" if chat else "text", "created": 1, "model": "m"}
        if chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield event({**head, "choices": [choice], "prompt_token_ids": prompt})
        limit = body.get("max_tokens")
        if limit is None:
            limit = 400 - len(prompt) if chat else 16
        assert len(prompt) + limit <= 400 or "max_tokens" not in body, "vLLM refuses what is longer than its context"
        stops = body.get("stop") or []
        include = bool(body.get("include_stop_str_in_output"))
        back = max(map(len, stops), default=1) - 1 if not include else 0
        tokens, text, told, group, first = list(prompt), "", 0, list[int](), not chat
        size = self.rng.randrange(1, 4)
        while True:
            token = next_token(tokens)
            tokens.append(token)
            group.append(token)
            made = len(tokens) - len(prompt)
            reason, before = None, len(text)
            if token == REST:
                text += "ł" if made > 1 else "\ufffd"
            elif token < len(PIECES):
                text += PIECES[token]
            if token == END and not body.get("ignore_eos") and made > (body.get("min_tokens") or 0):
                reason = "stop"
            elif made > (body.get("min_tokens") or 0):
                found = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
                if found := [each for each in found if each[0] >= 0]:
                    at, stop = min(found)
                    text, reason = text[: at + (len(stop) if include else 0)], "stop"
            if reason is None and made >= limit:
                reason = "length"
            if reason is None and len(tokens) > 400:  # the longest context
                reason = "length"
            if len(group) < size and reason is None:
                continue
            end = len(text) if reason else max(told, len(text) - back)
            if chat and self.parses and not reason and text[told:end].endswith("a"):
                end -= 1
            fresh, told = text[told:end], max(told, end)
            choice = {"index": 0, "finish_reason": reason, "token_ids": group}
            choice |= {"delta": {"content": fresh} if fresh else {}} if chat else {"text": fresh}
            if first:
                choice, first = {**choice, "prompt_token_ids": prompt}, False
            yield event({**head, "choices": [choice]})
            group, size = [], self.rng.randrange(1, 4)
            if reason:
                break
        if (body.get("stream_options") or {}).get("include_usage"):
            used = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}
            yield event({**head, "choices": [], "usage": used})
        yield b"data: [DONE]\n\n"


def event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()


def answer(events: bytes) -> dict[str, Any]:
    """Returns what a client makes of the events."""
    chunks = [json.loads(each[6:]) for each in events.decode().split("\n\n") if each.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices)
    return {
        "text": text,
        "tokens": [token for each in choices for token in each.get("token_ids", [])],
        "prompt": [each["prompt_token_ids"] for each in (*chunks, *choices) if "prompt_token_ids" in each],
        "reasons": [each["finish_reason"] for each in choices if each["finish_reason"]],
        "roles": [each["delta"]["role"] for each in choices if "role" in each.get("delta", ())],
        "ids": len({chunk["id"] for chunk in chunks}),
        "object": {chunk["object"] for chunk in chunks},
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
        "done": events.count(b"[DONE]"),
    }


FIELDS = st.fixed_dictionaries(
    {"temperature": st.just(0), "stream": st.just(True)},
    optional={
        "max_tokens": st.integers(1, 120),
        "stop": st.lists(st.sampled_from(("aba", "ba ", "ab", "éa", "łb", "bbbb")), min_size=1, max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 20),
        "stream_options": st.just({"include_usage": True}),
        "return_token_ids": st.just(True),
    },
)


@settings(max_examples=usually(200, long=5000), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((CHAT, COMPLETION)), FIELDS)
def test_a_killed_stream_is_as_one_that_lived(seed: int, path: str, fields: dict[str, Any]) -> None:
    rng = Random(seed)
    prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
    asked = {"model": "m", "messages" if path == CHAT else "prompt": [] if path == CHAT else "p", **fields}
    so_far = followed(path, asked)
    assert so_far is not None
    parses = rng.random() < 0.5
    whole = b"".join(Server(prompt, rng, parses=parses).events(path, asked))
    expected = answer(StreamSoFar(path, asked, 0).passed(whole))
    got, url, body = b"", path, asked
    for kills in range(rng.randrange(4), -1, -1):
        events = list(Server(prompt, rng, parses=parses).events(url, body))
        cut = rng.randrange(len(events)) if kills else len(events)
        for each in events[:cut]:
            got += so_far.passed(each)
        if cut == len(events):
            break
        if not so_far.begun:
            continue
        if not so_far.can_go_on:
            assert b'"finish_reason":"' in got
            return
        if so_far.chat:
            so_far.answered(text_of(json.loads(so_far.question("m"))["tokens"]))
        named, changed = so_far.request()
        url, body = named.decode(), asked if changed is None else json.loads(changed)
    assert answer(got) == expected
    assert bool(expected["tokens"]) is bool(fields.get("return_token_ids"))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5}, {"temperature": None}, {"temperature": False}, {"stream": False}, {"n": 2},
        {"logprobs": 0}, {"logprobs": True}, {"frequency_penalty": 0.1}, {"echo": True}, {"tools": [{}]},
        {"response_format": {"type": "json_object"}}, {"guided_regex": "a"}, {"bad_words": ["a"]},
        {"return_token_ids": False}, {"return_token_ids": None},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": "all"}, {"stop": "a" * 2000}, {"stop": [1]}, {"max_tokens": "5"},
        {"stream_options": 5}, {"min_tokens": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_exact_is_not_followed(fields: dict[str, Any]) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": True}
    assert followed(CHAT, asked) is not None
    assert followed(CHAT, asked | fields) is None
    assert followed("/v1/responses", asked) is None


def chunk(**choice: Any) -> bytes:
    return event({"id": "x", "choices": [{"index": 0, "finish_reason": None, **choice}]})


def begun(**fields: Any) -> StreamSoFar:
    so_far = followed(CHAT, {**fields, "temperature": 0.0, "stream": True, "messages": [], "tools": [], "n": 1})
    assert so_far is not None
    so_far.passed(event({"id": "x", "choices": [], "prompt_token_ids": [1, 2]}))
    return so_far


def test_tools_in_the_middle_of_a_stream_are_refused() -> None:
    so_far = begun()
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[3]))
    assert so_far.can_go_on
    so_far.passed(chunk(delta={"tool_calls": [{"index": 0}]}, token_ids=[4]))
    assert not so_far.can_go_on


def test_thoughts_are_refused_also_after_they_ended() -> None:
    so_far = begun()
    so_far.passed(chunk(delta={"reasoning": "hm"}, token_ids=[3]))
    assert not so_far.can_go_on
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[4]))
    assert not so_far.can_go_on


@pytest.mark.parametrize("limit", [None, 100])
def test_a_chat_goes_on_by_its_tokens_if_it_names_a_limit(limit: int | None) -> None:
    so_far = begun(max_completion_tokens=limit)
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[3]))
    assert so_far.answered("a")
    path, body = so_far.request()
    if limit is None:
        assert (path, body) == (CHAT.encode(), None)
    else:
        assert path == COMPLETION.encode()
        sent = json.loads(body or b"")
        assert (sent["prompt"], sent["max_tokens"]) == ([1, 2, 3], 99)


def test_a_chat_whose_tokens_say_more_is_asked_for_again() -> None:
    so_far = begun(max_tokens=100)
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[3]))
    assert not so_far.answered("a <")
    assert so_far.request() == (CHAT.encode(), None)


@pytest.mark.parametrize("said", [{"error": {"message": "the engine died"}}, {"choices": [{"finish_reason": "abort"}]}])
def test_a_server_that_gives_up_breaks_the_stream(said: dict[str, Any]) -> None:
    so_far = begun()
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[3]))
    with pytest.raises(Broke) as told:
        so_far.passed(event(said))
    assert told.value.its_fault is ("choices" in said), "the request may be to blame for an error"


def test_a_stream_that_ends_before_its_answer_is_broken() -> None:
    so_far = begun()
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[3]))
    with pytest.raises(Broke):
        so_far.passed(b"data: [DONE]\n\n")


def test_the_end_is_told_once_if_the_connection_breaks_behind_it() -> None:
    so_far = begun()
    so_far.passed(chunk(delta={"content": "a"}, token_ids=[3], finish_reason="stop") + b"data: [DONE]\n\n")
    assert so_far.ending() == b""


@pytest.mark.parametrize(
    "odd", [b"{", b"{}}", b'{"choices":[7]}', b'{"choices":[{"index":0,"token_ids":[-1]}]}'], ids=str
)
def test_odd_events_pass_as_they_are(odd: bytes) -> None:
    so_far = begun()
    event = b"data: %b\n\n" % odd
    assert so_far.passed(event + b": a comment\n\n") == event + b": a comment\n\n"
    assert not so_far.can_go_on


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a"], None])
def test_several_prompts_are_not_followed(prompt: object) -> None:
    assert followed(COMPLETION, {"temperature": 0, "stream": True, "prompt": prompt}) is None


def test_text_without_tokens_cannot_go_on() -> None:
    so_far = begun()
    so_far.passed(chunk(delta={"content": "a"}))
    assert not so_far.can_go_on


def test_a_server_that_says_something_else_is_an_error() -> None:
    so_far = followed(COMPLETION, {"temperature": 0, "stream": True, "prompt": "p", "stop": ["xyz"]})
    assert so_far is not None
    so_far.passed(chunk(text="abc", token_ids=[3], prompt_token_ids=[1]))
    so_far.passed(chunk(text="def", token_ids=[4, 5, 6]))
    so_far.request()
    with pytest.raises(Broke):
        so_far.passed(chunk(text="other", token_ids=[7]))
