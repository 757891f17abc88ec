"""Prefixes that one vLLM server computed are loaded by another, by vLLM's own counters."""

from __future__ import annotations

import random

from launch.vllm import VllmServer
from tests.vllm.ask import ask, counter, text
from tests.waiting import wait_until

HITS = "vllm:external_prefix_cache_hits_total"


def test_a_prefix_computed_by_one_server_is_loaded_by_the_other(servers: list[VllmServer], alone: VllmServer) -> None:
    rng = random.Random(1)
    first, second = servers
    for _ in range(3):
        prompt = text(rng, 1000)
        expected = ask(alone.url, prompt)
        assert ask(first.url, prompt).tokens == expected.tokens
        before = counter(second.url, HITS)

        def loaded(prompt: str = prompt, before: float = before) -> bool:
            # the first server's put is under way; each new tail asks the store again
            assert ask(second.url, prompt + text(rng, 33)).tokens
            return counter(second.url, HITS) - before >= 992 - 31

        wait_until(loaded, "the second server loads the prefix")
        assert ask(second.url, prompt).tokens == expected.tokens
