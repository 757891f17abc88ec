"""The load of ``./dev bench drain``: its prompts, and the hit ratio of a time."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest

from bench.drain_load import GROWTH, LENGTH, STRIDE, Answered, PromptLoad, prompts


def test_prompts_grow_until_their_conversation_ends():
    last: dict[int, int] = {}
    for prompt in islice(prompts(1), 3000):
        number = prompt[0] // STRIDE
        assert prompt == list(range(number * STRIDE, number * STRIDE + len(prompt)))
        assert last.get(number, 0) < LENGTH, "it has ended"
        assert 1 <= len(prompt) - last.get(number, 0) <= GROWTH
        last[number] = len(prompt)
    assert list(islice(prompts(1), 50)) == list(islice(prompts(1), 50)) != list(islice(prompts(2), 50))


def test_the_ratio_counts_requests_that_began_in_the_time():
    store = SimpleNamespace(register=lambda buffer, size: None)
    load = PromptLoad(store, 1, 1)
    load.answered = [Answered(0.0, 9.0, 10, 1), Answered(1.0, 1.5, 10, 4), Answered(1.9, 2.5, 30, 30)]
    assert load.ratio(1.0, 2.0) == pytest.approx(34 / 40)
    assert load.ratio(5.0, 6.0) is None
    assert load.worst_s(2.0) == 9.0
