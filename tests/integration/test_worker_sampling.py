"""Penalties, min_tokens, stop tokens and log-probabilities, on every way of a request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pinyon.core.request import SamplingParams
from tests.integration.worker_parts import BLOCK_TOKENS, alone, check, gauge, run_all, submission, tiny_card
from tests.unit.worker.caches import Holder


def make_asks(count: int, max_tokens: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Returns requests with few different tokens in the prompts, so that penalties apply to generated tokens."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        prompt = [rng.randrange(60, 90) for _ in range(rng.randrange(1, 40))]
        logprobs = rng.choice([-1, 0, 3])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(2**32),
            min_p=rng.choice([0.0, 0.02]),
            min_tokens=rng.choice([0, max_tokens - 5]),
            stop_token_ids=tuple(rng.randrange(32, 127) for _ in range(rng.choice([0, 9]))),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            presence_penalty=rng.choice([0.0, -0.5]),
            logit_bias=rng.choice([(), ((101, 1.5), (110, -2.0))]),
            logprobs=logprobs,
            prompt_logprobs=logprobs >= 0 and rng.random() < 0.5,
        )
        asks.append((prompt, sampling))
    return asks


def test_the_asks_tell_the_parameters_apart():
    """Each parameter changes the tokens of some requests, and some end early; otherwise the tests below show little."""
    asks = make_asks(24, 40, seed=1)
    neutral = SamplingParams()
    for name in ("min_p", "min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"):
        changed = 0
        for prompt, sampling in asks:
            if getattr(sampling, name) != getattr(neutral, name) and not changed:
                without = replace(sampling, **{name: getattr(neutral, name)})
                changed += alone(prompt, without).tokens != alone(prompt, sampling).tokens
        assert changed, name
    assert any(len(alone(*ask).tokens) < 40 for ask in asks)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["mixed", "pair"])
async def test_answers_are_those_of_one_engine(fleet, elsewhere):
    p, d, client = await fleet.serving(apart=elsewhere, prefill_chunk_tokens=7)
    asks = make_asks(24, 40, seed=1)
    check(asks, await run_all(client, p, d, asks))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["mixed", "pair"])
async def test_answers_stay_the_same_when_requests_are_preempted(fleet, elsewhere):
    """The pool holds two requests at their end. Tokens generated earlier do not count as prompt for the penalties."""
    chunk = 16 if elsewhere else 12
    p, d, client = await fleet.serving(apart=elsewhere, blocks=24, max_batch=8, prefill_chunk_tokens=chunk)
    asks = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in make_asks(16, 60, seed=2)]
    check(asks, await run_all(client, p, d, asks))
    assert gauge(d, "preemptions_total") > 4


@pytest.mark.parametrize("cut", [1, 7, 23])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["mixed", "pair"])
async def test_a_resumed_request_goes_on_as_if_nothing_had_happened(fleet, elsewhere, cut):
    p, d, client = await fleet.serving(apart=elsewhere)
    sampling = SamplingParams(
        max_tokens=24,
        temperature=0.8,
        seed=4,
        min_tokens=24,
        repetition_penalty=1.2,
        frequency_penalty=0.6,
        presence_penalty=0.3,
        logprobs=2,
        prompt_logprobs=True,
    )
    prompt = [random.Random(cut).randrange(60, 90) for _ in range(35)]
    whole = alone(prompt, sampling)
    (rest,) = await client.submit(
        submission(prompt + whole.tokens[:cut], sampling, prefill=p, decode=d, generated_tokens=cut)
    )
    await rest.wait()
    assert rest.tokens == whole.tokens[cut:]
    assert rest.logprobs == whole.logprobs[cut:]
    assert rest.prompt_logprobs is None
    assert rest.last.usage.completion_tokens == 24


@pytest.mark.parametrize("elsewhere", [False, True], ids=["mixed", "pair"])
async def test_a_prompt_with_logprobs_reuses_nothing_but_serves_others(fleet, elsewhere):
    p, d, client = await fleet.serving(apart=elsewhere)
    prompt = list(range(40, 40 + 6 * BLOCK_TOKENS + 3))
    plain = SamplingParams(max_tokens=3, ignore_eos=True)
    telling = replace(plain, logprobs=1, prompt_logprobs=True)
    for number in range(2):
        before = sum(prefill for prefill, _ in p.engine.steps)
        check([(prompt, telling)], await run_all(client, p, d, [(prompt, telling)]))
        computed = sum(prefill for prefill, _ in p.engine.steps) - before
        assert computed == len(prompt), number
        (answer,) = await run_all(client, p, d, [(prompt, plain)])
        check([(prompt, plain)], [answer])
        assert answer.last.usage.cached_tokens == 6 * BLOCK_TOKENS
        assert answer.logprobs == []


async def test_a_prompt_of_one_token_has_no_log_probabilities_to_tell(fleet):
    m = await fleet.start("mixed", "m0")
    ask = ([65], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=True))
    (answer,) = await run_all(await fleet.client(m), None, None, [ask])
    check([ask], [answer])
    assert answer.prompt_logprobs == []


async def test_a_prompt_that_another_has_no_room_for_is_told_from_here(fleet):
    full, m = await fleet.start("prefill", "p0", room_timeout_s=0.05), await fleet.start("mixed", "m0")
    held = Holder(full.parts.cache, [], 128)
    ask = (list(range(40, 90)), SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=True))
    (answer,) = await run_all(await fleet.client(m), full, m, [ask])
    check([ask], [answer])
    assert answer.prefill.prefill_instance_id == "m0"
    held.end()


async def test_log_probabilities_are_right_when_a_step_is_repeated(fleet):
    m = await fleet.start("mixed", "m0")
    m.engine.fail = lambda prefills, decodes: RuntimeError("together") if len(prefills) + len(decodes) > 1 else None
    asks = make_asks(6, 12, seed=3)
    check(asks, await run_all(await fleet.client(m), None, None, asks))


async def test_a_stop_token_ends_the_text_but_not_before_min_tokens(fleet):
    _, client = await fleet.mixed()
    prompt = list(range(50, 77))
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    tokens = alone(prompt, free).tokens
    stop = tokens[9]
    first = tokens.index(stop)
    stopped = replace(free, stop_token_ids=(200, stop))
    later = replace(stopped, min_tokens=first + 2)
    one, two = await run_all(client, None, None, [(prompt, stopped), (prompt, later)])
    check([(prompt, stopped), (prompt, later)], [one, two])
    assert one.tokens == tokens[: first + 1]
    assert one.text == tiny_card().tokenizer.decode(tokens[:first])
    assert one.finish == "stop"
    assert two.tokens[:first] == tokens[:first]
    assert len(two.tokens) > first + 2
    assert stop not in two.tokens[: first + 2]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"stop_token_ids": (1, 272)}, "stop_token_ids"), ({"logit_bias": ((272, 1.0),)}, "logit_bias")],
)
async def test_tokens_outside_the_vocabulary_are_refused(fleet, change, field):
    _, client = await fleet.mixed()
    answer = await client.answer([65], replace(SamplingParams(), **change))
    assert (answer.last.error.code, answer.last.error.field) == ("INVALID_ARGUMENT", field)
    assert "272" in answer.last.error.message
