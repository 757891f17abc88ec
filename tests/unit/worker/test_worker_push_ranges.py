"""The ranges of a push: each byte of the tokens that the target lacks exactly once, and nothing else."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from pinyon.core.layout import KvLayout
from pinyon.messages.orders import PushTarget
from pinyon.transfer import SegmentDescriptor
from services.worker.kv.push import layer_ranges, whole_blocks

LAYOUT = KvLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=4)
SEGMENT = SegmentDescriptor("127.0.0.1", 1, bytes(16))


def apply(ranges, source: np.ndarray, target: np.ndarray) -> None:
    for here, there, length in ranges:
        assert not target[there : there + length].any(), "a byte was sent twice"
        target[there : there + length] = source[here : here + length]


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_into_chunks_moves_the_same_bytes(seed):
    rng = random.Random(seed)
    tokens = rng.randrange(1, 30)
    blocks = LAYOUT.blocks_for(tokens)
    table = rng.sample(range(10), blocks)
    first = rng.randrange(blocks + 1)
    slots = rng.sample(range(10), blocks - first)
    target = PushTarget(SEGMENT, bytes(16), first, tuple(slot * LAYOUT.block_bytes for slot in slots))
    reused = rng.randrange(tokens // LAYOUT.block_tokens + 1)
    source = np.random.default_rng(seed).integers(1, 256, 10 * LAYOUT.block_bytes).astype(np.uint8)
    moved = np.zeros_like(source)

    apply(whole_blocks(LAYOUT, table, target, 0, reused), source, moved)
    cuts = sorted({reused * 4, tokens, *(rng.randrange(reused * 4, tokens + 1) for _ in range(3))})
    for start, end in pairwise(cuts):
        for layer in range(LAYOUT.layers):
            apply(layer_ranges(LAYOUT, table, target, layer, start, end), source, moved)

    shape = (10, LAYOUT.layers, 2, LAYOUT.block_tokens, LAYOUT.token_bytes)
    there, here = moved.reshape(shape), source.reshape(shape)
    expected = np.zeros_like(there)
    for position in range(first * 4, tokens):
        block, offset = divmod(position, 4)
        expected[slots[block - first], :, :, offset] = here[table[block], :, :, offset]
    assert (there == expected).all()
