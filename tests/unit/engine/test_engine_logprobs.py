"""Log-probabilities against their definition, summed exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import Internal
from services.worker.engines.sampling import logprob_rows, token_logprob


def reference(logits: list[float]) -> list[float]:
    best = max(logits)
    total = math.log(math.fsum(math.exp(x - best) for x in logits))
    return [x - best - total for x in logits]


@given(
    logits=st.lists(st.sampled_from([-30.0, -1.0, 0.0, 0.25, 0.5, 1.0, 2.0, 40.0]), min_size=1, max_size=30),
    top=st.integers(0, 20),
    data=st.data(),
)
def test_they_are_the_log_softmax_and_ties_stand_by_rising_id(logits, top, data):
    token = data.draw(st.integers(0, len(logits) - 1))
    expected = reference(logits)
    told = token_logprob(np.array(logits, np.float32), token, top)
    assert told.logprob == pytest.approx(expected[token], abs=1e-12)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top]
    assert [i for i, _ in told.top] == order
    assert [value for _, value in told.top] == pytest.approx([expected[i] for i in order], abs=1e-12)


def test_float64_tells_apart_what_float32_would_not():
    """The large logit stands beside 150,000 small ones, which float32 sums lose."""
    logits = np.zeros(150_000, np.float32)
    logits[7] = 20.0
    expected = -math.log1p(149_999 * math.exp(-20.0))
    assert token_logprob(logits, 7, 0).logprob == pytest.approx(expected, rel=1e-12)


def test_rows_are_what_each_is_alone():
    logits = np.random.default_rng(4).normal(0, 3, (9, 50)).astype(np.float32)
    tokens = np.array([0, 49, 3, 3, 7, 8, 9, 10, 11], "<u4")
    rows = logprob_rows(logits, tokens, 3)
    for number, token in enumerate(tokens.tolist()):
        own = token_logprob(logits[number], token, 3)
        assert rows.logprobs[number] == np.float32(own.logprob)
        assert rows.top_tokens[number].tolist() == [token for token, _ in own.top]
        assert rows.top_logprobs[number].tolist() == [float(np.float32(value)) for _, value in own.top]


def test_more_than_the_vocabulary_and_none_at_all():
    logits = np.array([[0.0, 1.0]], np.float32)
    assert logprob_rows(logits, np.array([1], "<u4"), 20).top_tokens.tolist() == [[1, 0]]
    assert logprob_rows(logits[:0], np.array([], "<u4"), 2).top_logprobs.shape == (0, 2)


def test_a_logit_that_is_not_finite_is_an_internal_error():
    with pytest.raises(Internal, match="not finite"):
        logprob_rows(np.array([[0.0, np.nan]], np.float32), np.array([0], "<u4"), 0)
