"""A worker with a second tier under its pool: demoted blocks come back unchanged, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import pack_keys
from pinyon.core.request import SamplingParams
from pinyon.decisions import replay_journal
from pinyon.store.writer import PutOutcome
from services.worker.app import Worker
from services.worker.kv.swaps import Swaps
from tests.integration.test_worker_exactness import make_asks
from tests.integration.worker_parts import (
    BLOCK_TOKENS,
    WAIT_S,
    LbClient,
    check,
    ended,
    gauge,
    peer_span,
    reference,
    run_all,
    submission,
    until,
)
from tests.worker_integrity import check_admission

GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)


def document(seed: int, blocks: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(blocks * BLOCK_TOKENS)]


async def ask(client: LbClient, prompt: list[int], sampling: SamplingParams = GREEDY, **fields) -> object:
    answer = await client.answer(prompt, sampling, **fields)
    assert answer.tokens == reference(prompt, sampling)
    return answer


def tiers(worker: Worker) -> dict[str, float]:
    value = worker._registry.get_sample_value
    found = {f"hits {tier}": value("pinyon_worker_hit_blocks_total", {"tier": tier}) for tier in ("pool", "dram")}
    return found | {f"to {to}": value("pinyon_worker_swapped_blocks_total", {"to": to}) for to in ("pool", "dram")}


class Held:
    """A context in which the copying thread of a worker makes no copy."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        swaps = worker.parts.cache.swaps
        self._open, self._begun = threading.Event(), threading.Event()
        copy = swaps._copy

        def slow(layer, swap) -> None:
            self._begun.set()
            assert self._open.wait(WAIT_S)
            copy(layer, swap)

        monkeypatch.setattr(swaps, "_copy", slow)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, WAIT_S)

    def release(self) -> None:
        self._open.set()


def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.001) -> None:
    """Delays the start of every copy: code that does not wait for it reads other data, or destroys the source."""
    copy = Swaps._copy

    def late(self, layer, swap) -> None:
        time.sleep(seconds)
        copy(self, layer, swap)

    monkeypatch.setattr(Swaps, "_copy", late)


async def test_talks_larger_than_the_pool_hit_in_the_second_tier(fleet):
    """Six conversations of three turns, interleaved turn by turn: each time the pool held another conversation."""
    m, client = await fleet.mixed(blocks=24, dram_blocks=96, prefill_chunk_tokens=24)
    talks = [document(seed, 6) for seed in range(6)]
    cached = []
    for turn in range(3):
        for seed, talk in enumerate(talks):
            answer = await ask(client, talk)
            cached.append(answer.last.usage.cached_tokens)
            talk += [*answer.tokens, *document(100 * turn + seed, 3)]
    assert cached[:6] == [0] * 6
    assert cached[6:12] == [6 * BLOCK_TOKENS] * 6, "all of the turn before"
    assert cached[12:] == [9 * BLOCK_TOKENS] * 6
    await fleet.idle()
    seen = tiers(m)
    assert seen["hits dram"] == seen["to pool"] > 24
    assert seen["hits dram"] + seen["hits pool"] >= 6 * 6 + 6 * 9
    assert gauge(m, "evicted_blocks_total") == gauge(m, "lost_swaps_total") == 0
    pool = m.parts.cache.pool
    assert gauge(m, "dram_blocks") + gauge(m, "dram_free_blocks") == 96
    size = m.engine.layout.block_bytes
    assert gauge(m, "swapped_bytes_total") == (seen["to pool"] + seen["to dram"]) * size
    assert len(pool.keys()) == pool.cached + gauge(m, "dram_blocks")


@pytest.mark.parametrize(
    ("blocks", "chunk", "batch", "dram"), [(40, 7, 3, 300), (24, 64, 2, 1), (24, 7, 2, 16), (24, 64, 2, 300)], ids=str
)
async def test_a_pair_gives_the_tokens_of_one_engine(fleet, monkeypatch, blocks, chunk, batch, dram):
    slow_copies(monkeypatch)
    p, d, client = await fleet.serving(blocks=blocks, prefill_chunk_tokens=chunk, max_batch=batch, dram_blocks=dram)
    asks = make_asks(40, seed=blocks + dram)
    check(asks, await run_all(client, p, d, asks))
    check(asks, await run_all(client, p, d, asks))
    await fleet.idle()
    if blocks == 24:
        assert tiers(p)["to dram"] > 0
        assert tiers(p)["hits dram"] + tiers(d)["hits dram"] > 0


