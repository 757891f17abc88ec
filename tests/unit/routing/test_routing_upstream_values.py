"""The state of a load balancer before foreign servers: prompt texts, metrics pages, breakers, capacities."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.routing.breaker import Breaker, BreakerSettings
from pinyon.routing.learned_capacity import CAPACITY_MAX, LearnedCapacity
from pinyon.routing.prompt_text import TEXT_MAX, prompt_text
from pinyon.routing.server_load import SERVER_KINDS, kind_of_page, read_load
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


def test_an_absent_server_is_left_out_at_once_until_found() -> None:
    breaker = Breaker()
    breaker.add("a", 0.0)
    breaker.failed("a", 0.0, absent=True)
    assert not breaker.allows("a", 0.1)
    breaker.found("a")
    assert breaker.allows("a", 0.1)
    assert not breaker.is_open("a")


def test_failures_open_it_when_they_are_many_and_half_of_all() -> None:
    breaker = Breaker(BreakerSettings(failures=3, ratio=0.5, first_s=1.0, max_s=4.0))
    for name in "abc":
        breaker.add(name, 0.0)
    for _ in range(10):
        breaker.succeeded("a", 0.0, 0.0)
    for _ in range(9):
        breaker.failed("a", 0.0)
        assert breaker.allows("a", 0.0)
    breaker.failed("a", 0.0)
    assert not breaker.allows("a", 0.5)
    breaker.found("a")  # a peer that answers is no news
    assert not breaker.allows("a", 0.5)
    # The pause is over: one request tries the server.
    assert breaker.allows("a", 1.1)
    breaker.tried("a", 1.1)
    assert not breaker.allows("a", 1.1)
    breaker.failed("a", 1.2)
    assert not breaker.allows("a", 3.1)
    assert breaker.allows("a", 3.3)
    breaker.tried("a", 3.3)
    breaker.succeeded("a", 3.3, 3.4)
    assert breaker.allows("a", 3.4)
    assert not breaker.is_open("a")


def test_what_began_before_a_failure_says_nothing_of_it() -> None:
    breaker = Breaker(BreakerSettings(failures=1))
    for name in "ab":
        breaker.add(name, 0.0)
    breaker.failed("a", 5.0)
    breaker.succeeded("a", 4.0, 6.0)
    assert breaker.is_open("a")


def test_never_more_than_half_are_left_out_for_failing() -> None:
    breaker = Breaker(BreakerSettings(failures=1))
    for name in "abc":
        breaker.add(name, 0.0)
    for name in "abc":
        for _ in range(20):
            breaker.failed(name, 0.0)
    assert [name for name in "abc" if not breaker.allows(name, 0.0)] == ["a"]
    breaker.failed("b", 0.0, absent=True)  # an absent server gets nothing
    assert not breaker.allows("b", 0.0)


def test_old_failures_count_for_nothing() -> None:
    breaker = Breaker(BreakerSettings(failures=3, window_s=1.0))
    for name in "ab":
        breaker.add(name, 0.0)
    for second in range(100):
        breaker.failed("a", 10.0 * second)
        assert breaker.allows("a", 10.0 * second)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from(["failed", "absent", "succeeded", "found", "tried", "remove", "add"]),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_a_breaker_keeps_its_promises(steps: list) -> None:
    breaker, now_s, absent, there = Breaker(BreakerSettings(failures=2, window_s=2.0)), 0.0, set(), set()
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


def test_settings_are_checked() -> None:
    for wrong in ({"failures": 0}, {"ratio": 0.0}, {"ratio": 1.1}, {"window_s": 0.0}, {"first_s": 40.0}):
        with pytest.raises(ValueError, match="must be"):
            BreakerSettings(**wrong)


# ---------------------------------------------------------------- capacity


def test_a_capacity_is_learned_from_refusals_and_grows_slowly() -> None:
    learned = LearnedCapacity(8)
    assert not learned.served(7)  # whether more would have been too many is unknown
    assert [learned.served(8) for _ in range(8)] == [False] * 7 + [True]
    assert learned.value == 9
    assert learned.refused(5)
    assert learned.value == 3
    assert learned.refused(1)
    assert learned.value == 1
    assert not learned.refused(1)
    for _ in range(CAPACITY_MAX * CAPACITY_MAX):
        learned.served(CAPACITY_MAX)
    assert learned.value == CAPACITY_MAX
