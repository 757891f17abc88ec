"""Causal attention over the paged pool, in products whose shapes depend on nothing but a query's absolute position.

A query at position ``p`` sees a key range padded to ``L = padded_length(p)``, a function of ``p`` alone. Queries lie in
the lanes of tiles: ``(L, head_dim) @ (head_dim, TILE)`` gives the scores, ``(head_dim, L) @ (L, TILE)`` the output.
What the other lanes hold (other query heads of the same KV head, other positions of the chunk with the same ``L``,
zeros) does not change a lane's bits. Keys after ``p`` weigh exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.model.config import ModelConfig
from services.worker.engines.blas import TILE, check_lanes_alike

__all__ = ["LENGTH_STEP", "DecodeGroup", "PagedAttention", "padded_length"]

_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]

LENGTH_STEP = 64
"""Key ranges are padded to a multiple of this. A prompt's queries are computed in groups of as many positions."""

_KEYS = np.arange(LENGTH_STEP)


def padded_length(position: int) -> int:
    """Keys in the products of a query at ``position``."""
    return (position // LENGTH_STEP + 1) * LENGTH_STEP


GROUP_TOKENS_MAX = 1024
"""Keys of one group of decoded tokens: short contexts share calls, long ones stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoded tokens of several requests with the same padded length.

    ``rows``: their rows in the step. ``ends``: position + 1 of each. ``blocks``: ``(requests, blocks)``.
    """

    rows: _I64
    ends: list[int]
    blocks: _I64
    length: int


class PagedAttention:
    """Reads and writes the pool; its workspaces grow to the longest context met."""

    def __init__(self, config: ModelConfig, layout: KvLayout, pool: _F32) -> None:
        if config.group_size > TILE:
            raise InvalidArgument(
                f"{config.group_size} query heads per KV head are not supported, at most {TILE} are",
                field="num_key_value_heads",
            )
        self._layout = layout
        self._pool = pool
        # (block, layer, k|v) planes as rows, so that a gather is one np.take of whole planes
        self._planes = pool.reshape(-1, layout.block_tokens * layout.kv_heads * layout.head_dim)
        self._groups = config.group_size
        self._kv_heads = config.num_kv_heads
        self._dim = config.head_dim
        # Positions per tile: as many as fit with all query heads of a KV head.
        self._positions = TILE // self._groups
        # Position within its tile of each lane; unused lanes count as its last position.
        self._lane_positions = np.minimum(np.arange(TILE) // self._groups, self._positions - 1)
        self._kv_space = np.empty((2, 0), np.float32)
        self._score_space = np.empty(0, np.float32)

    def write(self, layer: int, blocks: _I64, offsets: _I64, keys: _F32, values: _F32) -> None:
        """Stores K and V, ``(rows, kv_heads, head_dim)``, at the rows' places in the pool."""
        self._pool[blocks, layer, 0, offsets] = keys
        self._pool[blocks, layer, 1, offsets] = values

    def attend(self, layer: int, queries: _F32, start: int, table: _I64, out: _F32) -> None:
        """A chunk: ``queries`` (scaled) ``(n, heads, head_dim)`` at positions ``[start, start + n)``; ``out`` likewise.

        The pool must hold K and V of ``[0, start + n)`` already.
        """
        n = queries.shape[0]
        end = start + n
        longest = padded_length(end - 1)
        keys, values = self._gather(layer, table[None, : self._layout.blocks_for(end)], [end], longest)
        done = 0
        while done < n:
            length = padded_length(start + done)
            count = min(n - done, length - start - done)
            part = slice(done, done + count)
            self._attend_positions(queries[part], start + done, keys[:, :length], values[:, :length], out[part])
            done += count

    def group(self, rows: Sequence[int], positions: Sequence[int], tables: Sequence[_I64]) -> list[DecodeGroup]:
        """Decoded tokens, one per request, sorted into groups that :meth:`attend_group` takes at once."""
        by_length: dict[int, list[int]] = {}
        for i, position in enumerate(positions):
            by_length.setdefault(padded_length(position), []).append(i)
        groups = []
        for length, members in by_length.items():
            size = max(1, GROUP_TOKENS_MAX // length)
            for first in range(0, len(members), size):
                part = members[first : first + size]
                ends = [positions[i] + 1 for i in part]
                # Requests that need fewer blocks than the longest read block 0, and the gather zeroes what they read.
                blocks = np.zeros((len(part), self._layout.blocks_for(max(ends))), np.int64)
                for row, i in enumerate(part):
                    need = self._layout.blocks_for(ends[row])
                    blocks[row, :need] = tables[i][:need]
                groups.append(DecodeGroup(np.array([rows[i] for i in part]), ends, blocks, length))
        return groups

    def attend_group(self, layer: int, queries: _F32, group: DecodeGroup, out: _F32) -> None:
        """``queries`` (scaled) and ``out``: ``(all rows, heads, head_dim)``, of which the group has some."""
        keys, values = self._gather(layer, group.blocks, group.ends, group.length)
        count, groups, kv_heads, dim = len(group.ends), self._groups, self._kv_heads, self._dim
        tiled = np.zeros((count, kv_heads, dim, TILE), np.float32)
        tiled[..., :groups] = queries[group.rows].reshape(count, kv_heads, groups, dim).transpose(0, 1, 3, 2)
        # Few lanes of a decoded token's tile are used: the softmax of the others is not worth its time.
        # (Never one lane: NumPy would drop that axis and add along the keys in another order.)
        result = self._softmax_product(tiled, max(2, groups), keys, values, ends=group.ends)
        out[group.rows] = result[..., :groups].transpose(0, 1, 3, 2).reshape(count, kv_heads * groups, dim)

    def self_check(self) -> None:
        """Raises :class:`FailedPrecondition` if a query's bits depend on its lane, at a few lengths."""
        rng = np.random.default_rng(LENGTH_STEP)
        for length in (LENGTH_STEP, 2 * LENGTH_STEP, 7 * LENGTH_STEP, 16 * LENGTH_STEP):
            shape = (1, length, self._kv_heads, self._dim)
            keys = rng.standard_normal(shape, dtype=np.float32)
            values = rng.standard_normal(shape, dtype=np.float32)

            def one_tile(lanes: _F32, keys: _F32 = keys, values: _F32 = values) -> _F32:
                tiled = np.broadcast_to(lanes, (1, self._kv_heads, self._dim, TILE))
                everything = np.ascontiguousarray(tiled)
                result = self._softmax_product(everything, TILE, keys, values, ends=[keys.shape[1]])
                first_head: _F32 = result[0, 0]
                return first_head

            check_lanes_alike(one_tile, self._dim, f"attention over {length} keys")

    def _gather(self, layer: int, blocks: _I64, ends: Sequence[int], length: int) -> tuple[_F32, _F32]:
        """K and V of positions ``[0, end)`` of each request, then zeros: ``(requests, length, kv_heads, head_dim)``.

        ``blocks``: ``(requests, blocks of the longest)``.
        """
        layout = self._layout
        requests, count = blocks.shape
        width = layout.kv_heads * layout.head_dim
        tokens = max(length, count * layout.block_tokens)
        size = requests * tokens * width
        if self._kv_space.shape[1] < size:
            self._kv_space = np.empty((2, size + size // 2), np.float32)
        rows = (blocks * layout.layers + layer) * 2
        pair = []
        for which in (0, 1):
            space = self._kv_space[which, :size].reshape(requests, tokens, width)
            for request in range(requests):
                target = space[request, : count * layout.block_tokens].reshape(count, -1)
                # mode="clip" writes straight into the workspace ("raise" would buffer); ids were checked before.
                np.take(self._planes, rows[request] + which, axis=0, out=target, mode="clip")
                # Never what the pool or the workspace held before: it may be NaN, and 0 * NaN is not 0.
                space[request, ends[request] : length] = 0.0
            pair.append(space.reshape(requests, tokens, layout.kv_heads, layout.head_dim)[:, :length])
        return pair[0], pair[1]

    def _attend_positions(self, queries: _F32, start: int, keys: _F32, values: _F32, out: _F32) -> None:
        """Neighbouring positions of one request whose padded length is the same: that of ``keys``."""
        n = queries.shape[0]
        per_tile, groups, kv_heads, dim = self._positions, self._groups, self._kv_heads, self._dim
        tiles = -(-n // per_tile)
        whole = n // per_tile
        rest = n - whole * per_tile
        tiled = np.zeros((tiles, kv_heads, dim, TILE), np.float32)
        # lane = position in tile * groups + query head of the group
        lanes = tiled[..., : per_tile * groups].reshape(tiles, kv_heads, dim, per_tile, groups)
        grouped = queries.reshape(n, kv_heads, groups, dim)
        if whole:
            full = grouped[: n - rest].reshape(whole, per_tile, kv_heads, groups, dim)
            lanes[:whole] = full.transpose(0, 2, 4, 1, 3)
        if rest:
            lanes[whole, ..., :rest, :] = grouped[n - rest :].transpose(1, 3, 0, 2)

        result = self._softmax_product(tiled, TILE, keys, values, start=start)
        lanes = result[..., : per_tile * groups].reshape(tiles, kv_heads, dim, per_tile, groups)
        grouped = out.reshape(n, kv_heads, groups, dim)
        if whole:
            full = grouped[: n - rest].reshape(whole, per_tile, kv_heads, groups, dim)
            full[...] = lanes[:whole].transpose(0, 3, 1, 4, 2)
        if rest:
            grouped[n - rest :] = lanes[whole, ..., :rest, :].transpose(2, 0, 3, 1)

    def _softmax_product(
        self,
        tiled: _F32,
        used: int,
        keys: _F32,
        values: _F32,
        *,
        start: int = 0,
        ends: Sequence[int] | None = None,
    ) -> _F32:
        """``tiled`` queries ``(tiles, kv_heads, head_dim, TILE)``, of which ``used`` lanes count; same shape back.

        ``keys`` and ``values``: ``(1 or tiles, length, kv_heads, head_dim)``. Tile ``i`` sees the keys before
        ``ends[i]``; without ``ends`` the lanes are positions from ``start`` on and see those up to themselves.
        """
        tiles, kv_heads, length = tiled.shape[0], self._kv_heads, keys.shape[1]
        size = tiles * kv_heads * length * TILE
        if self._score_space.shape[0] < size:
            self._score_space = np.empty(size + size // 2, np.float32)
        scores = self._score_space[:size].reshape(tiles, kv_heads, length, TILE)
        np.matmul(keys.transpose(0, 2, 1, 3), tiled, out=scores)
        lanes = scores if used == TILE else np.ascontiguousarray(scores[..., :used])
        if ends is None:
            self._mask(lanes, start)
        else:
            for tile, end in enumerate(ends):
                lanes[tile, :, end:] = -np.inf
        totals = _exp_of_softmax(lanes)
        if lanes is not scores:
            scores[..., :used] = lanes
        result: _F32 = np.matmul(values.transpose(0, 2, 3, 1), scores)
        result[..., :used] /= totals
        return result

    def _mask(self, scores: _F32, start: int) -> None:
        """-inf where a key lies after the query. Only the last ``LENGTH_STEP`` keys can."""
        tiles, _, length, lanes = scores.shape
        first = length - LENGTH_STEP
        # Lanes beyond the group's last position (padding of the last tile) see every key.
        relative = (start - first) + np.arange(tiles)[:, None] * self._positions + self._lane_positions[:lanes]
        future = _KEYS[:, None] > np.minimum(relative, LENGTH_STEP - 1)[:, None, None, :]
        np.copyto(scores[:, :, first:], np.float32(-np.inf), where=future)


def _exp_of_softmax(scores: _F32) -> _F32:
    """``exp(scores - their highest)`` in place over ``(tiles, kv_heads, length, lanes)``; returns the sums over the
    keys, ``(tiles, kv_heads, 1, lanes)``.

    ``LENGTH_STEP`` keys are taken side by side: long inner loops, and still one fixed order of sums.
    """
    tiles, kv_heads, length, lanes = scores.shape
    wide = scores.reshape(tiles, kv_heads, length // LENGTH_STEP, LENGTH_STEP * lanes)
    highest = _reduce_keys(np.maximum, wide, lanes)
    repeated = np.empty((tiles, kv_heads, LENGTH_STEP, lanes), np.float32)
    repeated[...] = highest
    wide -= repeated.reshape(tiles, kv_heads, 1, LENGTH_STEP * lanes)
    np.exp(wide, out=wide)
    return _reduce_keys(np.add, wide, lanes)


def _reduce_keys(operation: np.ufunc, wide: _F32, lanes: int) -> _F32:
    """``(tiles, kv_heads, length / 64, 64 * lanes)`` over all keys: ``(tiles, kv_heads, 1, lanes)``.

    First over the multiples of 64, then 8 by 8. Each step runs over an outer axis, where NumPy goes one by one in
    order: the order of the sums depends on the length only.
    """
    tiles, kv_heads = wide.shape[:2]
    folded = operation.reduce(wide, axis=2)
    folded = operation.reduce(folded.reshape(tiles, kv_heads, 8, 8 * lanes), axis=2)
    result: _F32 = operation.reduce(folded.reshape(tiles, kv_heads, 8, lanes), axis=2, keepdims=True)
    return result
