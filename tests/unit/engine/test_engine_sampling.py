"""The sampler against its definition, read by brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import TokenCounts
from pinyon.core.errors import Internal, InvalidArgument
from pinyon.core.request import SamplingParams
from services.worker.engines.sampling import Sampler
from services.worker.engines.uniform import uniform


def reference_scores(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    *,
    index: int = 0,
    eos: Sequence[int] = (),
) -> list[float]:
    """Returns the logits after each step that does not depend on chance, computed one by one."""
    scores = [float(x) for x in logits]
    for token, bias in params.logit_bias:
        scores[token] += bias
    if index < params.min_tokens:
        for token in {*params.stop_token_ids, *eos}:
            scores[token] = -math.inf
    for token in {*prompt, *generated}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in generated:
        scores[token] -= params.frequency_penalty
    for token in set(generated):
        scores[token] -= params.presence_penalty
    return scores


def reference_distribution(scores: Sequence[float], params: SamplingParams, suppress: set[int]) -> dict[int, float]:
    """Returns the probability of each token that may be drawn, most probable first, ties by id."""
    kept = [(-float(x) / params.temperature, i) for i, x in enumerate(scores) if i not in suppress and x > -math.inf]
    kept.sort()
    best = kept[0][0]
    kept = [(score, i) for score, i in kept if math.exp(best - score) >= params.min_p]
    if params.top_k:
        kept = kept[: params.top_k]
    weights = [(i, math.exp(best - score)) for score, i in kept]
    total = math.fsum(w for _, w in weights)
    out: dict[int, float] = {}
    seen = 0.0
    for i, w in weights:
        if seen >= params.top_p * total and out:
            break
        out[i] = w
        seen += w
    total = math.fsum(out.values())
    return {i: w / total for i, w in out.items()}


def assert_drawn(token: int, distribution: dict[int, float], u: float) -> None:
    """Asserts that ``u`` lies in the token's part of the distribution."""
    assert token in distribution
    seen = 0.0
    for candidate, p in distribution.items():
        if candidate == token:
            assert seen - 1e-9 <= u <= seen + p + 1e-9
        seen += p


LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -4.0, 0.5, 2.5, 1.5], np.float32)
CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9),
    SamplingParams(temperature=2.0, top_k=2, top_p=0.99),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=2.0, min_p=0.2, top_k=4, top_p=0.95),
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("suppress", [(), (1, 6)])
def test_frequencies_follow_the_distribution(params: SamplingParams, suppress: tuple[int, ...]) -> None:
    expected = reference_distribution(LOGITS.tolist(), params, set(suppress))
    sampler, draws = Sampler(8, suppress), 5_000
    counts = np.bincount([sampler.sample(LOGITS, params, i) for i in range(draws)], minlength=8)
    assert set(np.flatnonzero(counts).tolist()) <= set(expected)
    chi2 = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    assert chi2 < 35  # 7 degrees of freedom at most: p ≈ 1e-5, and the draws are seeded


@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**40),
)
def test_every_draw_is_the_inverse_distribution_at_the_hash(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, index: int
) -> None:
    row = np.array(logits, np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, min_p=min_p)
    distribution = reference_distribution(logits, params, set())
    assert_drawn(Sampler(len(row)).sample(row, params, index), distribution, uniform(seed, index))


def test_greedy_takes_the_lowest_of_equals_and_obeys_suppression() -> None:
    assert Sampler(8).sample(LOGITS, SamplingParams(), 0) == 1
    assert Sampler(8, (1,)).sample(LOGITS, SamplingParams(), 0) == 3
    assert Sampler(8, (1,)).sample(LOGITS, SamplingParams(temperature=1.0, top_k=1), 5) == 3


TOKENS = st.integers(0, 11)
SOME_TOKENS = st.lists(TOKENS, max_size=12)
HUNDREDTHS = st.integers(-200, 200).map(lambda number: number / 100)
PENALISED = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 4]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 9),
    stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]),
    frequency_penalty=HUNDREDTHS,
    presence_penalty=HUNDREDTHS,
    logit_bias=st.dictionaries(TOKENS, st.integers(-9, 9).map(float), max_size=4).map(
        lambda one: tuple(sorted(one.items()))
    ),
)


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda tenths: tenths / 10), min_size=12, max_size=12),
    params=PENALISED,
    prompt=st.lists(TOKENS, min_size=1, max_size=12),
    generated=SOME_TOKENS,
)
def test_every_adjustment_is_that_of_the_definition(
    logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int]
) -> None:
    row, index, eos, suppress = np.array(logits, np.float32), len(generated), (2, 7), {5}
    counts = TokenCounts.needed(params, np.array(prompt + generated, "<u4"), index)
    scores = reference_scores(row, params, prompt, generated, index=index, eos=eos)
    token = Sampler(12, tuple(suppress), eos).sample(row, params, index, counts)
    if params.temperature == 0.0 or params.top_k == 1:
        assert scores[token] >= max(score for i, score in enumerate(scores) if i not in suppress) - 1e-9
        assert token not in suppress
        return
    assert_drawn(token, reference_distribution(scores, params, suppress), uniform(params.seed, index))


