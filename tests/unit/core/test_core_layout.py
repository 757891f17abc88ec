"""KV layout offsets against a NumPy array of the same shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.layout import KvLayout


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_ranges_are_the_arrays_bytes(layers, heads, dim, block_tokens, data):
    layout = KvLayout(layers, heads, dim, block_tokens)
    array = np.arange(np.prod(layout.shape), dtype="<f4").reshape(layout.shape)
    raw = array.tobytes()
    assert len(raw) == layout.block_bytes
    layer = data.draw(st.integers(0, layers - 1))
    first = data.draw(st.integers(0, block_tokens - 1))
    end = data.draw(st.integers(first + 1, block_tokens))
    got = b"".join(raw[offset : offset + length] for offset, length in layout.ranges(layer, first, end))
    assert got == array[layer, :, first:end].tobytes()


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_tokens"])
def test_nothing_may_be_zero(field):
    with pytest.raises(ValueError, match=field):
        KvLayout(**{"layers": 1, "kv_heads": 1, "head_dim": 1, "block_tokens": 1, field: 0})


def test_layouts_that_differ_have_different_ids():
    base = {"layers": 2, "kv_heads": 3, "head_dim": 4, "block_tokens": 5, "dtype": "float32"}
    others = [{**base, key: 7} for key in ("layers", "kv_heads", "head_dim", "block_tokens")]
    ids = {KvLayout(**values).layout_id for values in (base, *others, {**base, "dtype": "float16"})}
    assert len(ids) == 6


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_blocks_for(tokens, blocks):
    assert KvLayout(1, 1, 1, 32).blocks_for(tokens) == blocks
