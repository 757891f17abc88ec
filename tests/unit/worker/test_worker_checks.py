"""The block tables that an engine accepts: no step writes outside the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import DecodeSlot
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.request import SamplingParams
from pinyon.model.builtin import builtin_config
from services.worker.engines.checks import check_step

BLOCKS = 6
LAYOUT = KvLayout(1, kv_heads=1, head_dim=1, block_tokens=4)


@given(
    st.lists(st.one_of(st.integers(0, BLOCKS - 1), st.integers(-(2**62), 2**62)), max_size=8),
    st.integers(0, 40),
    st.sampled_from([list, tuple]),
)
def test_tables_are_taken_if_they_name_enough_blocks_of_the_pool(blocks, position, kind):
    need = position // 4 + 1
    good = need <= min(len(blocks), BLOCKS) and all(0 <= block < BLOCKS for block in blocks[:need])
    slot = DecodeSlot(7, position, kind(blocks), SamplingParams(), 0)
    if good:
        check_step(builtin_config(), LAYOUT, BLOCKS, [], [slot])
        return
    with pytest.raises(InvalidArgument, match="block"):
        check_step(builtin_config(), LAYOUT, BLOCKS, [], [slot])
