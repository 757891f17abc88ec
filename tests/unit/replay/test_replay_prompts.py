"""Prompts for a trace that has ids only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.eviction import Traits
from pinyon_lab.replay import ReplayPrompts, TokenRange
from pinyon_lab.simulator.workload import Arrival

SIZE = 4
PRINTABLE = TokenRange()


def arrival(tokens: int, blocks: tuple[int, ...], follows: int = -1, output: int = 3) -> Arrival:
    return Arrival(0.0, tokens, output, blocks, Traits(), follows)


def prompts(*arrivals: Arrival, seed: int = 7, tokens: TokenRange = PRINTABLE) -> ReplayPrompts:
    return ReplayPrompts(arrivals, SIZE, seed, tokens)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=6), st.integers(0, 3))
def test_prompts_share_what_their_ids_share(paths: list[list[int]], short: int) -> None:
    """An id stands for a block and all before it, so its text is made of the path to it."""
    ids: dict[tuple[int, ...], int] = {}
    arrivals = []
    for path in paths:
        blocks = tuple(ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path)))
        arrivals.append(arrival(SIZE * len(path) - short, blocks))
    made = prompts(*arrivals, tokens=TokenRange(0, 1 << 30))
    sent = [made.of(number) for number in range(len(arrivals))]
    for one, first in zip(arrivals, sent, strict=True):
        assert len(first) == one.tokens
        for other, second in zip(arrivals, sent, strict=True):
            whole = min(one.tokens, other.tokens) // SIZE
            shared = next((at for at in range(whole) if one.blocks[at] != other.blocks[at]), whole)
            differ = np.flatnonzero(first[: whole * SIZE] != second[: whole * SIZE])
            assert shared == (differ[0] // SIZE if len(differ) else whole)


def test_what_follows_goes_on_with_what_was_generated() -> None:
    first = arrival(6, (1, 2))
    second = arrival(14, (1, 3, 4, 5), follows=0)
    third = arrival(18, (1, 3, 4, 6, 7), follows=1)
    made = prompts(first, second, third, arrival(13, (1, 3, 4, 5)))
    sent = made.of(0)
    made.answered(0, [500, 501, 502])
    follows = made.of(1)
    assert follows[:9].tolist() == [*sent.tolist(), 500, 501, 502]
    assert len(follows) == 14
    assert set(follows[9:].tolist()) <= set(range(33, 127))
    again = made.of(3)
    assert again.tolist() == follows[:13].tolist(), "those ids mean these tokens from now on"
    made.answered(1, [600])
    assert made.of(2)[:15].tolist() == [*follows.tolist(), 600], "nothing is held of requests that nobody follows"
    assert not made._sent
    assert not made._transcripts


def test_a_cut_or_changed_conversation_is_not_continued() -> None:
    made = prompts(arrival(8, (1, 2)), arrival(8, (1, 9), follows=0), arrival(12, (1, 2, 4), follows=0))
    sent = made.of(0)
    made.answered(0, [500])
    other = made.of(1)
    assert other[:4].tolist() == sent[:4].tolist()
    assert 500 not in other
    assert made.of(2)[:9].tolist() == [*sent.tolist(), 500]


def test_nothing_is_known_of_an_answer_that_failed() -> None:
    made = prompts(arrival(8, (1, 2)), arrival(12, (1, 2, 4), follows=0))
    sent = made.of(0)
    made.answered(0, ())
    assert made.of(1)[:8].tolist() == sent.tolist()


def test_another_seed_shares_nothing() -> None:
    (one, other) = (prompts(arrival(40, tuple(range(10))), seed=seed).of(0) for seed in (1, 2))
    assert not any(np.array_equal(one[at : at + SIZE], other[at : at + SIZE]) for at in range(0, 40, SIZE))


@pytest.mark.parametrize("text", ["", "7", "9-3", "a-b", "1-4294967296", "-1-5"])
def test_ranges_of_tokens(text: str) -> None:
    with pytest.raises(InvalidArgument, match="range of tokens"):
        TokenRange.parse(text)
    assert TokenRange.parse("0-9") == (0, 9)
