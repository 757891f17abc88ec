"""Reuse never changes a token, also while blocks are evicted, and while the store node dies and returns.

Hundreds of seeded prompts go through 2 prefill and 2 decode processes, and are compared with an engine without reuse.
"""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from pinyon.api.lb.v1 import lb_pb2_grpc
from tests.cluster.fault_tools import lookup
from tests.cluster.observe import wait_idle
from tests.cluster.reference import BLOCK_TOKENS, Answer, Ask, Reference, random_sampling, send, text_tokens
from tests.cluster.specs import CHUNKS, cluster_spec, start_again
from tests.forks import forked
from tests.long import usually

SEED = 20260
CONCURRENCY = 6

ROUNDS_MAX = 5

READ_S = 300.0
"""The longest time until a node is read again: a slow fetch is remembered for minutes."""


def make_asks(count: int, seed: int, shared: int = 8, longest: int = 280) -> list[Ask]:
    """Returns prompts that share prefixes of a few documents, cut at any token, each with its own ending."""
    random_ = random.Random(seed)
    documents = [text_tokens(random_, random_.randrange(longest * 2 // 7, longest)) for _ in range(shared)]
    asks = []
    for _ in range(count):
        document = random_.choice(documents)
        prefix = document[: random_.randrange(len(document) // 2, len(document))]
        ending = text_tokens(random_, random_.randrange(1, 40))
        asks.append(Ask(tuple(prefix + ending), random_sampling(random_, random_.randrange(1, 13))))
    return asks


async def send_all(cluster: LocalCluster, asks: list[Ask], on_done=lambda count: None) -> list[Answer]:
    """Sends all asks in order, ``CONCURRENCY`` at a time; ``on_done`` is called with the number finished."""
    answers: list[Answer | None] = [None] * len(asks)
    queue = iter(range(len(asks)))
    finished = 0
    async with cluster.access.channel(cluster.services["lb-0"], kind=grpc.aio) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)

        async def client() -> None:
            nonlocal finished
            for index in queue:
                answers[index] = await send(stub, asks[index])
                finished += 1
                on_done(finished)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(client())
    return [answer for answer in answers if answer is not None]


def reusable_tokens(asks: list[Ask]) -> int:
    """Returns how many prompt tokens an unlimited cache could have provided: whole blocks, never the whole prompt."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for ask in asks:
        blocks = (len(ask.prompt) - 1) // BLOCK_TOKENS
        hit = 0
        for block in range(blocks):
            if ask.prompt[: (block + 1) * BLOCK_TOKENS] not in seen:
                break
            hit += 1
        total += hit * BLOCK_TOKENS
        seen.update(ask.prompt[: (block + 1) * BLOCK_TOKENS] for block in range(len(ask.prompt) // BLOCK_TOKENS))
    return total


def check(reference: Reference, asks: list[Ask], answers: list[Answer]) -> None:
    assert len(answers) == len(asks)
    expected = reference.all_tokens(asks)
    wrong = [index for index, answer in enumerate(answers) if answer.tokens != expected[index]]
    assert not wrong, f"seed {SEED}: requests {wrong} got other tokens than without any cache"


async def test_tokens_are_exact_and_most_of_what_can_be_reused_is(cluster, reference):
    asks = make_asks(usually(28, long=300), SEED)
    print(f"seed {SEED}")
    answers = await send_all(cluster, asks)
    check(reference, asks, answers)
    reused, reusable = sum(answer.cached for answer in answers), reusable_tokens(asks)
    print(f"reused {reused} of {reusable} reusable tokens ({100 * reused / reusable:.0f} %)")
    assert reused > 0.5 * reusable
    await wait_idle(cluster)


async def test_tokens_are_exact_while_blocks_are_evicted(small_reference, tmp_path):
    # Pools that hold a few requests, and a store of 1 MiB = 32 KV objects, so that eviction never stops.
    spec = cluster_spec(pool_blocks=28, store_mib=1, extra=CHUNKS)
    with LocalCluster(spec, tmp_path, forked.with_small_model) as small:
        # How many blocks a busy worker offers the store depends on timing, so one round may not fill it.
        for seed in range(SEED + 1, SEED + 1 + ROUNDS_MAX):
            asks = make_asks(usually(22, long=160), seed)
            check(small_reference, asks, await send_all(small, asks))
            await wait_idle(small)
            scrape = Scrape(small)
            evicted = [
                scrape.total(f"pinyon_{of}_total") for of in ("worker_evicted_blocks", "kvstore_evicted_objects")
            ]
            if all(evicted):
                break
        assert all(evicted), f"blocks evicted by the workers and objects by the store: {evicted}"


async def test_tokens_are_exact_while_the_store_node_dies_and_returns(reference, tmp_path):
    # The prompts are so long that reading them from the node beats computing them, even on a busy machine. The pools
    # hold only a few requests, so that others push these out.
    asks = make_asks(usually(48, long=72), SEED + 2, shared=usually(22, long=32), longest=520)
    dies, returns, others_each = usually(20, long=32), usually(36, long=56), usually(12, long=16)
    with LocalCluster(cluster_spec(pool_blocks=64), tmp_path, forked) as cluster:
        lost: list[Ask] = []

        def disturb(finished: int) -> None:
            if finished == dies:
                lost.extend(ask for ask in asks[:dies] if stored(ask))
                cluster.services["kvstore-0"].kill()
            elif finished == returns:
                start_again(cluster, "kvstore-0")

        def stored(ask: Ask) -> int:
            return lookup(cluster, ask.prompt).get("kvstore-0", 0)

        async def push_out(seed: int) -> None:
            others = make_asks(others_each, seed, shared=others_each, longest=520)
            check(reference, others, await send_all(cluster, others))

        answers = await send_all(cluster, asks, disturb)
        check(reference, asks, answers)
        await wait_idle(cluster)
        assert lost, "the node held nothing when it died"
        lost = lost[:6]
        # The first use notices the loss; the second reuses local KV instead of reading from another worker.
        for _ in range(8):
            check(reference, lost, await send_all(cluster, lost))
            await wait_idle(cluster)
            if all(map(stored, lost)):
                break
        else:
            pytest.fail("what the node had lost and workers reuse was not put into it again")
        deadline_s = time.monotonic() + READ_S
        seed = SEED + 3
        while time.monotonic() < deadline_s:  # some prompts may be in a pool, or fetching may count as slow
            await push_out(seed)
            seed += 1
            check(reference, lost, await send_all(cluster, lost))
            # The node's counters started at zero with it.
            if Scrape(cluster).total("pinyon_kvstore_get_bytes_total") > 0:
                break
        else:
            pytest.fail("the returned node is not read")
