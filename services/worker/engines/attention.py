"""Causal attention over the paged pool, in products whose shapes depend only on a query's absolute position.

Keys are taken in segments (``segments.py``). Queries lie in the lanes of tiles: ``(L, head_dim) @ (head_dim, TILE)``
gives the scores of a segment, ``(head_dim, L) @ (L, TILE)`` its part of the output, where ``L`` follows from the
query's position. Other lanes hold other query heads of the same KV head, other positions of the chunk, other requests
that share the segment, or zeros. They do not change a lane's bits. Keys after a query weigh exactly zero."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.model.config import ModelConfig
from services.worker.engines.blas import TILE, check_lanes_alike
from services.worker.engines.decode_plan import STACK_TOKENS, DecodePlan, SharedRun, plan_decodes
from services.worker.engines.segments import (
    LENGTH_STEP,
    SEGMENT_TOKENS,
    blocks_of_lanes,
    exp_of_softmax,
    last_length,
    merge,
)

_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]
_Queries = npt.NDArray[np.void]
"""Elements of as many float32 as a KV head has query heads: one query's part of a tile's row."""

_KEYS = np.arange(LENGTH_STEP)

_CALL_TILES = 8
"""The tiles of queries over one segment that one call takes: their scores stay in the second-level cache."""


class PagedAttention:
    """Attention that reads and writes the pool; its workspaces grow to the longest context met.

    The requests that read KV together in decode are chosen by ``kernel``, one of
    :data:`services.worker.engines.decode_plan.KERNELS`. It changes the time, never the bits."""

    def __init__(self, config: ModelConfig, layout: KvLayout, pool: _F32, kernel: str) -> None:
        if config.group_size > TILE:
            raise InvalidArgument(
                f"{config.group_size} query heads per KV head are not supported, at most {TILE} are",
                field="num_key_value_heads",
            )
        self._layout = layout
        self._pool = pool
        self._kernel = kernel
        self._piece = math.gcd(layout.block_tokens, LENGTH_STEP)
        self._pieces_of_block = layout.block_tokens // self._piece
        # Pieces of (block, layer, k|v) planes as rows, so that a gather is one np.take of whole pieces.
        self._planes = pool.reshape(-1, self._piece * layout.kv_heads * layout.head_dim)
        self._groups = config.group_size
        self._kv_heads = config.num_kv_heads
        self._dim = config.head_dim
        self._slots = TILE // self._groups
        """The queries per tile, positions of a chunk or requests: as many as fit with all query heads of a KV head."""
        self._kv_space = np.empty(0, np.float32)
        self._score_space = np.empty(0, np.float32)
        self._part_space = np.empty(0, np.float32)

    def write(self, layer: int, blocks: _I64, offsets: _I64, keys: _F32, values: _F32) -> None:
        """Stores K and V, ``(rows, kv_heads, head_dim)``, at the rows' places in the pool."""
        self._pool[blocks, layer, 0, offsets] = keys
        self._pool[blocks, layer, 1, offsets] = values

    def attend(self, layer: int, queries: _F32, start: int, table: _I64, out: _F32) -> None:
        """Computes a chunk at positions ``[start, start + n)``, whose K and V, and all before, must be in the pool.

        The ``queries`` (scaled) and ``out`` are ``(n, heads, head_dim)``."""
        n = queries.shape[0]
        end = start + n
        longest = -(-end // LENGTH_STEP) * LENGTH_STEP
        pieces = np.zeros((1, longest // self._piece), np.int64)
        known = -(-end // self._piece)
        pieces[0, :known] = self._pieces(table[: self._layout.blocks_for(end)])[:known]
        keys, values = self._gather(layer, pieces, [end])
        done = 0
        while done < n:
            count = min(n - done, LENGTH_STEP - (start + done) % LENGTH_STEP)
            part = slice(done, done + count)
            self._attend_panel(queries[part], start + done, keys, values, out[part])
            done += count

    def plan(self, rows: Sequence[int], positions: Sequence[int], tables: Sequence[_I64]) -> DecodePlan:
        """Returns the plan of decoded tokens, one per request, for :meth:`decode`."""
        known = [
            self._pieces(table[: self._layout.blocks_for(position + 1)])
            for table, position in zip(tables, positions, strict=True)
        ]
        return plan_decodes(rows, positions, known, self._kernel, self._piece)

    def decode(self, layer: int, queries: _F32, plan: DecodePlan, out: _F32) -> None:
        """Computes the plan's rows of ``queries`` (scaled) and ``out``, ``(all rows, heads, head_dim)``."""
        heads = self._to_queries(queries[plan.rows])
        parts = self._parts(plan.parts, self._groups)
        kept = blocks_of_lanes(parts, self._groups)[..., 0]
        for run in plan.shared:
            self._decode_shared(layer, heads[run.first : run.first + run.count], run, kept)
        tiles = np.zeros((len(heads), self._kv_heads, self._dim, 1, TILE), np.float32)
        blocks_of_lanes(tiles, self._groups)[..., 0, 0] = heads
        used = self._lanes_of(1)
        for stack in plan.stacks:
            keys, values = self._gather(layer, stack.pieces, stack.ends)
            result = self._attend_segments(tiles[stack.requests], used, keys, values, ends=stack.ends)
            kept[stack.places] = blocks_of_lanes(result, self._groups)[..., 0, 0]
        for each in plan.merges:
            requests = len(each.requests)
            of_each = parts[each.place : each.place + each.segments * requests]
            merged = merge(of_each.reshape(each.segments, requests, *parts.shape[1:]))
            out[plan.rows[each.requests]] = self._from_queries(merged)

    def self_check(self) -> None:
        """Raises :class:`FailedPrecondition` if a query's bits depend on its lane, at any length of its segment."""
        rng = np.random.default_rng(LENGTH_STEP)
        for length in range(LENGTH_STEP, SEGMENT_TOKENS + 1, LENGTH_STEP):
            shape = (1, length, self._kv_heads, self._dim)
            keys = rng.standard_normal(shape, dtype=np.float32)
            values = rng.standard_normal(shape, dtype=np.float32)

            def one_tile(lanes: _F32, keys: _F32 = keys, values: _F32 = values) -> _F32:
                # Test the tile alone and between others, whose lanes then lie abreast of its own: each lane by turns.
                tiled = np.zeros((1, self._kv_heads, self._dim, 3, TILE), np.float32)
                tiled[0, :, :, 1] = lanes
                only = np.ascontiguousarray(tiled[:, :, :, 1:2])
                between = self._attend_segments(tiled, TILE, keys, values)[0, 0, :, 1]
                alone = self._attend_segments(only, TILE, keys, values)[0, 0, :, 0]
                odd = np.arange(TILE) % 2 == 1
                return np.concatenate((np.where(odd, alone, between), np.where(odd, between, alone)))

            check_lanes_alike(one_tile, self._dim, f"attention over {length} keys")

    def _pieces(self, blocks: _I64) -> _I64:
        """Returns the blocks' pieces of the pool, in order: ``block * pieces of a block + number in it``."""
        if self._pieces_of_block == 1:
            return blocks
        each = blocks[:, None] * self._pieces_of_block + np.arange(self._pieces_of_block)
        return each.reshape(-1)

    def _gather(self, layer: int, pieces: _I64, ends: Sequence[int] | None) -> tuple[_F32, _F32]:
        """Returns K and V of pieces ``(n, pieces)`` as ``(n, tokens, kv_heads, head_dim)``; zeros from each end on."""
        layout, per_block = self._layout, self._pieces_of_block
        n, count = pieces.shape
        tokens, width = count * self._piece, layout.kv_heads * layout.head_dim
        size = 2 * n * tokens * width
        if self._kv_space.shape[0] < size:
            self._kv_space = np.empty(size + size // 2, np.float32)
        space = self._kv_space[:size].reshape(2, n, tokens, width)
        rows = np.empty((2, n, count), np.int64)
        if per_block == 1:
            rows[...] = (pieces * layout.layers + layer) * 2
        else:
            block, part = np.divmod(pieces, per_block)
            rows[...] = (block * layout.layers + layer) * (2 * per_block) + part
        rows[1] += per_block
        # mode="clip" writes straight into the workspace ("raise" would buffer); ids were checked before.
        self._planes.take(rows.reshape(-1), axis=0, out=space.reshape(2 * n * count, -1), mode="clip")
        if ends is not None:
            for number, end in enumerate(ends):
                # Old contents of the pool or the workspace may be NaN, and 0 * NaN is not 0.
                space[:, number, end:] = 0.0
        shape = (n, tokens, layout.kv_heads, layout.head_dim)
        return space[0].reshape(shape), space[1].reshape(shape)

    def _parts(self, count: int, lanes: int) -> _F32:
        """Returns a workspace for the queries' parts of each segment: ``(count, kv_heads, head_dim + 2, lanes)``."""
        shape = (count, self._kv_heads, self._dim + 2, lanes)
        size = math.prod(shape)
        if self._part_space.shape[0] < size:
            self._part_space = np.empty(size + size // 2, np.float32)
        return self._part_space[:size].reshape(shape)

    def _attend_panel(self, queries: _F32, start: int, keys: _F32, values: _F32, out: _F32) -> None:
        """Computes attention of neighbouring positions of one request between two multiples of ``LENGTH_STEP``."""
        n = queries.shape[0]
        tiled = self._to_tiles(self._to_queries(queries))
        tiles = tiled.shape[2]
        own = start // SEGMENT_TOKENS
        flat = self._parts(own + 1, tiles * TILE)
        parts = flat.reshape(*flat.shape[:-1], tiles, TILE)
        for segment in range(own + 1):
            first = segment * SEGMENT_TOKENS
            seen = slice(first, first + (SEGMENT_TOKENS if segment < own else last_length(start)))
            after = start if segment == own else None
            part = parts[segment : segment + 1]
            self._attend_segments(tiled[None], TILE, keys[:, seen], values[:, seen], start=after, out=part)
        merged = merge(flat).reshape(*tiled.shape)
        lanes = np.ascontiguousarray(self._from_tiles(blocks_of_lanes(merged, self._groups), n))
        out[...] = self._from_queries(lanes[..., None].view(np.float32))

    def _decode_shared(self, layer: int, heads: _Queries, run: SharedRun, kept: _Queries) -> None:
        """Computes attention to a run for ``heads``, the queries of its requests, into ``kept``, the plan's parts."""
        tiled = self._to_tiles(heads)
        tiles, slots = tiled.shape[2], self._slots
        used = TILE if tiles > 1 else self._lanes_of(run.count)
        size = max(1, min(_CALL_TILES // tiles, STACK_TOKENS // SEGMENT_TOKENS))
        for at in range(0, len(run.pieces), size):
            keys, values = self._gather(layer, run.pieces[at : at + size], None)
            for first in range(0, tiles, _CALL_TILES):
                part = tiled[None, :, :, first : first + _CALL_TILES]
                result = self._attend_segments(part, used, keys, values)
                places = run.places[at : at + size, first * slots : (first + _CALL_TILES) * slots]
                kept[places] = self._from_tiles(blocks_of_lanes(result, self._groups), places.shape[1])

    def _lanes_of(self, queries: int) -> int:
        """Returns the lanes whose softmax is computed for so many queries of a tile.

        The other lanes are not worth the time, but more than half of a tile is faster as a whole. Never one: NumPy
        would drop that axis and add along the keys in another order."""
        lanes = max(2, queries * self._groups)
        return lanes if lanes <= TILE // 2 else TILE

    def _to_queries(self, queries: _F32) -> _Queries:
        """Turns ``(n, heads, head_dim)`` into ``(n, kv_heads, head_dim)``."""
        n, groups = queries.shape[0], self._groups
        lanes = np.empty((n, self._kv_heads, self._dim, groups), np.float32)
        by_head = queries.reshape(n, self._kv_heads, groups, self._dim)
        for head in range(groups):
            lanes[..., head] = by_head[:, :, head]
        return blocks_of_lanes(lanes, groups)[..., 0]

    def _from_queries(self, lanes: _F32) -> _F32:
        """Turns ``(n, kv_heads, head_dim, query heads)`` into ``(n, heads, head_dim)``."""
        n, groups = lanes.shape[0], self._groups
        by_head = np.empty((n, self._kv_heads, groups, self._dim), np.float32)
        for head in range(groups):
            by_head[:, :, head] = lanes[..., head]
        return by_head.reshape(n, self._kv_heads * groups, self._dim)

    def _to_tiles(self, heads: _Queries) -> _F32:
        """Turns ``(n, kv_heads, head_dim)`` into ``(kv_heads, head_dim, tiles, TILE)``.

        Lane = query's place in its tile * query heads + query head. Lanes left over are zero."""
        n, kv_heads, dim = heads.shape
        slots = self._slots
        whole, rest = divmod(n, slots)
        tiled = np.zeros((kv_heads, dim, whole + (rest > 0), TILE), np.float32)
        lanes = blocks_of_lanes(tiled, self._groups)
        lanes[:, :, :whole] = heads[: whole * slots].reshape(whole, slots, kv_heads, dim).transpose(2, 3, 0, 1)
        if rest:
            lanes[:, :, whole, :rest] = heads[whole * slots :].transpose(1, 2, 0)
        return tiled

    def _from_tiles(self, lanes: _Queries, n: int) -> _Queries:
        """Turns ``(..., kv_heads, features, tiles, queries of a tile)`` into ``(..., n, kv_heads, features)``."""
        *outer, kv_heads, features, tiles, slots = lanes.shape
        return np.moveaxis(lanes.reshape(*outer, kv_heads, features, tiles * slots)[..., :n], -1, -3)

    def _attend_segments(
        self,
        tiled: _F32,
        used: int,
        keys: _F32,
        values: _F32,
        *,
        start: int | None = None,
        ends: Sequence[int] | None = None,
        out: _F32 | None = None,
    ) -> _F32:
        """Returns the queries' parts of segments, see :func:`merge`, in ``out`` if that is given.

        The result is ``(segments, kv_heads, head_dim + 2, tiles, TILE)``. Sum and highest score are those of the first
        ``used`` lanes only, see :meth:`_lanes_of`; more than one tile needs all lanes.

        The queries ``tiled`` are ``(1 or segments, kv_heads, head_dim, tiles, TILE)``; ``keys`` and ``values`` are
        ``(segments, length, kv_heads, head_dim)``. All tiles see all keys of their segment, with ``ends`` those before
        each one's end. With ``start`` the lanes are positions from there on, and see the keys up to themselves."""
        segments, length, kv_heads, dim = keys.shape
        tiles = tiled.shape[3]
        size = segments * kv_heads * length * tiles * TILE
        if self._score_space.shape[0] < size:
            self._score_space = np.empty(size + size // 2, np.float32)
        # The tiles lie abreast, so that NumPy's inner loops are long; each has a product of its own.
        scores = self._score_space[:size].reshape(segments, kv_heads, length, tiles, TILE)
        by_tile = scores.transpose(0, 1, 3, 2, 4)
        result = np.empty((segments, kv_heads, dim + 2, tiles, TILE), np.float32) if out is None else out
        np.matmul(keys.transpose(0, 2, 1, 3)[:, :, None], tiled.transpose(0, 1, 3, 2, 4), out=by_tile)
        if used == TILE:
            if start is not None:
                own = scores[:, :, length - LENGTH_STEP :]
                np.fmin(own, _seen(start % LENGTH_STEP, tiles, self._groups), out=own)
            for number, end in enumerate(ends or ()):
                scores[number, :, end:] = -np.inf
            highest, totals = exp_of_softmax(scores.reshape(segments, kv_heads, length, tiles * TILE))
        else:
            # Keys first and all else abreast of them, for the same reason.
            few = blocks_of_lanes(scores, used)[..., 0, 0]
            lanes = np.ascontiguousarray(few.transpose(2, 0, 1))[..., None].view(np.float32)
            for number, end in enumerate(ends or ()):
                lanes[end:, number] = -np.inf
            highest, totals = exp_of_softmax(lanes.reshape(length, -1))
            few[...] = blocks_of_lanes(lanes, used)[..., 0].transpose(1, 2, 0)
        shape = (segments, kv_heads, 1, tiles, used)
        result[:, :, dim : dim + 1, :, :used] = totals.reshape(shape)
        result[:, :, dim + 1 :, :, :used] = highest.reshape(shape)
        output = result[:, :, :dim].transpose(0, 1, 3, 2, 4)
        np.matmul(values.transpose(0, 2, 3, 1)[:, :, None], by_tile, out=output)
        return result


@functools.lru_cache(maxsize=LENGTH_STEP)
def _seen(first: int, tiles: int, groups: int) -> _F32:
    """Returns the mask of a panel, ``(LENGTH_STEP, tiles, TILE)``; its positions begin at ``first``.

    It is infinity where a query sees one of the ``LENGTH_STEP`` keys of its own panel, and -infinity where the key lies
    after the query."""
    slots = TILE // groups
    # Lanes left over count as their tile's last query; those beyond the panel's last position see every key.
    slot = np.minimum(np.arange(TILE) // groups, slots - 1)
    position = first + np.arange(tiles)[:, None] * slots + slot
    seen = _KEYS[:, None, None] <= np.minimum(position, LENGTH_STEP - 1)
    return np.where(seen, np.float32(np.inf), np.float32(-np.inf))