async def test_tokens_are_exact_when_requests_give_way_to_each_other(fleet, monkeypatch):
    """Blocks that a request grew into are copied away before the step that writes to them."""
    slow_copies(monkeypatch)
    m, client = await fleet.mixed(blocks=24, dram_blocks=40, max_batch=8, prefill_chunk_tokens=12)
    rng = random.Random(9)
    asks = []
    for _ in range(16):
        prompt = [rng.randrange(32, 127) for _ in range(rng.randrange(1, 40))]
        asks.append((prompt, SamplingParams(max_tokens=60, temperature=0.9, seed=rng.randrange(2**32))))
    check(asks, await run_all(client, None, None, asks))
    check(asks, await run_all(client, None, None, asks))
    assert gauge(m, "preemptions_total") > 4
    await fleet.idle()
    assert tiers(m)["hits dram"] > 0


async def test_a_prefill_instance_sends_from_its_second_tier(fleet, monkeypatch):
    slow_copies(monkeypatch)
    p = await fleet.start("prefill", "p0", blocks=16, dram_blocks=64)
    d, client = await fleet.decode(blocks=64)
    prompts = [document(seed, 10) for seed in range(3)]
    for _ in range(2):
        for prompt in prompts:
            await ask(client, [*prompt, 7], prefill=p, decode=d, no_reuse=False)
            other = [*prompt[: 8 * BLOCK_TOKENS], *document(50 + prompt[0], 2)]
            await ask(client, other, prefill=p, decode=d)
    await fleet.idle()
    assert tiers(p)["hits dram"] > 0


async def test_a_decode_instance_uses_what_is_in_its_second_tier(fleet, monkeypatch):
    """The prefill instance hears of them as held. Peers write only to blocks whose content has been copied away."""
    slow_copies(monkeypatch)
    p = await fleet.start("prefill", "p0", blocks=64)
    d, client = await fleet.decode(blocks=16, dram_blocks=64)
    prompts = [document(seed, 10) for seed in range(4)]
    for prompt in prompts:
        await ask(client, [*prompt, 7], prefill=p, decode=d)
    for prompt in prompts:
        answer = await ask(client, [*prompt, 8], prefill=p, decode=d)
        assert answer.prefill.decode_local_tokens == 10 * BLOCK_TOKENS
    await fleet.idle()
    assert tiers(d)["hits dram"] >= 20


async def test_a_peer_reads_what_is_in_the_second_tier(fleet, monkeypatch):
    """The block is promoted first, and the lease is answered after that; the conductor sees no change."""
    address = await fleet.start_conductor()
    source = await fleet.start("mixed", "m0", blocks=12, dram_blocks=32, conductor=address)
    p, d = await fleet.pair(blocks=32)
    client, other = await fleet.client(source), await fleet.client(d)
    prompt = document(1, 8)
    await ask(client, [*prompt, 7])
    keys = source.parts.cache.pool.keys()
    for seed in (2, 3):
        await ask(client, [*document(seed, 8), 7])
    await fleet.idle()
    pool = source.parts.cache.pool
    below = [key for key in keys if key in pool.below]
    assert len(below) > 4
    index = fleet.conductor.fleet.index
    await fleet.known("m0", lambda _: len(index) == len(pool.keys()))
    held = Held(source, monkeypatch)
    spans = [peer_span(source, 0, 8)]
    (answer,) = await other.submit(submission([*prompt, 9], GREEDY, prefill=p, decode=d, fetches=spans))
    await held.begun()
    assert gauge(source, "leases") == 1
    held.release()
    await answer.wait()
    assert answer.tokens == reference([*prompt, 9], GREEDY)
    assert answer.last.usage.cached_peer_tokens == 8 * BLOCK_TOKENS
    await fleet.idle()
    assert set(keys) <= set(pool.keys())
    assert pool.drain_changes() == ([], [])


