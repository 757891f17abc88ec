"""Paced workers serve for real: remote prefill, KV pushed and fetched, resumed requests, the same tokens everywhere."""

from __future__ import annotations

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.request import SamplingParams
from services.worker.app import Worker
from tests.integration.worker_parts import BLOCK_TOKENS, PROMPT, Answer, Fleet, ended, gauge, peer_span, submission

PACED = {"engine": "paced", "prefill_chunk_tokens": 256}


async def serve(fleet: Fleet, worker: Worker, *submissions: worker_pb2.Submission) -> list[Answer]:
    answers = await (await fleet.client(worker)).submit(*submissions)
    await ended(answers)
    return answers


async def test_tokens_are_the_same_alone_in_a_pair_and_resumed(fleet):
    mixed, p, d = [await fleet.start(role, role, **PACED) for role in ("mixed", "prefill", "decode")]
    sampling = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in range(4)]
    alone = await serve(fleet, mixed, *(submission(PROMPT, each) for each in sampling))
    paired = await serve(fleet, d, *(submission(PROMPT, each, prefill=p, decode=d) for each in sampling))
    for one, other in zip(alone, paired, strict=True):
        assert (one.finish, len(one.tokens)) == ("length", 12)
        assert one.text == "".join(map(chr, one.tokens))
        assert other.tokens == one.tokens
    assert len({each.text for each in alone}) == 4
    prompt = PROMPT + alone[0].tokens[:5]
    (rest,) = await serve(fleet, d, submission(prompt, sampling[0], prefill=p, decode=d, generated_tokens=5))
    assert rest.tokens == alone[0].tokens[5:]


async def test_blocks_are_reused_and_fetched_from_a_peer(fleet):
    # Another eviction policy than the default, in a pool that must evict.
    settings = {"blocks": 16, "eviction": "fifo", **PACED}
    holder, p, d = [await fleet.start(role, role, **settings) for role in ("mixed", "prefill", "decode")]
    sampling = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    (first,) = await serve(fleet, holder, submission(PROMPT, sampling))
    (again,) = await serve(fleet, holder, submission(PROMPT, sampling))
    assert again.prefill.local_tokens == 5 * BLOCK_TOKENS
    fetches = [peer_span(holder, 0, 5)]
    (fetched,) = await serve(fleet, d, submission(PROMPT, sampling, prefill=p, decode=d, fetches=fetches))
    assert fetched.prefill.peer_tokens == 5 * BLOCK_TOKENS
    assert first.tokens == again.tokens == fetched.tokens
    (measured,) = p.parts.ledger.take().prefills
    (span,) = measured.fetches
    assert (span.source_id, span.fetched_bytes) == (fetches[0].source_id, measured.fetched_bytes)
    assert 0 < span.fetch_us <= measured.fetch_us
    for turn in range(6):
        await serve(fleet, holder, submission([turn + 40, *PROMPT], sampling))
    assert gauge(holder, "evicted_blocks_total") > 0
