"""Prefixes that one vLLM server computed are loaded by another, by vLLM's own counters."""

from __future__ import annotations

import asyncio
import random

import numpy as np

from launch.cluster import LocalCluster
from launch.vllm import VllmServer
from tests.vllm.ask import ask, counter, post, text
from tests.vllm.store_access import StoreAccess, instance_of, keys_of, store_access

HITS = "vllm:external_prefix_cache_hits_total"
SEED = 20261129
PROMPTS = 40


async def computed_and_stored(
    first: VllmServer, prompts: list[str], access: StoreAccess, keys: dict[str, list[bytes]]
) -> None:
    """Has the first server compute the prompts, and waits until the store has them."""
    for prompt in prompts:
        await asyncio.to_thread(ask, first.url, prompt)
        async with asyncio.timeout(60):
            while await access.has(keys[prompt]) < len(keys[prompt]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_loaded_prefixes_count_and_a_corrupted_block_shows(
    suite: LocalCluster, servers: list[VllmServer], alone: VllmServer
) -> None:
    print(f"seed {SEED}")
    rng, noise = random.Random(SEED), np.random.default_rng(SEED)
    first, second = servers
    info = instance_of(suite, first.name)
    assert info.group == instance_of(suite, second.name).group
    assert info.layout is not None
    prompts = [text(rng, rng.randrange(300, 500)) for _ in range(PROMPTS)]
    keys: dict[str, list[bytes]] = {}
    for prompt in prompts:
        tokens = post(alone.url, "/tokenize", {"model": "tiny", "prompt": prompt})["tokens"]
        keys[prompt] = keys_of(info, tokens)[: (len(tokens) - 1) // info.layout.block_tokens]
    async with store_access(suite, info.layout.block_bytes) as access:
        await computed_and_stored(first, prompts, access, keys)
        good, bad = prompts[: PROMPTS // 2], prompts[PROMPTS // 2 :]
        for prompt in bad:
            await access.corrupt(rng.choice(keys[prompt]), noise)
        before = counter(second.url, HITS)
        told = {prompt: (await asyncio.to_thread(ask, second.url, prompt)).tokens for prompt in prompts}
        loaded = counter(second.url, HITS) - before
    expected = {prompt: (await asyncio.to_thread(ask, alone.url, prompt)).tokens for prompt in prompts}
    assert loaded == sum(len(each) for each in keys.values()) * info.layout.block_tokens, "all of it came from the pool"
    assert [told[prompt] for prompt in good] == [expected[prompt] for prompt in good]
    different = sum(told[prompt] != expected[prompt] for prompt in bad)
    print(f"{different} of {len(bad)} answers differ after one block of each was corrupted")
    assert different >= 0.95 * len(bad)
