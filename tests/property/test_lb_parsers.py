"""The load balancer's parsers return a value or a named refusal for any input."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.block_keys import chain_block_keys, namespace
from pinyon.core.errors import InvalidArgument, PinyonError, ResourceExhausted, Unauthenticated
from pinyon.core.request import NO_LIMIT, SamplingParams
from pinyon.frontdoor.admission import RateLimited
from pinyon.frontdoor.auth import Client, load_api_keys
from pinyon.frontdoor.failures import Broke, NoRoom, Refused
from pinyon.frontdoor.head import Head, classify, read_head
from pinyon.frontdoor.instances.prompts import KeyChains
from pinyon.http.answer import HttpError
from pinyon.openai.format import ChatFormat, CompletionFormat, error_body
from pinyon.openai.large import is_large
from pinyon.openai.parse import Call, parse_chat, parse_completion
from tests.long import usually

COMPLETION = {
    "model": "m", "prompt": "hello", "max_tokens": 4, "temperature": 0.5, "top_p": 1, "top_k": 0, "seed": 3,
    "stop": ["a"], "stream": True, "stream_options": {"include_usage": True}, "n": 1, "user": "u", "logit_bias": {},
    "echo": False, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "suffix": None, "logprobs": None,
    "ignore_eos": True, "priority": -3, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [],
}  # fmt: skip
CHAT = {
    "model": "m", "messages": [{"role": "user", "content": "hi", "type": "text", "tool_calls": [], "refusal": None}],
    "max_completion_tokens": 4, "temperature": 1,
    "stream": False, "n": 1, "metadata": {}, "store": False, "tools": [], "tool_choice": "auto", "stop": "x",
    "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "modalities": ["text"],
    "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}, "logit_bias": {"3": 1},
}  # fmt: skip

CALL = Call("m", "text", "prompt")

scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8) | st.just("hello")
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)


@st.composite
def bodies(draw, base):
    """Returns a valid body with some fields changed, dropped or added, and perhaps some bytes damaged."""
    fields = dict(base)
    for name in draw(st.lists(st.sampled_from(sorted(base)), max_size=4)):
        if draw(st.booleans()):
            fields.pop(name, None)
        else:
            fields[name] = draw(values)
    fields.update(draw(st.dictionaries(st.text(max_size=8), values, max_size=1)))
    raw = bytearray(json.dumps(fields).encode())
    for position in draw(st.lists(st.integers(0, len(raw) - 1), max_size=2)):
        raw[position] = draw(st.integers(0, 255))
    return bytes(raw)


def check(call: Call) -> None:
    assert isinstance(call.model, str)
    assert call.prompt
    sampling = call.sampling
    assert 0 < sampling.max_tokens < 1 << 31 or sampling.max_tokens == NO_LIMIT
    assert 0 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.seed < 1 << 64 if call.seeded else not sampling.seed
    assert all(isinstance(text, str) and text for text in sampling.stop)
    assert type(call.stream) is bool


def outcome(parse, *arguments):
    """Returns ``(value, None)`` or ``(None, refusal)``; anything else fails the test."""
    try:
        return parse(*arguments), None
    except (InvalidArgument, HttpError) as error:
        return None, error


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.data())
@pytest.mark.parametrize(("parse", "base"), [(parse_completion, COMPLETION), (parse_chat, CHAT)])
def test_bodies(parse, base, data):
    call, refusal = outcome(parse, data.draw(bodies(base) | st.binary(max_size=64)))
    if refusal is None:
        check(call)
    else:
        assert json.loads(error_body(refusal))["error"]["param"] == refusal.field


def test_the_bodies_above_are_good():
    parsed = parse_completion(json.dumps(COMPLETION).encode())
    said = {"model": "m", "prompt": "hello", "prompt_field": "prompt", "seeded": True, "stream": True}
    said |= {"include_usage": True, "user": "u", "priority": -3}
    said["sampling"] = SamplingParams(4, 0.5, seed=3, stop=("a",), ignore_eos=True)
    assert {name: getattr(parsed, name) for name in said} == said
    assert parsed.plain
    assert parse_chat(json.dumps(CHAT).encode()).sampling.max_tokens == 4


REFUSED = {
    "n": [17, 0, True],
    "best_of": [2],
    "logprobs": [21, True],
    "echo": [1],
    "suffix": ["x"],
    "logit_bias": [
        {"01": 2},
        {"-1": 2},
        {"²": 2},
        {"4294967296": 2},
        {"1": 101},
        {"1": True},
        {str(token): 1 for token in range(1025)},
    ],
    "presence_penalty": [2.1],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "min_p": [1.1],
    "min_tokens": [-1],
    "stop_token_ids": [[1 << 32], [1.0], list(range(65))],
    "use_beam_search": [True],
    "length_penalty": [2],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "guided_json": [{}],
    "kv_transfer_params": [{"a": 1}],
    "truncate_prompt_tokens": [10],
    "prompt_logprobs": [1],
    "store": [True],
    "max_tokens": [0, -1, 1.0],
    "temperature": [2.1, "1"],
    "top_p": [0],
    "top_k": [-2],
    "seed": [1.5, 1 << 64],
    "stop": [[""], ["a"] * 17, ["x" * 257]],
    "stream": [1],
    "stream_options": [{"x": True}],
    "prompt": [[], [1, "a"], [-1], [1 << 32], [True], 1, [[1], ["a"]], ["a", [1]], ["a", ""], ["a"] * 257, [[]]],
    "unknown": [None],
    "user": [1],
}


@pytest.mark.parametrize(("field", "value"), [(name, each) for name, those in REFUSED.items() for each in those])
def test_what_is_refused_names_its_field(field, value):
    with pytest.raises(InvalidArgument) as caught:
        parse_completion(json.dumps({**COMPLETION, field: value}).encode())
    assert caught.value.field == field
    assert field in caught.value.message


REFUSED_IN_CHATS = {
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
    "response_format": [{"type": "json_object"}],
    "logprobs": [1],
    "top_logprobs": [2, 21],
    "echo": [True],
    "add_special_tokens": [True],
    "chat_template": ["x"],
    "chat_template_kwargs": [[], {str(number): 1 for number in range(65)}],
    "continue_final_message": [True],
    "store": [True],
    "modalities": [["audio"]],
    "messages": [
        [{"role": "user", "content": "a", "tool_calls": [1]}],
        [{"role": "user", "content": "a", "type": "image"}],
        "hi",
    ],
    "max_tokens": [9],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, each) for name, those in REFUSED_IN_CHATS.items() for each in those]
)
def test_what_chat_refuses_names_its_field(field, value):
    with pytest.raises(InvalidArgument) as caught:
        parse_chat(json.dumps({**CHAT, field: value}).encode())
    assert caught.value.field == ("max_completion_tokens" if field == "max_tokens" else field)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [1]}, "Tool calling is not supported by this server: leave 'tools' out. It was [1]."),
        ({"functions": [1]}, "Tool calling is not supported by this server: leave 'functions' out. It was [1]."),
        (
            {"tool_choice": "required"},
            'Tool calling is not supported by this server: \'tool_choice\' may be "none" or "auto" only.'
            ' It was "required".',
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]},
            "Tool calling is not supported by this server: leave 'messages[0].tool_calls' out. It was [1].",
        ),
        (
            {"response_format": {"type": "json_object"}},
            'Structured output is not supported by this server: \'response_format\' may be {"type": "text"} only.'
            ' It was {"type": "json_object"}.',
        ),
        ({"logits_processors": ["a"]}, "'logits_processors' is not supported by this server: leave it out. It was "),
        ({"service_tier": "flex"}, '\'service_tier\' may be "auto" or "default" only. It was '),
    ],
)
def test_a_refusal_says_what_is_not_supported(given, message):
    with pytest.raises(InvalidArgument) as caught:
        parse_chat(json.dumps({**CHAT, **given}).encode())
    assert caught.value.message.startswith(message)


headers = st.lists(
    st.tuples(
        st.sampled_from(
            [b"x-request-id", b"traceparent", b"x-pinyon-no-reuse", b"x-pinyon-ttft-slo-ms", b"x-pinyon-report",
             b"authorization", b"expect", b"other"]
        ),
        st.binary(max_size=80) | st.sampled_from([b"1", b"0", b"250", b"abc-1", b"00-" + b"a" * 32]),
    ),
    max_size=8,
)  # fmt: skip


@settings(max_examples=usually(20, long=200), deadline=None)
@given(headers)
def test_heads(fields):
    head = Head("/v1/completions")
    _, refusal = outcome(read_head, head, fields)
    if refusal is None:
        assert len(head.log_id) <= 128
        assert len(head.traceparent) in (0, 55)
        assert 0 <= head.ttft_slo_ms < 1 << 31
        assert classify(head.labels, CALL, Client("t"), 0.0).tenant == "t", "what was read is good"
    assert head.request_id.encode("ascii")


@settings(max_examples=usually(20, long=200), deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.dictionaries(st.text(max_size=6), values, max_size=3).map(lambda keys: json.dumps(keys).encode())
)
def test_api_keys_files(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "keys"
    path.write_bytes(content)
    keys, refusal = outcome(load_api_keys, str(path))
    if refusal is None:
        with pytest.raises(Unauthenticated):
            keys.client("")
    else:
        assert refusal.field == "api_keys_file"


@settings(max_examples=usually(20, long=200), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.text(max_size=5), st.booleans())
def test_any_text_survives_as_json(text, model, usage):
    for make in (CompletionFormat, ChatFormat):
        written = make("id", model.encode("utf-8", "replace").decode(), 1, usage)
        events = written.first + written.text(text) + written.finish(text, "stop")
        parsed = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n")[:-1]]
        found = "".join(
            choice.get("text", "") or (choice.get("delta") or {}).get("content", "")
            for event in parsed
            for choice in event["choices"]
        )
        assert found == text + text
        assert parsed[-1]["choices"][0]["finish_reason"] == "stop"


@settings(max_examples=usually(20, long=100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 5)), max_size=12), st.integers(1, 4))
def test_key_chains_are_those_of_the_core(prompts, block_tokens):
    chains = KeyChains(runs=4)
    starts = [namespace("model", "layout", tenant) for tenant in "abc"]
    for tenant, shared, own in prompts:
        tokens = b"\1\0\0\0" * shared + b"".join(index.to_bytes(4, "little") for index in range(own * 10))
        expected = b"".join(chain_block_keys(starts[tenant], tokens, block_tokens))
        assert chains.packed(starts[tenant], tokens, block_tokens) == expected
        assert len(chains) <= 4


def test_every_error_of_the_tree_becomes_an_object():
    def tree(cls):
        yield cls
        for child in cls.__subclasses__():
            yield from tree(child)

    make = {
        HttpError: lambda text: HttpError(500, text),
        Broke: lambda text: Broke(text, begun=False),
        NoRoom: lambda text: NoRoom(text, lasting=False),
        Refused: lambda text: Refused(text, 503, b"", b"", b""),
        RateLimited: lambda text: RateLimited(ResourceExhausted(text), b""),
    }
    for cls in tree(PinyonError):
        error = make.get(cls, cls)("m")
        assert json.loads(error_body(error))["error"]["message"] == "m"


def token_list(dice: random.Random) -> list[int]:
    return [dice.randrange(1 << dice.choice([1, 8, 16, 32])) for _ in range(dice.randrange(9000, 9100))]


token_lists = st.integers(0, 1 << 32).map(lambda seed: token_list(random.Random(seed)))


@settings(max_examples=20, deadline=None)
@given(
    token_lists, st.booleans(), st.sampled_from([None, (",", ":"), (" , ", " :\n")]), st.text(max_size=20), st.data()
)
def test_large_bodies_are_read_as_small_ones_are(tokens, nested, separators, text, data):
    """The list's format and the fields around it do not matter; damaged input is refused or reads the same."""
    fields = {
        "user": text,
        "stop": ['"prompt":[1,2'],
        "model": "m",
        "prompt": [tokens] if nested else tokens,
        "seed": 1,
    }
    names = data.draw(st.permutations(list(fields)))
    raw = bytearray(json.dumps({name: fields[name] for name in names}, separators=separators).encode())
    assert is_large(raw)
    expected, _ = outcome(read_small, bytes(raw))
    call, refusal = outcome(parse_completion, bytes(raw))
    if text and any(ord(char) < 32 or ord(char) == 127 for char in text):
        assert refusal is not None
    elif refusal is None:
        assert call.prompt == np.array(tokens, "<u4").tobytes() == np.array(expected, "<u4").tobytes()
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] = data.draw(st.sampled_from(list(b'0,] -"x[\n\\9')))
    expected, invalid = outcome(read_small, bytes(raw))
    call, refusal = outcome(parse_completion, bytes(raw))
    if refusal is None:
        assert invalid is None
        assert call.prompt == np.array(expected, "<u4").tobytes()


