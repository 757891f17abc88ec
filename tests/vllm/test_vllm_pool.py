"""Prefixes that one vLLM server computed are loaded by another, by vLLM's own counters."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from launch.cluster import LocalCluster
from launch.vllm import VllmServer
from tests.vllm import soak
from tests.vllm.ask import ask, counter, post, text
from tests.vllm.conftest import started
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


@soak.long_only
async def test_what_a_server_drops_goes_to_the_store_again(model: Path, alone: VllmServer) -> None:
    """The store loses a prompt's blocks that the server still has, and gets them when the server needs their place."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    prompt = text(rng, 400)
    with started(LocalCluster(replace(soak.small_cluster(str(model)), mixed=1))) as cluster:
        (server,) = cluster.of_kind("mixed")
        assert isinstance(server, VllmServer)
        info = instance_of(cluster, server.name)
        assert info.layout is not None
        tokens = post(server.url, "/tokenize", {"model": "tiny", "prompt": prompt})["tokens"]
        keys = keys_of(info, tokens)[: len(tokens) // info.layout.block_tokens]
        async with store_access(cluster, info.layout.block_bytes) as access:
            await computed_and_stored(server, [prompt], access, {prompt: keys})
            await access.remove(keys)
            asked = 0
            while not await access.has(keys):
                assert asked < 60, "all blocks were used anew, and none was offered"
                await asyncio.to_thread(ask, cluster.http, text(rng, 90))
                asked += 1
            for _ in range(10):  # the server's own copy goes, too
                await asyncio.to_thread(ask, cluster.http, text(rng, 400))
            again = await access.has(keys)
        before = counter(server.url, HITS)
        told = await asyncio.to_thread(ask, cluster.http, prompt)
        loaded = (counter(server.url, HITS) - before) / info.layout.block_tokens
    print(f"stored again after {asked} prompts: {again} of {len(keys)} blocks; {loaded:g} loaded")
    assert again >= len(keys) - 4
    assert 0 < loaded <= again  # the conductor knows of every second block
    assert told.tokens == (await asyncio.to_thread(ask, alone.url, prompt)).tokens
