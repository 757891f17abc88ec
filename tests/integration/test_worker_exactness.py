"""The tokens do not depend on the way of a prompt's KV: they equal those of one engine alone without any cache."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest

from pinyon.batching import BATCHING_POLICIES
from pinyon.core.request import SamplingParams
from pinyon.store.reader import ReadResult
from tests.integration.worker_parts import (
    BLOCK_TOKENS,
    WAIT_S,
    check,
    ended,
    gauge,
    peer_span,
    run_all,
    submission,
    until,
)
from tests.long import usually


def make_asks(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Returns prompts that share prefixes of a few documents, cut anywhere; greedy and sampled."""
    rng = random.Random(seed)
    documents = [[rng.randrange(32, 127) for _ in range(rng.randrange(40, 130))] for _ in range(4)]
    asks = []
    for _ in range(count):
        document = rng.choice(documents)
        prompt = document[: rng.randrange(1, len(document))] + [rng.randrange(32, 127) for _ in range(rng.randrange(4))]
        greedy = rng.random() < 0.5
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 14),
            temperature=0.0 if greedy else 0.9,
            top_k=rng.choice([0, 40]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(2**32),
            ignore_eos=rng.random() < 0.7,
        )
        asks.append((prompt, sampling))
    return asks


@pytest.mark.parametrize(
    ("blocks", "chunk", "batch"), [(128, 16, 8), (40, 7, 3), (24, 64, 2)], ids=["roomy", "odd-chunks", "evicting"]
)
async def test_a_pair_gives_the_tokens_of_one_engine(fleet, blocks, chunk, batch):
    p, d, client = await fleet.serving(blocks=blocks, prefill_chunk_tokens=chunk, max_batch=batch)
    asks = make_asks(usually(20, long=40), seed=blocks)
    check(asks, await run_all(client, p, d, asks))
    await fleet.idle()
    assert p.engine.steps
    assert d.engine.steps
    again = gauge(d, "preemptions_total")
    assert any(prefill for prefill, _ in d.engine.steps) == (again > 0), "the decode instance computed a prompt"
    if blocks == 24:
        assert gauge(p, "evicted_blocks_total") + gauge(d, "evicted_blocks_total") > 0


async def test_a_mixed_worker_gives_the_tokens_of_one_engine(fleet):
    _, client = await fleet.mixed(blocks=48, prefill_chunk_tokens=12)
    asks = make_asks(40, seed=5)
    answers = await run_all(client, None, None, asks)
    check(asks, answers)
    assert sum(answer.last.usage.cached_tokens for answer in answers) > 0


GIVING_WAY = [
    pytest.param(False, True, id="mixed-nothing kept"),
    pytest.param(True, False, id="pair-cached"),
    pytest.param(False, False, id="mixed-cached"),
    pytest.param(True, True, id="pair-nothing kept"),
]
"""Pairs and mixed instances, with and without reuse. The first two cover each way to compute and to keep prompts."""


@pytest.mark.parametrize(("elsewhere", "no_reuse"), GIVING_WAY if usually(0, long=1) else GIVING_WAY[:2])
async def test_tokens_are_exact_when_requests_give_way_to_each_other(fleet, elsewhere, no_reuse):
    """The pool holds two of them at their end: most are preempted repeatedly, at any place in a block."""
    rng = random.Random(f"{elsewhere} {no_reuse}")
    chunk = 16 if elsewhere else 12
    p, d, client = await fleet.serving(apart=elsewhere, blocks=24, max_batch=8, prefill_chunk_tokens=chunk)
    asks = []
    for _ in range(16):
        prompt = [rng.randrange(32, 127) for _ in range(rng.randrange(1, 40))]
        temperature = rng.choice([0.0, 0.9])
        asks.append((prompt, SamplingParams(max_tokens=60, temperature=temperature, seed=rng.randrange(2**32))))
    check(asks, await run_all(client, p, d, asks, no_reuse=no_reuse))
    assert gauge(d, "preemptions_total") > 4
    assert gauge(d, "room_wait_seconds_count") > len(asks)
    await fleet.idle()
    assert gauge(d, "room_wait_seconds_expected") == 0


CHOICES = [
    *(f"feather:stop={stop},chunk_blocks=1,passed_over_s=1" for stop in ("bandit", "q_learning", "heuristic", "never")),
    "oracle:group_blocks=1,passed_over_s=1",
    "lpm",
    "dfs_weight",
    "dynamic",
    "sglang_fcfs",
    "most_in_time",
    "fcfs",
]


