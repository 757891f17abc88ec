"""The parts of ``./dev bench router``: prompts that never repeat, and stubs that count correctly."""

from __future__ import annotations

import json

import pytest

from bench.router import _counted
from bench.router_prompts import GROUPS, Prompts
from bench.router_sides import Side
from bench.router_stub import CHUNK_BYTES, Stub, tokenized


def prompts(requests: list[bytes]) -> list[str]:
    return [json.loads(request.partition(b"\r\n\r\n")[2])["prompt"] for request in requests]


def test_no_prompt_comes_twice_and_half_of_each_is_shared() -> None:
    made = Prompts(1, 8 << 10, stream=False)
    found = prompts(made.requests("x", 200) + made.requests("x", 200))
    half = (8 << 10) // 2
    assert all(len(each) == 8 << 10 for each in found)
    assert len(set(found)) == len({each[half:] for each in found}) == 400
    assert len({each[:half] for each in found}) <= GROUPS


def test_a_stub_counts_the_prefix_that_it_has_and_no_more() -> None:
    stub, text = Stub(100), "a" * CHUNK_BYTES

    def serve(prompt: str) -> tuple[int, int]:
        before = stub.asked, stub.hits
        stub.serve(json.dumps({"prompt": prompt}).encode())
        return stub.asked - before[0], stub.hits - before[1]

    assert serve(text * 3) == (3, 0)
    assert serve(text * 4) == (4, 3)
    assert serve("b" + text * 3) == (3, 0)  # the same chunks behind a different beginning
    small = Stub(2)
    small.serve(json.dumps({"prompt": text * 3}).encode())
    assert len(small.cache) == 2


def test_what_cannot_be_is_no_figure(monkeypatch) -> None:
    side, nothing = Side("x", "", []), dict.fromkeys(("requests", "others", "asked", "hits"), 0)

    def counted(sent: int, **seen: int) -> dict[str, float]:
        monkeypatch.setattr(Side, "stats", lambda _: nothing | seen)
        return _counted(side, nothing, sent)

    assert counted(4, requests=4, others=8, asked=8, hits=3) == {"hit_ratio": 0.375, "other_calls_per_request": 2.0}
    with pytest.raises(RuntimeError, match="4 requests were sent, and its servers got 20"):
        counted(4, requests=20, asked=40, hits=3)
    with pytest.raises(RuntimeError, match="half of each prompt is new"):
        counted(4, requests=4, asked=8, hits=5)


def test_tokens_are_answered_as_vllm_does() -> None:
    status, body = tokenized(b'{"prompt":"abcdabcdx"}')
    said = json.loads(body)
    assert status == 200
    assert said["count"] == 2
    assert said["tokens"][0] == said["tokens"][1]


def test_servers_without_tokens_say_that_they_have_none() -> None:
    stub = Stub()
    assert stub.tokenizes
    assert stub.page(b"/bare") == (200, b"{}")
    assert not stub.tokenizes
