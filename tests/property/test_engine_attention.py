"""Attention alone: its bits do not depend on who shares a read of KV, and its numbers are those of a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from pinyon.model.builtin import builtin_config
from pinyon.model.config import ModelConfig
from services.worker.engines.attention import PagedAttention
from services.worker.engines.blas import pin_blas_threads
from services.worker.engines.decode_plan import KERNELS
from services.worker.engines.segments import SEGMENT_TOKENS
from tests.long import usually

POOL_TOKENS = 12_000
LAYER = 1
F32 = npt.NDArray[np.float32]
# Query heads and KV heads: one to sixteen query heads per KV head, including numbers that do not divide a tile.
HEADS = ((8, 4), (1, 1), (3, 1), (4, 1), (14, 2), (16, 1))
BLOCK_TOKENS = (7, 16, 32, 128, 200)


@cache
def config_of(heads: int, kv_heads: int) -> ModelConfig:
    return replace(builtin_config(), num_layers=2, num_heads=heads, num_kv_heads=kv_heads, hidden_size=32 * heads)


class Batch:
    """Requests whose KV lies in one pool, some of it shared; unwritten values are NaN."""

    def __init__(self, heads: tuple[int, int], block_tokens: int) -> None:
        pin_blas_threads()
        self.config = config_of(*heads)
        self.layout = self.config.kv_layout(block_tokens)
        self.pool = np.full((POOL_TOKENS // block_tokens, *self.layout.shape), np.nan, np.float32)
        self._free = np.random.default_rng(block_tokens).permutation(len(self.pool)).tolist()
        self.tables: list[list[int]] = []
        self.ends: list[int] = []

    def add(self, end: int, parent: int | None, shared: int, rng: np.random.Generator) -> None:
        """Adds a request of ``end`` tokens; those in the first ``shared`` blocks are its parent's."""
        size = self.layout.block_tokens
        mine: list[int] = []
        if parent is not None:
            mine = self.tables[parent][: min(shared, self.ends[parent] // size, end // size)]
        known = len(mine)
        mine = mine + [self._free.pop() for _ in range(self.layout.blocks_for(end) - known)]
        for number in range(known, len(mine)):
            count = min(size, end - number * size)
            shape = (2, count, self.layout.kv_heads, self.layout.head_dim)
            self.pool[mine[number], LAYER, :, :count] = rng.standard_normal(shape, np.float32)
        self.tables.append(mine)
        self.ends.append(end)

    def attention(self, kernel: str) -> PagedAttention:
        return PagedAttention(self.config, self.layout, self.pool, kernel)

    def queries(self, rng: np.random.Generator) -> F32:
        shape = (len(self.ends), self.config.num_heads, self.config.head_dim)
        return rng.standard_normal(shape, np.float32) * np.float32(self.config.head_dim**-0.5)

    def decode(self, attention: PagedAttention, queries: F32, which: Sequence[int]) -> F32:
        tables = [np.array(self.tables[i]) for i in which]
        out = np.full_like(queries, np.nan)
        # A request depends on its own rows only; the rows of the step may be in any order.
        attention.decode(LAYER, queries, attention.plan(which, [self.ends[i] - 1 for i in which], tables), out)
        return out[list(which)]

    def exact(self, queries: F32, request: int) -> npt.NDArray[np.float64]:
        """Returns one request's attention in float64, shape ``(heads, head_dim)``."""
        kv = self.pool[self.tables[request], LAYER].transpose(1, 0, 2, 3, 4)
        shape = (2, -1, self.layout.kv_heads, self.layout.head_dim)
        keys, values = kv.reshape(shape)[:, : self.ends[request]].astype(np.float64)
        groups = self.config.group_size
        grouped = queries[request].astype(np.float64).reshape(self.layout.kv_heads, groups, -1)
        scores = np.einsum("kgd,tkd->kgt", grouped, keys)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("kgt,tkd->kgd", weights, values).reshape(self.config.num_heads, -1)


LENGTHS = st.one_of(
    st.integers(1, 1100),
    st.builds(lambda segments, off: segments * SEGMENT_TOKENS + off, st.integers(1, 4), st.integers(-1, 1)),
)


@seed(11)
@settings(max_examples=usually(25, long=600))
@given(
    heads=st.sampled_from(HEADS),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    trunk=st.one_of(st.none(), LENGTHS),
    requests=st.lists(st.tuples(LENGTHS, st.integers(0, 8), st.integers(0, 1100)), min_size=1, max_size=9),
    number=st.integers(0, 10**6),
)
def test_who_reads_together_does_not_matter(
    heads: tuple[int, int], block_tokens: int, trunk: int | None, requests: list[tuple[int, int, int]], number: int
) -> None:
    """Each request's bits equal those that it has alone, by ``plain``, and as the last query of a prompt's chunk.

    ``requests`` has for each its length, the earlier request with the same beginning, and the number of tokens shared
    with it. With a ``trunk`` all of them begin with the first one's."""
    rng = np.random.default_rng(number)
    batch = Batch(heads, block_tokens)
    for place, (end, parent, shared) in enumerate(requests):
        if trunk is not None:
            end, shared = max(end, min(trunk, 900) + 1), max(shared, trunk)
        batch.add(end, parent % place if place else None, shared // block_tokens, rng)
    queries = batch.queries(rng)
    plain = batch.attention("plain")
    alone = [batch.decode(plain, queries, [i]).tobytes() for i in range(len(requests))]
    for kernel in KERNELS:
        attention = batch.attention(kernel)
        order = rng.permutation(len(requests)).tolist()
        together = batch.decode(attention, queries, order)
        assert [together[order.index(i)].tobytes() for i in range(len(requests))] == alone
    for i, end in enumerate(batch.ends):
        start = max(0, end - int(rng.integers(1, 130)))
        chunk = rng.standard_normal((end - start, *queries.shape[1:]), np.float32)
        chunk[-1] = queries[i]
        out = np.empty_like(chunk)
        plain.attend(LAYER, chunk, start, np.array(batch.tables[i]), out)
        assert out[-1].tobytes() == alone[i]


@pytest.mark.parametrize("end", [1, 64, 300, 1024, 4000])
def test_it_is_the_softmax(end: int) -> None:
    """The error is at most that of one float32 softmax over all keys at once: 1.7e-6 of the largest value."""
    rng = np.random.default_rng(end)
    batch = Batch((8, 4), 16)
    for _ in range(3):
        batch.add(end, None, 0, rng)
    queries = batch.queries(rng)
    found = batch.decode(batch.attention("grouped"), queries, range(3))
    for i in range(3):
        exact = batch.exact(queries, i)
        assert np.abs(found[i] - exact).max() < 1.7e-6 * np.abs(exact).max()


def test_scores_far_apart_in_different_segments() -> None:
    """A segment whose keys weigh nothing beside another's changes nothing, wherever it is."""
    rng = np.random.default_rng(5)
    for loud in range(3):
        batch = Batch((8, 4), 16)
        batch.add(3 * SEGMENT_TOKENS, None, 0, rng)
        queries = batch.queries(rng)
        blocks = batch.tables[0][loud * SEGMENT_TOKENS // 16 : (loud + 1) * SEGMENT_TOKENS // 16]
        batch.pool[blocks, LAYER, 0] *= 300
        found = batch.decode(batch.attention("plain"), queries, [0])[0]
        assert np.isfinite(found).all()
        assert np.abs(found - batch.exact(queries, 0)).max() < 1e-4
