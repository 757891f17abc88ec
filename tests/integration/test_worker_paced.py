"""Paced workers serve for real: remote prefill, KV pushed and fetched, resumed requests, the same tokens everywhere."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest_asyncio
from prometheus_client import CollectorRegistry

from pinyon.core.request import SamplingParams
from services.worker.app import Worker
from services.worker.settings import WorkerSettings
from tests.integration.worker_parts import (
    BLOCK_TOKENS,
    IDLE_GAUGES,
    WAIT_S,
    LbClient,
    gauge,
    peer_span,
    submission,
    tiny_card,
)
from tests.worker_integrity import check_pool

PROMPT = list(range(32, 32 + 5 * BLOCK_TOKENS + 3))


@pytest_asyncio.fixture
async def start():
    """A function that starts a paced worker; at the end none holds anything."""
    workers: list[Worker] = []

    async def begin(role: str, name: str, **changes: object) -> Worker:
        values = {"engine": "paced", "pool_blocks": 64, "block_tokens": BLOCK_TOKENS, "metrics_listen": "", **changes}
        worker = Worker(WorkerSettings(role=role, **values), name, CollectorRegistry(), card=tiny_card())
        await worker.start()
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        assert await worker.decodes.drained(WAIT_S)
        assert await worker.prefills.drained(WAIT_S)
        await worker.parts.engine_loop.step_over()
    for worker in workers:
        assert not {name: value for name in IDLE_GAUGES if (value := gauge(worker, name))}
        check_pool(worker.parts.cache.pool)
    for worker in reversed(workers):
        await worker.stop(0)


async def serve(worker: Worker, *submissions):
    async with AsyncExitStack() as stack:
        client = LbClient(worker)
        stack.push_async_callback(client.close)
        return [await answer.wait() for answer in await client.submit(*submissions)]


async def test_tokens_are_the_same_alone_in_a_pair_and_resumed(start):
    mixed, p, d = await start("mixed", "m0"), await start("prefill", "p0"), await start("decode", "d0")
    sampling = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in range(4)]
    alone = await serve(mixed, *(submission(PROMPT, each) for each in sampling))
    paired = await serve(d, *(submission(PROMPT, each, prefill=p, decode=d) for each in sampling))
    for one, other in zip(alone, paired, strict=True):
        assert (one.finish, len(one.tokens)) == ("length", 12)
        assert one.text == "".join(map(chr, one.tokens))
        assert other.tokens == one.tokens
    assert len({each.text for each in alone}) == 4
    prompt = PROMPT + alone[0].tokens[:5]
    (rest,) = await serve(d, submission(prompt, sampling[0], prefill=p, decode=d, generated_tokens=5))
    assert rest.tokens == alone[0].tokens[5:]


async def test_blocks_are_reused_and_fetched_from_a_peer(start):
    # Another eviction policy than the default, in a pool that must evict.
    settings = {"pool_blocks": 16, "eviction": "fifo"}
    holder, p, d = [await start(role, role, **settings) for role in ("mixed", "prefill", "decode")]
    sampling = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    (first,) = await serve(holder, submission(PROMPT, sampling))
    (again,) = await serve(holder, submission(PROMPT, sampling))
    assert again.prefill.local_tokens == 5 * BLOCK_TOKENS
    fetches = [peer_span(holder, 0, 5)]
    (fetched,) = await serve(d, submission(PROMPT, sampling, prefill=p, decode=d, fetches=fetches))
    assert fetched.prefill.peer_tokens == 5 * BLOCK_TOKENS
    assert first.tokens == again.tokens == fetched.tokens
    (measured,) = p.parts.ledger.take().measured
    (span,) = measured.spans
    assert (span.source_id, span.bytes) == (fetches[0].source_id, measured.fetched_bytes)
    assert 0 < span.seconds <= measured.first.report.fetch_ms / 1e3
    for turn in range(6):
        await serve(holder, submission([turn + 40, *PROMPT], sampling))
    assert gauge(holder, "evicted_blocks_total") > 0
