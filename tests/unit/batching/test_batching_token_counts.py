"""The token counts behind penalties, against a recount of all tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import TokenCounts
from pinyon.core.request import SamplingParams

tokens = st.lists(st.integers(0, 300), max_size=60)


def told(counts: TokenCounts) -> dict[int, int]:
    ids = counts.ids.tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, counts.generated.tolist(), strict=True))


def recount(prompt: list[int], generated: list[int]) -> dict[int, int]:
    return dict.fromkeys(prompt, 0) | Counter(generated)


@given(prompt=tokens, before=tokens, after=st.lists(st.integers(0, 400), max_size=300))
def test_tokens_are_counted_wherever_they_come_from(prompt, before, after):
    """The tokens of a request that moved here count as if the request had been here all the time."""
    counts = TokenCounts(np.array(prompt + before, "<u4"), len(before))
    assert told(counts) == recount(prompt, before)
    for token in after:
        counts.add(token)
    assert told(counts) == recount(prompt, before + after)
    assert told(TokenCounts(np.array(prompt + before + after, "<u4"), len(before + after))) == told(counts)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), None),
        (SamplingParams(temperature=1.0, min_p=0.1, min_tokens=3, logit_bias=((1, 1.0),)), None),
        (SamplingParams(frequency_penalty=0.1), {9: 2, 7: 1}),
        (SamplingParams(presence_penalty=-0.1), {9: 2, 7: 1}),
        (SamplingParams(repetition_penalty=1.1), {5: 0, 9: 2, 7: 1}),
    ],
)
def test_only_what_a_request_needs_is_counted(sampling, expected):
    counts = TokenCounts.needed(sampling, np.array([5, 9, 9, 7, 9], "<u4"), 3)
    assert (None if counts is None else told(counts)) == expected
