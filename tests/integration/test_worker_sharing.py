"""Requests that share KV memory: equal prefixes are held once, and no request waits forever for another's room."""

from __future__ import annotations

import pytest

from pinyon.batching import Prompt
from pinyon.core.request import SamplingParams
from tests.integration.worker_parts import BLOCK_TOKENS, Gate, gauge, reference, submission, until
from tests.on_compiled import REPLACES_METHODS
from tests.unit.worker.caches import Holder

COMMON = 6
PROMPT = [32 + place * 5 % 90 for place in range(COMMON * BLOCK_TOKENS)]
SAMPLING = SamplingParams(max_tokens=3 * BLOCK_TOKENS, ignore_eos=True)
OWN = 1
"""Blocks of a request for about a token of its prompt and the first ones that it generates."""


@pytest.mark.parametrize("how", ["elsewhere", "here", "one without reuse"])
async def test_equal_prefixes_that_came_together_are_held_once(fleet, how):
    p, d, client = await fleet.serving(apart=how != "here")
    gate = Gate(lambda decodes: len(decodes) == 3, d.engine)
    prompts = [[*PROMPT, 40 + number] for number in range(3)]
    # All requests reserve their blocks before any of them has content.
    submissions = [submission(each, SAMPLING, prefill=p, decode=d) for each in prompts]
    submissions[1].no_reuse = how == "one without reuse"
    if p is not d:
        d.engine.hold()
    answers = await client.submit(*submissions)
    for answer in answers:
        await answer.first.wait()
    d.engine.release()
    await gate.reached()
    assert gauge(d, "used_blocks") == COMMON + 3 * OWN + (COMMON if how == "one without reuse" else 0)
    gate.open()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (await answer.wait()).tokens == reference(prompt, SAMPLING)


async def test_equal_tokens_that_are_generated_together_are_held_once(fleet):
    """Two equal prompts without randomness continue with the same tokens."""
    p, d, client = await fleet.serving()
    full = len(PROMPT) + 2 * BLOCK_TOKENS
    gate = Gate(lambda decodes: len(decodes) == 2 and min(slot.position for slot in decodes) >= full, d.engine)
    d.engine.hold()
    answers = await client.submit(*(submission(PROMPT, SAMPLING, prefill=p, decode=d) for _ in range(2)))
    for answer in answers:
        await answer.first.wait()
    d.engine.release()
    await gate.reached()
    assert gauge(d, "used_blocks") == COMMON + 2 + 2
    gate.open()
    for answer in answers:
        assert (await answer.wait()).tokens == reference(PROMPT, SAMPLING)


@pytest.mark.parametrize("first_ends", [False, True], ids=["all stay", "the first is cancelled"])
async def test_what_came_together_has_room_for_its_prefix_once(fleet, first_ends):
    """The pool would hold the prompts of two requests, and has room for five that share theirs."""
    blocks = 2 * (COMMON + OWN) + 2
    m, client = await fleet.mixed(blocks=blocks, prefill_chunk_tokens=BLOCK_TOKENS)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [[*PROMPT, 40 + number] for number in range(5)]
    m.engine.hold()
    answers = await client.submit(*(submission(each, sampling, prefill=m, decode=m) for each in prompts))
    await m.engine.entered()
    assert gauge(m, "used_blocks") == COMMON + 5 * OWN, "all are admitted before anything is computed"
    if first_ends:
        await client.cancel(answers[0])
    m.engine.release()
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = (await answer.wait()).tokens
        assert tokens == reference(prompt, sampling) or (first_ends and answer is answers[0])
    computed = sum(prefill for prefill, _ in m.engine.steps)
    assert computed <= len(PROMPT) + 5 * OWN + first_ends * len(PROMPT), "the prefix once"