def test_no_batching_policy_is_missing_here():
    assert {choice.split(":")[0] for choice in CHOICES} == set(BATCHING_POLICIES.names)


BATCHES = [(choice, blocks, elsewhere) for choice in CHOICES for blocks in (48, 24) for elsewhere in (False, True)]
"""Pools of 48 blocks, which are roomy, and of 24, which cause preemptions; prompts are computed elsewhere or not."""
EVERY_RUN = [
    (choice, blocks, elsewhere)
    for choice, blocks, elsewhere in BATCHES
    if elsewhere == (blocks == 24) ^ CHOICES.index(choice) % 2
]
"""Each policy with both pool sizes, and with both places of prefill; each pool size with both places."""


@pytest.mark.parametrize(("choice", "blocks", "elsewhere"), BATCHES if usually(0, long=1) else EVERY_RUN)
async def test_tokens_are_exact_whatever_batches_are_made(fleet, elsewhere, blocks, choice):
    """Batches by prefix, with members at random; every fifth request is cancelled. The kernels read shared KV once."""
    kernel = "whole" if blocks == 24 else "grouped"
    options = {"blocks": blocks, "max_batch": 6, "batching": choice, "attention_kernel": kernel}
    p, d, client = await fleet.serving(apart=elsewhere, prefill_chunk_tokens=16 if elsewhere else 12, **options)
    asks = make_asks(usually(20, long=40), seed=blocks)
    answers = await client.submit(*(submission(prompt, sampling, prefill=p, decode=d) for prompt, sampling in asks))
    for answer in answers[::5]:
        await client.cancel(answer)
    await ended(answers)
    kept = [place for place, answer in enumerate(answers) if answer.finish in ("stop", "length")]
    assert len(kept) >= len(asks) * 4 // 5
    check([asks[place] for place in kept], [answers[place] for place in kept])
    sizes = {decodes for _, decodes in d.engine.steps}
    assert max(sizes) > 1


