"""The counts of ``./dev bench index`` on a trace, by hand and against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from bench.index_traces import EVERY, seen
from pinyon_lab.traces import TraceRow


def row(*blocks: int, tokens: int = 0, block_tokens: int = 16) -> TraceRow:
    return TraceRow(0.0, tokens or len(blocks) * block_tokens + 1, 1, blocks)


def test_a_prefix_counts_only_up_to_its_last_known_block() -> None:
    found = seen([row(*range(10)), row(0, 1, 2, 3, 4, 99, 6), row(50)], 16)
    assert (found.prompts, found.reusable, found.hits) == (161 + 113 + 17, 80, 1)
    assert {every: tokens // 16 for every, tokens in found.by_place.items() if every < 16} == {1: 5, 2: 4, 4: 4, 8: 0}


def test_the_last_token_is_computed_and_long_blocks_are_cut() -> None:
    found = seen([row(7, tokens=64, block_tokens=64), row(7, tokens=64, block_tokens=64)], 64)
    assert found.reusable == 48
    assert found.by_place[2] == 32


PREFIXES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80)), max_size=6)


@given(PREFIXES)
def test_both_samples_are_as_they_are_defined(prompts: list[tuple[int, int]]) -> None:
    """The prompts are beginnings of three long texts."""
    found = seen((row(*(1000 * text + at for at in range(length))) for text, length in prompts), 16)
    longest = dict.fromkeys(range(3), 0)
    places, hashes = dict.fromkeys(EVERY, 0), dict.fromkeys(EVERY, 0)
    for text, length in prompts:
        shared = min(length, longest[text])
        longest[text] = max(length, longest[text])
        for every in EVERY:
            places[every] += max((at for at in range(1, shared + 1) if at % every == 0), default=0)
            hashes[every] += max(
                (
                    at
                    for at in range(1, shared + 1)
                    if xxh3_64_intdigest((1000 * text + at - 1).to_bytes(16, "little")) % every == 0
                ),
                default=0,
            )
    assert found.by_place == {every: 16 * blocks for every, blocks in places.items()}
    assert found.by_hash == {every: 16 * blocks for every, blocks in hashes.items()}