async def test_a_prompt_that_got_room_late_takes_what_others_computed(fleet):
    p, d, client = await fleet.serving(blocks=24)
    queue, cache = p.prefills.queue, p.parts.cache
    held = Holder(cache, [], 24)
    (answer,) = await client.submit(submission([*PROMPT, 40], SAMPLING, prefill=p, decode=d))
    await until(lambda: gauge(p, "room_waiters") == 1)
    keys = tuple(next(iter(p.prefills._jobs.values())).order.keys)
    other = 1 << 30
    queue.add(Prompt(other, len(PROMPT) + 1, keys, COMMON, owned=True), 0.0)
    assert queue.start(0.0) == [other]
    held.end()
    await until(lambda: queue.waiting_for_others == 1)
    mine = Holder(cache, keys, COMMON)
    # The other request computes what an engine alone would, so the answer shows whether it was used.
    computed = await fleet.start("mixed", "m9")
    (once,) = await (await fleet.client(computed)).submit(submission([*PROMPT, 41], SAMPLING))
    await once.wait()
    found = computed.parts.cache.hold(keys)
    assert len(found) == COMMON
    for (_, block), own in zip(found, mine.table, strict=True):
        p.engine.pool[own] = computed.engine.pool[block]
    computed.parts.cache.release([block for _, block in found])
    assert cache.publish(mine.table, keys) == []
    queue.published(other, keys)
    queue.end(other)
    p.prefills._wake()
    assert (await answer.wait()).tokens == reference([*PROMPT, 40], SAMPLING)
    assert sum(prefill for prefill, _ in p.engine.steps) == 1, "its last token alone"
    mine.end()


async def test_mixed_instances_do_not_wait_in_a_circle_for_room(fleet):
    here, there = [await fleet.start("mixed", name, blocks=12, room_timeout_s=0.05) for name in ("m0", "m1")]
    client = await fleet.client(here)
    # A request that holds the room there may wait for room here.
    held = Holder(there.parts.cache, [], 12)
    answer = await client.answer(PROMPT[:-1], SAMPLING, prefill=there, decode=here)
    assert answer.tokens == reference(PROMPT[:-1], SAMPLING)
    assert answer.prefill.prefill_instance_id == "m0"
    held.end()


async def test_an_instance_without_room_for_a_prompt_says_so(fleet):
    there = await fleet.start("prefill", "p0", room_timeout_s=0.05)
    here = await fleet.start("decode", "d0")
    client = await fleet.client(here)
    held = Holder(there.parts.cache, [], 128)
    answer = await client.answer(PROMPT, SAMPLING, prefill=there, decode=here)
    assert (answer.last.error.code, answer.last.error.field) == ("RESOURCE_EXHAUSTED", "prefill_instance")
    held.end()


@REPLACES_METHODS
async def test_eviction_hears_of_a_prompt_as_one_run(fleet):
    """Each key names the one before it, whether published by chunks, sent, generated, or behind an older prefix."""
    p, d = await fleet.pair(prefill_chunk_tokens=2 * BLOCK_TOKENS)
    told = {}
    for worker in (p, d):
        evictor = worker.parts.cache.pool.eviction
        told[worker] = calls = []

        def stored(keys, now_s, traits, offsets, after=None, *, calls=calls, evictor=evictor):
            calls.append((list(keys), list(offsets), after))
            type(evictor).stored_pinned(evictor, keys, now_s, traits, offsets, after)

        evictor.stored_pinned = stored
    client = await fleet.client(d)
    for end in ([40], [41] * BLOCK_TOKENS):
        answer = await client.answer([*PROMPT, *end], SAMPLING, prefill=p, decode=d)
        assert answer.tokens == reference([*PROMPT, *end], SAMPLING)
    await fleet.idle()
    for worker, calls in told.items():
        chain = {}
        for keys, offsets, after in calls:
            assert offsets == list(range(offsets[0], offsets[0] + len(keys)))
            assert (after is None) == (offsets[0] == 0)
            assert after is None or chain[after] == offsets[0] - 1, "it was told before, one place before"
            chain.update(zip(keys, offsets, strict=True))
        assert len(calls) >= 4, worker.served.instance_id
    assert max(len(keys) for keys, _, _ in told[p]) == 2, "chunk by chunk"