PROMPT, GENERATED = [1, 3], [3, 6, 6]


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({}, 1),
        ({"logit_bias": ((4, 7.5),)}, 4),
        ({"logit_bias": ((1, -100.0), (3, -100.0))}, 6),
        ({"repetition_penalty": 2.0}, 2),  # 1.5, 1.5 and 1.25 for earlier tokens
        ({"repetition_penalty": 0.5}, 1),
        ({"presence_penalty": 2.0}, 1),  # the prompt does not count
        ({"presence_penalty": -2.0}, 3),
        ({"frequency_penalty": -1.5}, 6),
        ({"min_tokens": 4, "stop_token_ids": (1, 3)}, 6),
        ({"min_tokens": 3, "stop_token_ids": (1, 3)}, 1),  # three tokens were generated
        ({"min_tokens": 4}, 3),  # 1 is EOS
        ({"min_tokens": 4, "ignore_eos": True}, 3),
        ({"min_tokens": 3, "ignore_eos": True}, 1),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_each_parameter_changes_the_choice_as_it_should(change: dict[str, Any], token: int, temperature: float) -> None:
    params = replace(SamplingParams(temperature=temperature, top_p=0.4), **change)
    counts = TokenCounts.needed(params, np.array(PROMPT + GENERATED, "<u4"), len(GENERATED))
    assert Sampler(8, (), (1,)).sample(LOGITS, params, len(GENERATED), counts) == token


def test_what_may_not_be_sampled_stays_so_whatever_the_bias() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(3,), logit_bias=((1, 100.0), (3, 100.0)))
    assert Sampler(8, (1,)).sample(LOGITS, params, 0) == 6
    assert Sampler(8, (1,)).sample(LOGITS, params, 1) == 3


def test_nothing_left_to_sample_names_the_parameter() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(0, 1))
    for temperature in (0.0, 1.0):
        with pytest.raises(InvalidArgument) as caught:
            Sampler(3, (2,)).sample(LOGITS[:3], replace(params, temperature=temperature), 0)
        assert caught.value.field == "min_tokens"


def test_penalties_without_the_tokens_so_far_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="tokens so far"):
        Sampler(8).sample(LOGITS, SamplingParams(presence_penalty=1.0), 0)


@given(temperature=st.floats(0.0, 2.0), scale=st.sampled_from([1.0, 1e20, 3e38]))
def test_extreme_values_draw_a_valid_token(temperature: float, scale: float) -> None:
    row = np.array([0.5, 1.0, -1.0, 0.25], np.float32) * np.float32(scale)
    token = Sampler(4, (3,)).sample(row, SamplingParams(temperature=temperature), 1)
    assert token in (0, 1, 2)


@pytest.mark.parametrize("penalty", [5e-324, 1e-320, 1e-300])
@pytest.mark.parametrize("change", [{}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 1e-320}])
def test_the_smallest_repetition_penalty_keeps_to_past_tokens(penalty: float, change: dict[str, Any]) -> None:
    counts = TokenCounts(np.array([5, 6, 1], np.uint32), 0)
    row = np.linspace(-3, 3, 8).astype(np.float32)
    params = SamplingParams(repetition_penalty=penalty, **{"temperature": 1.0, **change})
    assert Sampler(8).sample(row, params, 0, counts) in (5, 6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_an_internal_error(bad: float) -> None:
    row = LOGITS.copy()
    row[2] = bad
    with pytest.raises(Internal, match="not finite"):
        Sampler(8).sample(row, SamplingParams(), 0)


def test_uniform_numbers_are_uniform_and_independent_of_order() -> None:
    numbers = np.array([uniform(seed, index) for seed in range(100) for index in range(100)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, 20, (0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 45
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    by_seed = numbers.reshape(100, 100)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.05
    assert len(set(numbers.tolist())) == len(numbers)