async def test_a_lease_is_answered_when_what_it_names_has_come(fleet, monkeypatch):
    m, client = await fleet.mixed(blocks=12, dram_blocks=32)
    books, pool = m.parts.cache.pool, m.engine.pool
    await ask(client, [*document(1, 8), 7])
    keys = list(books.keys())
    contents = [pool[books._contents.block_of[key]].copy() for key in keys]
    await ask(client, [*document(2, 10), 7])
    await fleet.idle()
    assert any(key in books.below for key in keys)
    held = Held(m, monkeypatch)
    async with grpc.aio.insecure_channel(m.address) as channel:
        stub = kvstore_pb2_grpc.BlockReadServiceStub(channel)
        asked = asyncio.ensure_future(stub.Acquire(kvstore_pb2.AcquireRequest(keys=pack_keys(keys), lease_ms=30_000)))
        await held.begun()
        nothing = await stub.Acquire(kvstore_pb2.AcquireRequest(keys=bytes(16)))
        assert not nothing.blocks
        assert not asked.done()
        gone = stub.Acquire(kvstore_pb2.AcquireRequest(keys=pack_keys(keys)))
        await until(lambda: gauge(m, "leases") == 2)
        gone.cancel()
        await until(lambda: gauge(m, "leases") == 1)
        held.release()
        lease = await asked
        assert [each.index for each in lease.blocks] == list(range(len(keys)))
        for content, location in zip(contents, lease.blocks, strict=True):
            np.testing.assert_array_equal(pool[location.offset_bytes // location.length_bytes], content)
        assert (await stub.Release(kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id))).released


async def test_a_fetch_waits_until_its_blocks_are_copied_away(fleet, monkeypatch):
    slow_copies(monkeypatch, 0.005)
    source = await fleet.start("mixed", "m0", blocks=32)
    p = await fleet.start("prefill", "p0", blocks=12, dram_blocks=32)
    d = await fleet.start("decode", "d0", blocks=32)
    first, second = document(1, 8), document(2, 8)
    await ask(await fleet.client(source), [*second, 7])
    client = await fleet.client(d)
    await ask(client, [*first, 7], prefill=p, decode=d)
    spans = [peer_span(source, 0, 8)]
    answer = await ask(client, [*second, 8], prefill=p, decode=d, fetches=spans)
    assert answer.last.usage.cached_peer_tokens == 8 * BLOCK_TOKENS
    other = await fleet.start("decode", "d1", blocks=32)  # holds nothing
    answer = await ask(await fleet.client(other), [*first, 9], prefill=p, decode=other)
    assert answer.last.usage.cached_local_tokens == 8 * BLOCK_TOKENS


class CopyingStore:
    """A store that keeps copies of the blocks it is given."""

    def __init__(self) -> None:
        self.losses = 0
        self.worker: Worker | None = None
        self.contents: dict[bytes, list[np.ndarray]] = {}

    async def nodes(self) -> None:
        pass

    async def put(self, objects, object_bytes, timeout_s, **_) -> tuple[PutOutcome, ...]:
        for key, ((_, offset, _),) in objects:
            self.contents.setdefault(key, []).append(self.worker.engine.pool[offset // object_bytes].copy())
        return (PutOutcome.STORED,) * len(objects)


async def test_the_store_gets_what_was_promoted_when_it_has_come(fleet, monkeypatch):
    slow_copies(monkeypatch, 0.005)
    store = CopyingStore()
    m = store.worker = await fleet.start("mixed", "m0", blocks=48, dram_blocks=64, store=store)
    client = await fleet.client(m)
    prompts = [document(seed, 10) for seed in range(6)]
    for _ in range(2):
        for prompt in prompts:
            await ask(client, [*prompt, 7])
            await until(lambda: not gauge(m, "store_queue_blocks"))
        store.losses += 1
    twice = [contents for contents in store.contents.values() if len(contents) > 1]
    assert len(twice) > 40
    for once, again, *_ in twice:
        np.testing.assert_array_equal(once, again)
    await fleet.idle()
    assert tiers(m)["hits dram"] > 40


async def test_contents_are_bit_for_bit_what_was_demoted(fleet):
    m, client = await fleet.mixed(blocks=12, dram_blocks=32)
    pool, books = m.engine.pool, m.parts.cache.pool
    prompt = document(4, 8)
    await ask(client, [*prompt, 7])
    keys = list(books.keys())
    before = {key: pool[books._contents.block_of[key]].copy() for key in keys}
    await ask(client, [*document(5, 9), 7])
    await fleet.idle()
    assert any(key in books.below for key in keys)
    await ask(client, [*prompt, 8])
    await fleet.idle()
    for key in keys:
        if key not in books.below:
            np.testing.assert_array_equal(pool[books._contents.block_of[key]], before[key])


async def test_the_engine_steps_during_copies_and_spares_their_blocks(fleet, monkeypatch):
    """A prompt waits for blocks whose content is still to be copied away, and that content comes back whole."""
    m, client = await fleet.mixed(blocks=16, dram_blocks=32)
    prompts = [document(seed, 8) for seed in (6, 7, 8)]
    await ask(client, [*prompts[0], 7])
    held = Held(m, monkeypatch)
    answers = await client.submit(*(submission([*prompt, 7], GREEDY) for prompt in prompts[1:]))
    await held.begun()
    assert not all(answer.done.is_set() for answer in answers)
    assert gauge(m, "swapping_blocks") > 0
    held.release()
    for answer, prompt in zip(answers, prompts[1:], strict=True):
        await answer.wait()
        assert answer.tokens == reference([*prompt, 7], GREEDY)
    for prompt in prompts:
        await ask(client, [*prompt, 9])


async def test_requests_cancelled_during_swaps_leave_nothing(fleet, monkeypatch):
    """Cancelled at any moment, with copies held up, chunk after chunk; then the same prompts again."""
    rng = random.Random(11)
    p, d, client = await fleet.serving(blocks=24, dram_blocks=48, max_batch=4)
    asks = make_asks(30, seed=12)
    for round_number in range(4):
        held = Held(p, monkeypatch)
        answers = await client.submit(*(submission(prompt, sampling, prefill=p, decode=d) for prompt, sampling in asks))
        if round_number:  # otherwise they are cancelled before anything is demoted
            await held.begun()
        for answer in rng.sample(answers, 20):
            await client.cancel(answer)
        held.release()
        for (prompt, sampling), answer in zip(asks, answers, strict=True):
            await answer.wait()
            assert answer.tokens == reference(prompt, sampling)[: len(answer.tokens)]
        await fleet.idle()
    check(asks, await run_all(client, p, d, asks))


async def test_a_worker_that_stops_in_the_middle_of_a_swap_stops(fleet, monkeypatch):
    m, client = await fleet.mixed(blocks=12, dram_blocks=32)
    await ask(client, [*document(1, 8), 7])
    held = Held(m, monkeypatch)
    (answer,) = await client.submit(submission([*document(2, 8), 7], GREEDY))
    await held.begun()
    fleet.workers.remove(m)
    stopping = asyncio.ensure_future(m.stop(0))
    await asyncio.sleep(0)
    held.release()
    await asyncio.wait_for(stopping, WAIT_S)
    await answer.wait()
    check_admission(m.parts.cache.admission)
    assert m.parts.cache.pool.used == 0


async def test_decisions_with_two_tiers_are_replayed_the_same(fleet, tmp_path: Path):
    path = tmp_path / "mixed.jsonl"
    m, client = await fleet.mixed(blocks=24, dram_blocks=32, max_batch=2, journal=str(path))
    asks = make_asks(40, seed=3)
    gone = await client.submit(*(submission(prompt, sampling) for prompt, sampling in asks[:5]))
    for answer in gone[::2]:
        await client.cancel(answer)
    check(asks, await run_all(client, None, None, asks))
    await ended(gone)
    await fleet.idle()
    assert tiers(m)["hits dram"] > 0
    fleet.workers.remove(m)
    await m.stop(0)
    with path.open(encoding="utf-8") as lines:
        seen = replay_journal(lines)
    assert seen.differences == []
    swaps = sum('"c":"take_swaps"' in line for line in path.read_text().splitlines())
    assert swaps > 3
    check_admission(seen.modules["admission"])
