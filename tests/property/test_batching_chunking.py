"""Any chunking of a prompt computes every token exactly once, in order and within the budget, and makes progress."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import plan_chunks
from tests.long import usually


@settings(max_examples=usually(25, long=300))
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    budget=st.integers(1, 100),
    chunk=st.integers(1, 100),
    block=st.integers(1, 40),
)
def test_all_prompts_are_computed_in_bounded_steps(lengths, budget, chunk, block):
    spans = [(0, length) for length in lengths]
    for _ in range(sum(lengths)):
        takes = plan_chunks(spans, budget_tokens=budget, chunk_tokens=chunk, block_tokens=block)
        assert takes
        assert all(0 < take <= chunk for take in takes)
        assert sum(takes) <= budget
        moved = [(start + take, end) for (start, end), take in zip(spans, takes, strict=False)]
        assert all(start <= end for start, end in moved)
        spans = [span for span in (*moved, *spans[len(takes) :]) if span[0] < span[1]]
        if not spans:
            return
    raise AssertionError("no end")
