"""The state of a load balancer before foreign servers: prompt texts, metrics pages, breakers, capacities."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.routing.breaker import FAILURES, Breaker
from pinyon.routing.prompt_text import TEXT_MAX, prompt_text
from pinyon.routing.server_load import CAPACITY_MAX, SERVER_KINDS, LearnedCapacity, kind_of_page, read_load
from pinyon.routing.target import Report

# ---------------------------------------------------------------- texts

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=20) | JSON}
    ),
    max_size=6,
)


def test_a_conversation_that_goes_on_begins_with_what_it_was() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which bird?"}]
    more = [*first, {"role": "assistant", "content": "A jay."}, {"role": "user", "content": "Why?"}]
    assert prompt_text({"messages": more}).startswith(prompt_text({"messages": first}))
    assert not prompt_text({"messages": more[1:]}).startswith(prompt_text({"messages": first}))


def test_tools_and_instructions_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"a": 1, "b": 2}}}]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    assert prompt_text(asked).startswith(b"tools\x1f[{")
    turned = json.loads('[{"function": {"parameters": {"b": 2, "a": 1}, "name": "look"}, "type": "function"}]')
    assert prompt_text(asked) == prompt_text({"tools": turned, "messages": asked["messages"]})
    assert prompt_text({"instructions": "Be brief.", "input": "x"}) == (b"instructions\x1fBe brief.\x1euser\x1fx\x1e")
    assert prompt_text({"system": [{"type": "text", "text": "Be brief."}], "messages": []}) == (
        b"system\x1fBe brief.\x1e"
    )


def test_parts_of_a_message() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]}
    assert prompt_text({"messages": [text]}) == prompt_text(
        {"messages": [{"role": "user", "content": "What is this?"}]}
    )
    picture = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}
    with_picture = {"role": "user", "content": [text["content"][0], picture]}
    found = prompt_text({"messages": [with_picture]})
    assert len(found) < 100
    other = {"role": "user", "content": [text["content"][0], {**picture, "image_url": {"url": "data:y"}}]}
    assert found != prompt_text({"messages": [other]})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("once", b"once"),
        (["once", "upon"], b"once"),
        ([1, 256], b"\1\0\0\0\0\1\0\0"),
        ([[1], [2]], b"\1\0\0\0"),
        (b"\1\0\0\0", b"\1\0\0\0"),
        ([b"\2\0\0\0", b"\1\0\0\0"], b"\2\0\0\0"),
        ([-1], b""),
        ([1.5], b""),
        (None, b""),
        ({"a": 1}, b""),
    ],
)
def test_prompts(prompt: object, text: bytes) -> None:
    assert prompt_text({"prompt": prompt}) == text


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "input", "tools", "system", "instructions"]), JSON))
def test_whatever_the_body_is_there_is_a_text(body: dict) -> None:
    assert len(prompt_text(body)) <= TEXT_MAX


@given(MESSAGES, MESSAGES)
def test_prefixes_of_conversations_are_prefixes_of_texts(before: list, after: list) -> None:
    assert prompt_text({"messages": before + after}).startswith(prompt_text({"messages": before}))


def test_what_is_too_long_is_cut() -> None:
    assert len(prompt_text({"messages": [{"role": "user", "content": "ü" * TEXT_MAX}] * 3})) == TEXT_MAX
    assert len(prompt_text({"prompt": [7] * TEXT_MAX})) == TEXT_MAX


# ---------------------------------------------------------------- metrics pages

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b \\" c"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0 1700000000000
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting_by_reason{engine="0"} 100.0
vllm:num_requests_waiting{engine="0",model_name="a"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a"} 0.0
"""


def test_gauges_are_found_and_added_up() -> None:
    kind = kind_of_page(VLLM)
    assert kind is not None
    assert kind.name == "vllm"
    assert read_load(kind, VLLM) == Report(pending=1, running=5)
    assert read_load(kind, VLLM.replace(b"\n", b"\r\n")) == Report(pending=1, running=5)


@pytest.mark.parametrize("kind", SERVER_KINDS, ids=lambda kind: kind.name)
def test_every_kind_is_known_by_its_own_gauges(kind) -> None:
    page = b'%b 7\n%b{a="b"} 2.0\n' % (kind.running, kind.pending)
    assert kind_of_page(page) is kind
    assert read_load(kind, page) == Report(pending=2, running=7)


@pytest.mark.parametrize(
    ("kind", "told", "capacity"),
    [
        ("sglang", {"internal_states": [{"effective_max_running_requests_per_dp": 7}], "max_running_requests": 9}, 7),
        ("sglang", {"internal_states": [], "max_running_requests": 9}, 9),
        ("sglang", {"internal_states": "x", "max_running_requests": 0}, 0),
        ("tgi", {"max_batch_size": 5}, 5),
        ("tgi", {"max_batch_size": True}, 0),
        ("llamacpp", {"total_slots": 1 << 21}, 0),
        ("vllm", {"max_batch_size": 5}, 0),
    ],
)
def test_a_kind_knows_where_a_server_says_its_capacity(kind: str, told: dict, capacity: int) -> None:
    assert next(each for each in SERVER_KINDS if each.name == kind).capacity(told) == capacity


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"x", b"", b"1" * 40, b"1e400"])
def test_what_is_no_number_of_requests_says_nothing(value: bytes) -> None:
    kind = SERVER_KINDS[0]
    assert read_load(kind, b"%b %b\n%b 1\n" % (kind.pending, value, kind.running)) is None


