"""A worker's reports of prompts to the conductor."""

from __future__ import annotations

import time

import pytest

from pinyon.batching import LEVEL_BLOCKS, Formed
from pinyon.core.block_keys import SharedPrefix, chain_block_keys, namespace, tokens_to_bytes
from pinyon.core.errors import Unavailable
from pinyon.core.request import SamplingParams
from services.worker.instance import step_members
from services.worker.kv.push import Push
from tests.integration.worker_parts import BLOCK_TOKENS, OTHER, PROMPT, SHORT, Gate, ended, submission


@pytest.mark.parametrize("chunk_tokens", [BLOCK_TOKENS, 512])
@pytest.mark.parametrize("apart", [True, False])
async def test_a_computed_prompt_has_begun_however_short_it_is(fleet, chunk_tokens, apart):
    """One chunk or many: the conductor takes a prompt that ends without having begun for cancelled or failed."""
    p, d, client = await fleet.serving(apart=apart, prefill_chunk_tokens=chunk_tokens)
    await client.answer(PROMPT, SHORT, prefill=p, decode=d, request_id="short")
    await fleet.idle()
    happened = p.parts.ledger.take()
    assert list(happened.begun_prefill_request_ids) == list(happened.ended_prefill_request_ids) == ["short"]
    assert len(happened.prefills) == 1
    p.engine.fail = lambda prefills, decodes: RuntimeError("no") if prefills else None
    failing = await client.answer(OTHER, SHORT, prefill=p, decode=d, request_id="failing")
    assert failing.finish == "error"
    await fleet.idle()
    happened = p.parts.ledger.take()
    assert (list(happened.begun_prefill_request_ids), list(happened.ended_prefill_request_ids)) == ([], ["failing"])


async def test_a_computed_prompt_that_did_not_arrive_has_not_begun(fleet, monkeypatch):
    """The prompt has one chunk; the time until its end says nothing of the instance's speed."""

    async def broken(self) -> None:
        raise Unavailable("the target is gone")

    p, d, client = await fleet.serving(prefill_chunk_tokens=512)
    monkeypatch.setattr(Push, "finish", broken)
    lost = await client.answer(PROMPT, SHORT, prefill=p, decode=d, request_id="lost")
    assert lost.finish == "error"
    await fleet.idle()
    happened = p.parts.ledger.take()
    assert (list(happened.begun_prefill_request_ids), list(happened.ended_prefill_request_ids)) == ([], ["lost"])
    assert not happened.prefills


async def test_the_time_between_tokens_comes_with_its_load(fleet):
    p, d, client = await fleet.serving()
    await client.answer(PROMPT, SHORT, prefill=p, decode=d, request_id="alone")
    await fleet.idle()
    tbt_ms, batch, kv_tokens = d.parts.ledger.token_times.take(idle=True)
    assert tbt_ms > 0
    assert batch == 1
    assert len(PROMPT) <= kv_tokens < len(PROMPT) + SHORT.max_tokens
    assert d.parts.ledger.token_times.take(idle=True) == (0.0, 0.0, 0.0)
    assert d.parts.members.kv_tokens == 0


async def test_an_hour_without_requests_is_not_between_tokens(fleet):
    passed_s = 0.0
    p = await fleet.start("prefill", "p0")
    d, client = await fleet.decode(clock=lambda: time.monotonic() + passed_s)
    for name in ("before", "after"):
        await client.answer(PROMPT, SHORT, prefill=p, decode=d, request_id=name)
        await fleet.idle()
        passed_s += 3600.0
    tbt_ms, *_ = d.parts.ledger.token_times.take(idle=True)
    assert 0 < tbt_ms < 60_000


@pytest.mark.parametrize("apart", [True, False])
async def test_first_token_times_are_told_of_numbered_placements(fleet, apart):
    p, d, client = await fleet.serving(apart=apart)
    numbered = submission(PROMPT, SHORT, prefill=p, decode=d, request_id="numbered")
    numbered.placement.number = 77
    other = submission(OTHER, SHORT, prefill=p, decode=d, request_id="other")
    for answer in await client.submit(numbered, other):
        await answer.wait()
        assert answer.finish == "length"
    (told,) = d.reports.news().first_tokens
    assert (told.placement_number, told.prefill_instance_id) == (77, p.served.instance_id)
    assert told.computed_tokens == len(PROMPT)
    assert 0 < told.compute_us <= told.ttft_us
    assert not d.reports.news().first_tokens


@pytest.mark.parametrize("kernel", ["grouped", "whole", "plain"])
@pytest.mark.parametrize("batching", ["feather:chunk_blocks=1", "fcfs"])
async def test_the_shared_prefix_of_decoded_requests_is_reported(fleet, monkeypatch, batching, kernel):
    """Steps read it once, by a kernel that does so for each group, or by batches that all share a prefix."""
    monkeypatch.setattr(step_members, "LOOK_S", 0.0)
    conductor = await fleet.start_conductor()
    mixed = await fleet.start("mixed", "m0", batching=batching, attention_kernel=kernel, conductor=conductor)
    gate = Gate(lambda decodes: len(decodes) == 2, mixed.engine)
    client = await fleet.client(mixed)
    common = PROMPT[: 5 * BLOCK_TOKENS]  # 5 blocks, 4 of which are a whole level
    asked = [submission([*common, *range(own, own + 4 * BLOCK_TOKENS)], SamplingParams(max_tokens=32, ignore_eos=True),
                        prefill=mixed, decode=mixed, request_id=f"r{own}") for own in (120, 180)]  # fmt: skip
    answers = await client.submit(*asked)
    await gate.reached()
    said = mixed.load()
    start = namespace(mixed.served.fingerprint, mixed.served.layout.layout_id, "")
    keys = chain_block_keys(start, tokens_to_bytes(common), BLOCK_TOKENS)
    once = kernel == "grouped" or (kernel == "whole" and batching != "fcfs")
    expected = (SharedPrefix(keys[3], LEVEL_BLOCKS, 2),) if once else ()
    assert (said.level_blocks, said.shared) == (LEVEL_BLOCKS * len(expected), expected)
    # A report from before the step may have two running requests, but not yet their shared prefix.
    told = (2, LEVEL_BLOCKS * len(expected), expected)
    await fleet.known(
        "m0", lambda state: (state.load.running_requests, state.load.level_blocks, state.load.shared) == told
    )
    if batching == "fcfs":
        assert mixed.parts.members.formed == Formed(requests=2, shared_blocks=4, homogeneity=0.5)
    gate.open()
    await ended(answers)
    await fleet.idle()
    assert mixed.load().shared == ()
    assert mixed.parts.members.formed.shared_blocks == 0 or batching != "fcfs"