async def test_tokens_are_exact_while_the_batching_policy_changes(fleet):
    m, client = await fleet.mixed(blocks=32, max_batch=6, prefill_chunk_tokens=12)
    asks = make_asks(60, seed=77)
    answers = await client.submit(*(submission(prompt, sampling, prefill=m, decode=m) for prompt, sampling in asks))
    choices = ["feather:stop=q_learning,chunk_blocks=1", "most_in_time", "feather:chunk_blocks=2", "fcfs"]
    for place, answer in enumerate(answers):
        if place % 5 == 0:
            m.switch_batching(choices[place // 5 % len(choices)])
        await answer.wait()
    check(asks, answers)


async def test_short_prompts_pass_long_ones_that_wait_for_room(fleet):
    """A pool for one long request at its end, two before: short ones get their first tokens first, and all end."""
    rng = random.Random(26)
    m, client = await fleet.mixed(blocks=24, max_batch=8, prefill_chunk_tokens=12, batching="most_in_time")
    asks = [
        ([rng.randrange(32, 127) for _ in range(tokens)], SamplingParams(max_tokens=more, ignore_eos=True))
        for tokens, more in [(178, 4), *[(60, 44)] * 6, *[(8, 4)] * 8]
    ]
    sent = []
    for prompt, sampling in asks:
        message = submission(prompt, sampling, prefill=m, decode=m)
        message.placement.predicted_prefill_ms, message.placement.ttft_slo_ms = 10.0 * len(prompt), 600_000
        sent.append(message)
    m.engine.hold()
    blocker = await client.submit(sent[0])
    await m.engine.entered()
    answers = blocker + await client.submit(*sent[1:])
    await until(lambda: gauge(m, "room_waiters") == len(asks) - 1)
    assert gauge(m, "room_wait_seconds_expected") > 0
    came: list[int] = []

    async def note(place: int) -> None:
        await answers[place].first.wait()
        came.append(place)

    notes = [asyncio.ensure_future(note(place)) for place in range(len(asks))]
    m.engine.release()
    await asyncio.gather(*notes)
    await ended(answers)
    check(asks, answers)
    assert came[0] == 0
    assert set(came[1:9]) == set(range(7, 15))
    assert gauge(m, "preemptions_total") > 0


async def test_simultaneous_requests_compute_a_shared_prefix_once(fleet):
    p, d, client = await fleet.serving()
    prefix = list(range(40, 40 + 8 * BLOCK_TOKENS))
    asks = [([*prefix, 100 + number, 7], SamplingParams(max_tokens=2, ignore_eos=True)) for number in range(6)]
    check(asks, await run_all(client, p, d, asks))
    computed = sum(prefill for prefill, _ in p.engine.steps)
    assert computed == len(prefix) + 2 * len(asks)


async def test_no_reuse_computes_everything_and_keeps_nothing(fleet):
    p, d, client = await fleet.serving()
    ask = make_asks(1, seed=9) * 3
    answers = await run_all(client, p, d, ask, no_reuse=True)
    check(ask, answers)
    assert [answer.last.usage.cached_tokens for answer in answers] == [0, 0, 0]
    await fleet.idle()
    assert gauge(p, "cached_blocks") == gauge(d, "cached_blocks") == 0


async def test_kv_fetched_from_a_peer_is_as_good_as_computed(fleet):
    p, d, client = await fleet.serving()
    other = await fleet.start("prefill", "p1")
    ask = (list(range(32, 32 + 10 * BLOCK_TOKENS + 3)), SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8))
    check([ask], await run_all(client, p, d, [ask]))
    spans = [peer_span(p, 0, 4), peer_span(d, 4, 6)]
    answer = await client.answer(*ask, prefill=other, decode=d, fetches=spans)
    check([ask], [answer])
    assert answer.last.usage.cached_peer_tokens == 10 * BLOCK_TOKENS
    assert answer.prefill.computed_tokens == 3
    assert answer.prefill.decode_local_tokens == 10 * BLOCK_TOKENS


class HeldLayers:
    """A switch that lets a worker's layered read reach the second layer only when its engine has begun to compute."""

    def __init__(self, worker) -> None:
        self.order: list[str] = []
        fetcher = worker.parts.fetcher
        transfer, begun, step = fetcher._layers, threading.Event(), worker.engine.step

        def begin(prefills, decodes):
            self.order.append("step")
            begun.set()
            return step(prefills, decodes)

        worker.parts.engine_loop._engine = SimpleNamespace(step=begin)

        def group():
            parts = []

            def submit(requests, timeout_s):
                if parts:
                    handle = LateHandle(lambda: transfer.submit(requests, timeout_s), begun, self.order)
                else:
                    handle = transfer.submit(requests, timeout_s)
                    handle.wait()
                    self.order.append("layer 0 arrived")
                parts.append(handle)
                return handle

            async def wait_async():
                return [*parts[0].results(), *(await asyncio.to_thread(parts[1].wait))]

            return SimpleNamespace(submit=submit, wait_async=wait_async)

        fetcher._layers = SimpleNamespace(group=group, transfer_async=transfer.transfer_async)


class LateHandle:
    """A transfer that starts when ``begun`` is set and its end is awaited."""

    done = False

    def __init__(self, start, begun: threading.Event, order: list[str]) -> None:
        self._start, self._begun, self._order = start, begun, order
        self._lock = threading.Lock()
        self._handle = None

    def wait(self, timeout_s=None):
        assert self._begun.wait(WAIT_S)
        with self._lock:
            if self._handle is None:
                self._order.append("layer 1 sent")
                self._handle = self._start()
        return self._handle.wait()

    def results(self):
        return self._handle.results()


async def test_computing_begins_before_all_layers_have_arrived(fleet):
    p, d, client = await fleet.serving()
    other = await fleet.start("prefill", "p1")
    ask = (list(range(32, 32 + 6 * BLOCK_TOKENS + 3)), SamplingParams(max_tokens=5, ignore_eos=True))
    check([ask], await run_all(client, p, d, [ask]))
    held = HeldLayers(other)
    answer = await client.answer(*ask, prefill=other, decode=d, fetches=[peer_span(p, 0, 6)])
    check([ask], [answer])
    assert held.order == ["layer 0 arrived", "step", "layer 1 sent"]
    assert answer.last.usage.cached_peer_tokens == 6 * BLOCK_TOKENS
    (again,) = await run_all(client, other, d, [ask])
    check([ask], [again])
    assert again.last.usage.cached_local_tokens == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("fault", ["a layer is lost", "the lease was too short"])
async def test_a_prefix_whose_fetch_fails_late_is_computed_correctly(fleet, fault):
    p, d = await fleet.pair()
    other, fresh = await fleet.start("prefill", "p1"), await fleet.start("decode", "d1")
    client, fresh_client = await fleet.client(d), await fleet.client(fresh)
    ask = (list(range(32, 32 + 6 * BLOCK_TOKENS + 3)), SamplingParams(max_tokens=6, ignore_eos=True))
    check([ask], await run_all(client, p, d, [ask]))
    fetcher, reader = other.parts.fetcher, other._reader
    if fault == "a layer is lost":
        transfer = fetcher._layers

        def group():
            real, submitted = transfer.group(), []

            def submit(requests, timeout_s):
                submitted.append(requests)
                if len(submitted) == 2:  # the holder has no such memory and refuses
                    requests = [request._replace(remote_region=bytes(16)) for request in requests]
                return real.submit(requests, timeout_s)

            return SimpleNamespace(submit=submit, wait_async=real.wait_async)

        fetcher._layers = SimpleNamespace(group=group, transfer_async=transfer.transfer_async)
    else:

        async def late(*args, **kwargs):
            result = await reader.read(*args, **kwargs)
            assert result.leading == 6
            return ReadResult(0, worked=None)

        fetcher._source = SimpleNamespace(read=late)
    # Other bytes than the prompt's KV, so that their use would show.
    p.engine.pool[:] = 1.0
    answer = await fresh_client.answer(*ask, prefill=other, decode=fresh, fetches=[peer_span(p, 0, 6)])
    check([ask], [answer])
    assert answer.last.usage.cached_tokens == 0
    assert answer.prefill.computed_tokens == len(ask[0])
    assert gauge(other, "fetch_failures_total") == 1
    await fleet.idle()
    (again,) = await run_all(fresh_client, other, fresh, [ask])
    check([ask], [again])
    assert again.last.usage.cached_local_tokens == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("missing", ["evicted", "gone"])
async def test_what_cannot_be_fetched_is_computed(fleet, missing):
    p, d, client = await fleet.serving()
    other = await fleet.start("prefill", "p1")
    ask = (list(range(32, 32 + 6 * BLOCK_TOKENS)), SamplingParams(max_tokens=6, ignore_eos=True))
    span = peer_span(p, 0, 6)  # p never computed it
    if missing == "gone":
        span.source_address = "127.0.0.1:1"
    answer = await client.answer(*ask, prefill=other, decode=d, fetches=[span])
    check([ask], [answer])
    assert answer.last.usage.cached_tokens == 0
    assert gauge(other, "fetch_failures_total") == 1


async def test_a_second_turn_reuses_the_generated_tokens_too(fleet):
    _, client = await fleet.mixed()
    sampling = SamplingParams(max_tokens=3 * BLOCK_TOKENS + 1, ignore_eos=True)
    first = (list(range(40, 70)), sampling)
    (answer,) = await run_all(client, None, None, [first])
    second = (first[0] + answer.tokens + [50], SamplingParams(max_tokens=4, ignore_eos=True))
    (again,) = await run_all(client, None, None, [second])
    check([first, second], [answer, again])
    # Every full block except the one that the last sampled token would have completed.
    assert again.last.usage.cached_tokens == (30 + 3 * BLOCK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_a_resumed_request_goes_on_with_the_same_tokens_and_text(fleet, cut):
    p, d, client = await fleet.serving()
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    prompt = list(range(60, 95))
    (whole,) = await run_all(client, p, d, [(prompt, sampling)])
    resumed = submission(
        prompt + whole.tokens[:cut],
        sampling,
        prefill=p,
        decode=d,
        generated_tokens=cut,
        no_reuse=cut == 5,
        model_fingerprint=d.served.fingerprint,
    )
    (rest,) = await client.submit(resumed)
    await rest.wait()
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    assert rest.text == whole.text
    assert (rest.last.usage.prompt_tokens, rest.last.usage.completion_tokens) == (len(prompt), 12)


async def test_stop_strings_end_the_text_wherever_the_request_was_cut(fleet):
    _, client = await fleet.mixed()
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = list(range(50, 77))
    (free,) = await run_all(client, None, None, [(prompt, sampling)])
    stop = free.text[9:12]
    stopped = SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,))
    (cut,) = await run_all(client, None, None, [(prompt, stopped)])
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish == "stop"
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    rest = await client.answer(prompt + free.tokens[:8], stopped, generated_tokens=8)
    assert rest.text == cut.text
    assert free.tokens[:8] + rest.tokens == cut.tokens