@given(st.binary(max_size=200))
def test_any_page_can_be_read(noise: bytes) -> None:
    for kind in SERVER_KINDS:
        for page in (noise, kind.pending + noise, kind.pending + b"{" + noise, VLLM + noise):
            load = read_load(kind, page)
            assert load is None or load.pending >= 0


# ---------------------------------------------------------------- breaker


def breaker_of(names: str) -> Breaker:
    breaker = Breaker()
    for name in names:
        breaker.add(name, 0.0)
    return breaker


def test_an_absent_server_is_left_out_at_once_until_found() -> None:
    breaker = breaker_of("a")
    breaker.failed("a", 0.0, absent=True)
    assert not breaker.allows("a", 0.1)
    breaker.found("a")
    assert breaker.allows("a", 0.1)
    assert not breaker.is_open("a")


def test_failures_open_it_when_they_are_many_and_half_of_all() -> None:
    breaker = breaker_of("abc")
    for _ in range(10):
        breaker.succeeded("a", 0.0, 0.0)
    for _ in range(9):
        breaker.failed("a", 0.0)
        assert breaker.allows("a", 0.0)
    breaker.failed("a", 0.0)
    assert not breaker.allows("a", 0.4)
    breaker.found("a")  # a peer that answers is no news
    assert not breaker.allows("a", 0.4)
    # The pause is over: one request tries the server.
    assert breaker.allows("a", 0.6)
    breaker.tried("a", 0.6)
    assert not breaker.allows("a", 0.6)
    breaker.failed("a", 0.7)
    assert not breaker.allows("a", 1.6)
    assert breaker.allows("a", 1.8)
    breaker.tried("a", 1.8)
    breaker.succeeded("a", 1.8, 1.9)
    assert breaker.allows("a", 1.9)
    assert not breaker.is_open("a")


def test_what_began_before_a_failure_says_nothing_of_it() -> None:
    breaker = breaker_of("ab")
    for _ in range(FAILURES):
        breaker.failed("a", 5.0)
    breaker.succeeded("a", 4.0, 6.0)
    assert breaker.is_open("a")


def test_never_more_than_half_are_left_out_for_failing() -> None:
    breaker = breaker_of("abc")
    for name in "abc":
        for _ in range(20):
            breaker.failed(name, 0.0)
    assert [name for name in "abc" if not breaker.allows(name, 0.0)] == ["a"]
    breaker.failed("b", 0.0, absent=True)  # an absent server gets nothing
    assert not breaker.allows("b", 0.0)


def test_old_failures_count_for_nothing() -> None:
    breaker = breaker_of("ab")
    for window in range(100):
        breaker.failed("a", 10.0 * window)
        assert breaker.allows("a", 10.0 * window)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from(["failed", "absent", "succeeded", "found", "tried", "remove", "add"]),
            st.floats(0, 5),
        ),
        max_size=100,
    )
)
def test_a_breaker_keeps_its_promises(steps: list) -> None:
    breaker, now_s, absent, there = Breaker(), 0.0, set(), set()
    for name, what, wait_s in steps:
        now_s += wait_s
        if what == "add":
            breaker.add(name, now_s)
            there.add(name)
        elif what == "remove":
            breaker.remove(name)
            there.discard(name)
            absent.discard(name)
        elif what == "succeeded":
            breaker.succeeded(name, now_s, now_s)
            absent.discard(name)
        elif what == "found":
            breaker.found(name)
            absent.discard(name)
        elif what == "tried":
            breaker.tried(name, now_s)
        else:
            breaker.failed(name, now_s, absent=what == "absent")
            if what == "absent" and name in there:
                absent.add(name)
                assert not breaker.allows(name, now_s)
        for each in "abcd":
            assert breaker.allows(each, now_s + 60.1)  # no server is left out for ever
            assert each in there or not breaker.is_open(each)


# ---------------------------------------------------------------- capacity


def test_a_capacity_is_learned_from_refusals_and_grows_slowly() -> None:
    learned = LearnedCapacity(8)
    assert not learned.served(7)  # whether more would have been too many is unknown
    assert [learned.served(8) for _ in range(8)] == [False] * 7 + [True]
    assert learned.value == 9
    for outstanding, value in ((5, 3), (1, 1), (1, 1)):
        learned.refused(outstanding)
        assert learned.value == value
    for _ in range(CAPACITY_MAX * CAPACITY_MAX):
        learned.served(CAPACITY_MAX)
    assert learned.value == CAPACITY_MAX
