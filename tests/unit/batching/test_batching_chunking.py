import pytest

from pinyon.batching import plan_chunks


@pytest.mark.parametrize(
    ("spans", "budget", "chunk", "expected"),
    [
        ([(0, 100)], 64, 32, [32]),  # a chunk
        ([(0, 20)], 64, 32, [20]),  # the whole rest
        ([(0, 100), (0, 100)], 48, 32, [32, 16]),  # first come, first served
        ([(0, 100), (0, 100)], 32, 32, [32]),
        ([(0, 100)], 30, 32, [16]),  # cut at a block
        ([(5, 100)], 30, 32, [27]),  # so that it ends at a block
        ([(0, 100)], 9, 32, [9]),  # less than a block is better than nothing
        ([(98, 100)], 9, 32, [2]),
        ([(0, 100)], 0, 32, []),
        ([], 64, 32, []),
    ],
)
def test_chunks_worked_by_hand(spans, budget, chunk, expected):
    assert plan_chunks(spans, budget_tokens=budget, chunk_tokens=chunk, block_tokens=16) == expected