@settings(max_examples=20, deadline=None)
@given(st.lists(token_lists, min_size=2, max_size=4), st.sampled_from([None, (",", ":"), (" , ", " :\n")]), st.data())
def test_several_large_lists_are_as_many_prompts(lists, separators, data):
    raw = bytearray(json.dumps({"model": "m", "prompt": lists, "seed": 1}, separators=separators).encode())
    call = parse_completion(bytes(raw))
    assert [call.prompt, *call.others] == [np.array(tokens, "<u4").tobytes() for tokens in lists]
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from(list(b'0,] -"x[\n\\9')))
    call, refusal = outcome(parse_completion, bytes(raw))
    if refusal is None:
        found = json.loads(raw)["prompt"]
        expected = found if type(found[0]) is list else [found]
        assert [call.prompt, *call.others] == [np.array(tokens, "<u4").tobytes() for tokens in expected]


def read_small(raw: bytes) -> list[int]:
    try:
        prompt = json.loads(raw, parse_constant=None)["prompt"]
    except (ValueError, KeyError):
        raise InvalidArgument("no JSON") from None
    return prompt[0] if type(prompt[0]) is list else prompt


@pytest.mark.parametrize(
    "prompt",
    [
        "01" + ",1" * 20_000,
        "1 2" + ",1" * 20_000,
        "1,,2" + ",1" * 20_000,
        "1,2," * 10_000,
        "1" + ",1" * 20_000 + ",",
        "4294967296" + ",1" * 20_000,
        "99999999999999999999999" + ",1" * 20_000,
        "1" + ",1" * 20_000 + ",1.5",
        "1" + ",1" * 20_000 + ",-1",
        "1" + ",1" * 20_000 + ",[1]",
        "1" * 100_000,
    ],
)
def test_large_lists_that_are_no_tokens_are_refused(prompt):
    for text in (prompt, f"[{prompt}]"):
        with pytest.raises(InvalidArgument):
            parse_completion(f'{{"model":"m","prompt":[{text}]}}'.encode())


def test_what_looks_like_a_prompt_inside_of_a_string_is_none():
    trap = '"prompt":[' + "1," * 20_000 + "1]"
    body = json.dumps({"model": "m", "stop": ["a"], "prompt": trap}).encode()
    assert parse_completion(body).prompt == trap
    nested = json.dumps({"model": "m", "logit_bias": {"prompt": [1] * 20_000}, "prompt": "a"}).encode()
    with pytest.raises(InvalidArgument, match="logit_bias"):
        parse_completion(nested)
    twice = b'{"model":"m","prompt":[' + b"1," * 20_000 + b'1],"prompt":"last"}'
    assert parse_completion(twice).prompt == "last"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {str(number): 1 for number in range(40_000)}),
        ("stop", [["a"]] * 40_000),
        ("stop", list(range(40_000))),
    ],
)
def test_bodies_of_too_many_parts_are_refused_unread(field, value):
    with pytest.raises(InvalidArgument, match="has more than"):
        parse_chat(json.dumps({**CHAT, field: value}).encode())
