"""The sampler against a brute-force reading of its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import Internal
from pinyon.core.request import SamplingParams
from services.worker.engines.sampling import Sampler, uniform


def reference_distribution(logits: np.ndarray, params: SamplingParams, suppress: set[int]) -> dict[int, float]:
    """Probability of each token that may be drawn, in order of falling probability, ties by id."""
    kept = [(-float(x) / params.temperature, i) for i, x in enumerate(logits.tolist()) if i not in suppress]
    kept.sort()
    if params.top_k:
        kept = kept[: params.top_k]
    best = kept[0][0]
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


LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -4.0, 0.5, 2.5, 1.5], np.float32)
CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9),
    SamplingParams(temperature=2.0, top_k=2, top_p=0.99),
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("suppress", [(), (1, 6)])
def test_frequencies_follow_the_distribution(params: SamplingParams, suppress: tuple[int, ...]) -> None:
    expected = reference_distribution(LOGITS, params, set(suppress))
    sampler, draws = Sampler(8, suppress), 20_000
    counts = np.bincount([sampler.sample(LOGITS, params, i) for i in range(draws)], minlength=8)
    assert set(np.flatnonzero(counts).tolist()) <= set(expected)
    chi2 = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    assert chi2 < 35  # 7 degrees of freedom at most: p ≈ 1e-5, and the draws are seeded


@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**40),
)
def test_every_draw_is_the_inverse_distribution_at_the_hash(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, index: int
) -> None:
    row = np.array(logits, np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    distribution = reference_distribution(row, params, set())
    token = Sampler(len(row)).sample(row, params, index)
    assert token in distribution
    u, seen = uniform(seed, index), 0.0
    for candidate, p in distribution.items():
        if candidate == token:
            assert seen - 1e-9 <= u <= seen + p + 1e-9
        seen += p


def test_greedy_takes_the_lowest_id_of_equals_and_respects_suppression() -> None:
    assert Sampler(8).sample(LOGITS, SamplingParams(), 0) == 1
    assert Sampler(8, (1,)).sample(LOGITS, SamplingParams(), 0) == 3
    assert Sampler(8, (1,)).sample(LOGITS, SamplingParams(temperature=1.0, top_k=1), 5) == 3


@given(temperature=st.floats(0.0, 2.0), scale=st.sampled_from([1.0, 1e20, 3e38]))
def test_extreme_values_draw_a_valid_token(temperature: float, scale: float) -> None:
    row = np.array([0.5, 1.0, -1.0, 0.25], np.float32) * np.float32(scale)
    token = Sampler(4, (3,)).sample(row, SamplingParams(temperature=temperature), 1)
    assert token in (0, 1, 2)


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
    # Fixed for good: a resumed request must draw the same on another version.
    assert uniform(0, 0) == uniform(0, 0)
    assert len(set(numbers.tolist())) == len(numbers)
