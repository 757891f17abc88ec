"""The official openai client against the load balancer."""

from __future__ import annotations

import pytest

from tests.cluster.asking import openai_client


@pytest.fixture
def client(cluster):
    with openai_client(cluster) as client:
        yield client


def test_streaming_gives_the_same_text(client):
    ask = {"model": "pinyon-tiny", "prompt": "The jay caches seeds" * 4, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    parts = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 12


def test_chat(client):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What do jays cache?"}]
    ask = {"model": "pinyon-tiny", "messages": messages, "max_tokens": 10, "temperature": 0.7, "seed": 11}
    whole = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True))
    assert whole.choices[0].message.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_second_turn_reuses_the_first(client):
    messages = [{"role": "user", "content": "Tell me about pines and jays. " * 20}]
    first = client.chat.completions.create(model="pinyon-tiny", messages=messages, max_tokens=8, temperature=0)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    cached = []
    for question in ("And then?", "Why?", "Where?", "When?", "Who?"):
        asked = [*messages, {"role": "user", "content": question}]
        answer = client.chat.completions.create(model="pinyon-tiny", messages=asked, max_tokens=8, temperature=0)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    # Where another instance is sooner done without it (the holder is or was busy), nothing is reused.
    assert max(cached) > 0.5 * first.usage.prompt_tokens, cached


def test_stop_strings_end_the_text(client):
    ask = {"model": "pinyon-tiny", "prompt": "stop here", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[8:11]
    cut = client.completions.create(**ask, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_several_choices_are_those_of_calls_of_their_own(client):
    ask = {"model": "pinyon-tiny", "max_tokens": 8, "temperature": 0.8}
    prompts = ["The jay caches", "Pines grow"]
    together = client.completions.create(**ask, prompt=prompts, n=2, seed=5, echo=True)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(together.choices):
        prompt = prompts[index // 2]
        alone = client.completions.create(**ask, prompt=prompt, seed=5 + index % 2)
        assert choice.text == prompt + alone.choices[0].text
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    assert together.usage.completion_tokens == 32
    streamed = dict.fromkeys(range(4), "")
    for part in client.completions.create(**ask, prompt=prompts, n=2, seed=5, echo=True, stream=True):
        streamed[part.choices[0].index] += part.choices[0].text
    assert list(streamed.values()) == [choice.text for choice in together.choices]
