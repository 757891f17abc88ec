"""A Llama-architecture transformer in NumPy over a paged KV pool: the default engine, and the reference for others.

It is batch-invariant, bit for bit (docs/design/batch-invariance.md): every token is computed by operations whose
shape depends on nothing but the model and the token's own absolute position. Tokens lie in *lanes*, ``TILE`` of them
to a tile, the last one padded with zeros; activations are ``(tiles, features, TILE)``.

- A linear layer is one BLAS product ``(outputs, inputs) @ (inputs, TILE)`` per tile. Lanes are the elements of BLAS's
  vector registers: each is computed by the same instructions in the same order, whatever is in the others.
- Attention takes keys in segments and pads a query's last one to a length that follows from its position
  (``attention.py``). Requests that share a segment may read it together.
- Norms, rotary embeddings and activations work lane by lane.

This relies on BLAS treating lanes alike, which :meth:`NumpyLlamaEngine.self_check` tests on the machine at hand with
the model's own shapes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.logprobs import LogprobRows
from pinyon.model.config import ModelConfig
from services.worker.engines.attention import PagedAttention
from services.worker.engines.blas import TILE, check_lanes_alike, pin_blas_threads
from services.worker.engines.checks import check_step
from services.worker.engines.decode_plan import KERNEL_DEFAULT, DecodePlan, check_kernel
from services.worker.engines.protocol import StepLogprobs, StepResult
from services.worker.engines.rope import RopeTable, rotate
from services.worker.engines.sampling import Sampler, logprob_rows, token_logprob
from services.worker.engines.weights import LayerWeights, ModelWeights

_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]

_PANEL_TILES = 8
"""The tiles that go through the feed-forward layer at once: its wide activations stay in the second-level cache."""

_LOGIT_BYTES = 64 << 20
"""The bytes of logits held at once where those of a whole prompt are needed."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rows of a step: those of the chunks, in order, then one per decoded token.

    ``tokens``, ``positions``, ``blocks`` (of the pool) and ``offsets`` (in the block) are per row."""

    chunks: list[tuple[PrefillChunk, slice, _I64]]
    decodes: DecodePlan | None
    tokens: _I64
    positions: _I64
    blocks: _I64
    offsets: _I64


class _Parts:
    """The division of a step's time between decoded tokens and prompts.

    Both are in the same products, whose time is divided by the tiles that each would need alone. Waiting for KV to
    arrive and computing the log-probabilities of prompts count for the prompts."""

    def __init__(self, decodes: int, tokens: int) -> None:
        self._began_s = time.perf_counter()
        self._decodes_s = self._chunks_s = 0.0
        self._of_layers = _tiles(decodes) / _tiles(tokens)

    def attended(self, decodes_s: float, chunks_s: float) -> None:
        self._decodes_s += decodes_s
        self._chunks_s += chunks_s

    def of_chunks(self, seconds: float) -> None:
        self._chunks_s += seconds

    def layers_done(self) -> None:
        """Divides the time of the layers; the rest of the step is spent on sampled tokens only."""
        now_s = time.perf_counter()
        common_s = max(0.0, now_s - self._began_s - self._decodes_s - self._chunks_s)
        self._decodes_s += self._of_layers * common_s
        self._chunks_s += (1.0 - self._of_layers) * common_s

    def decode_share(self, sampled: int, decodes: int) -> float:
        """Returns decoding's share of the time so far; ``decodes`` of the ``sampled`` tokens were decoded."""
        seconds = time.perf_counter() - self._began_s
        common_s = max(0.0, seconds - self._decodes_s - self._chunks_s)
        return (self._decodes_s + common_s * _tiles(decodes) / _tiles(sampled)) / seconds if seconds > 0.0 else 0.0


class NumpyLlamaEngine:
    """The engine of :class:`services.worker.engines.protocol.Engine` in NumPy.

    The requests that read KV together in decode are chosen by ``kernel``, one of
    :data:`services.worker.engines.decode_plan.KERNELS`; it changes the time only. A given ``pool`` must be C-contiguous
    float32 of ``(num_blocks, *layout.shape)``, for instance shared memory."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        num_blocks: int,
        block_tokens: int,
        pool: _F32 | None = None,
        *,
        kernel: str = KERNEL_DEFAULT,
        check: bool = True,
    ) -> None:
        if num_blocks <= 0:
            raise InvalidArgument(f"num_blocks must be positive, got {num_blocks}", field="num_blocks")
        pin_blas_threads()
        self.config = config
        self.kernel = check_kernel(kernel)
        self.layout: KvLayout = config.kv_layout(block_tokens)
        self.num_blocks = num_blocks
        self.unsupported: frozenset[str] = frozenset()
        shape = (num_blocks, *self.layout.shape)
        if pool is None:
            pool = np.zeros(shape, np.float32)
        elif pool.shape != shape or pool.dtype != np.float32 or not pool.flags.c_contiguous:
            raise InvalidArgument(f"pool must be C-contiguous float32 of shape {shape}", field="pool")
        self.pool: _F32 = pool
        self._weights = weights
        # The pool holds no more positions than these.
        self._rope = RopeTable(config, min(config.max_context, num_blocks * block_tokens))
        self._attention = PagedAttention(config, self.layout, pool, kernel)
        self._sampler = Sampler(config.vocab_size, config.suppress_tokens, config.eos_token_ids)
        self._scale = np.float32(config.head_dim**-0.5)
        if check:
            self.self_check()

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        """Computes a step, see :meth:`services.worker.engines.protocol.Engine.step`."""
        check_step(self.config, self.layout, self.num_blocks, prefills, decodes)
        if not prefills and not decodes:
            return StepResult([], [])
        plan = self._plan(prefills, decodes)
        parts = _Parts(len(decodes), len(plan.tokens)) if prefills and decodes else None
        hidden = self._forward(plan, parts)
        if parts is not None:
            parts.layers_done()
        last = [rows.stop - 1 for chunk, rows, _ in plan.chunks if chunk.sampling is not None]
        last += range(len(plan.tokens) - len(decodes), len(plan.tokens))
        began_s = time.perf_counter()
        told = StepLogprobs(prompts=self._prompt_logprobs(hidden, plan))
        if parts is not None:
            parts.of_chunks(time.perf_counter() - began_s)
        if not last:
            return StepResult([None] * len(prefills), [], told if told.prompts else None)
        logits = self._logits(_lanes(hidden, np.array(last)))
        sample, place = self._sampler.sample, 0
        first: list[int | None] = [None] * len(prefills)
        for number, chunk in enumerate(prefills):
            if (params := chunk.sampling) is not None:
                row, place = logits[place], place + 1
                first[number] = token = sample(row, params, chunk.sample_index, chunk.counts)
                if params.logprobs >= 0:
                    told.prefills[number] = token_logprob(row, token, params.logprobs)
        rows = logits[place:]
        tokens = [sample(row, s.sampling, s.sample_index, s.counts) for row, s in zip(rows, decodes, strict=True)]
        for number, slot in enumerate(decodes):
            if slot.sampling.logprobs >= 0:
                told.decodes[number] = token_logprob(rows[number], tokens[number], slot.sampling.logprobs)
        asked = told.prefills or told.decodes or told.prompts
        read = plan.decodes.tokens_read if plan.decodes is not None else 0
        decode_share = parts.decode_share(len(last), len(decodes)) if parts is not None else 0.0
        return StepResult(first, tokens, told if asked else None, read, decode_share)

    def _prompt_logprobs(self, hidden: _F32, plan: _Plan) -> dict[int, LogprobRows]:
        """Returns log-probabilities by place of the chunk, from a panel of logits at a time: all may be too large."""
        size = max(1, _LOGIT_BYTES // (4 * self.config.vocab_size * TILE)) * TILE
        told: dict[int, LogprobRows] = {}
        for number, (chunk, rows, _) in enumerate(plan.chunks):
            if (tokens := chunk.next_tokens) is None:
                continue
            parts = []
            for first in range(0, max(1, len(tokens)), size):
                panel = tokens[first : first + size]
                lanes = np.arange(rows.start + first, rows.start + first + len(panel))
                parts.append(logprob_rows(self._logits(_lanes(hidden, lanes)), panel, chunk.next_top))
            told[number] = LogprobRows(
                np.concatenate([part.logprobs for part in parts]),
                np.concatenate([part.top_tokens for part in parts]),
                np.concatenate([part.top_logprobs for part in parts]),
            )
        return told

    def self_check(self) -> None:
        """Raises :class:`FailedPrecondition` if BLAS gives a token other bits in another lane of its tile.

        It covers every matrix shape of the model, and attention at a few lengths."""
        layer = self._weights.layers[0]
        matrices = {"output head": self._weights.head}
        matrices.update({name: getattr(layer, name) for name in ("qkv", "output", "gate", "up", "down")})
        for name, matrix in matrices.items():
            check_lanes_alike(functools.partial(np.matmul, matrix), matrix.shape[1], f"the {name} product")
        self._attention.self_check()

    def _forward(self, plan: _Plan, parts: _Parts | None = None) -> _F32:
        """Returns hidden states ``(tiles, hidden, TILE)`` before the final norm; adds the parts' times to ``parts``."""
        config, count = self.config, len(plan.tokens)
        hidden = _to_lanes(self._weights.embedding[plan.tokens])
        padded = np.zeros(hidden.shape[0] * TILE, np.int64)
        padded[:count] = plan.positions
        turn = self._rope.at(padded.reshape(-1, TILE))
        attended = np.empty((count, config.num_heads, config.head_dim), np.float32)
        attention = self._attention
        # exp(-x) of a very negative gate overflows to inf, and x / inf is the right answer.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for number, layer in enumerate(self._weights.layers):
                queries, keys, values = self._project(layer, hidden, turn, count)
                for chunk, _, _ in plan.chunks:
                    if chunk.wait_layer is not None:
                        waits_s = time.perf_counter()
                        chunk.wait_layer(number)
                        if parts is not None:
                            parts.of_chunks(time.perf_counter() - waits_s)
                attention.write(number, plan.blocks, plan.offsets, keys, values)
                for chunk, _, _ in plan.chunks:
                    if chunk.on_layer is not None:
                        chunk.on_layer(number)
                began_s = time.perf_counter()
                if plan.decodes is not None:
                    attention.decode(number, queries, plan.decodes, attended)
                decoded_s = time.perf_counter()
                for chunk, rows, table in plan.chunks:
                    attention.attend(number, queries[rows], chunk.start, table, attended[rows])
                if parts is not None:
                    parts.attended(decoded_s - began_s, time.perf_counter() - decoded_s)
                hidden += np.matmul(layer.output, _to_lanes(attended.reshape(count, -1)))
                self._feed_forward(layer, hidden)
        return hidden

    def _plan(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> _Plan:
        size = self.layout.block_tokens
        chunks: list[tuple[PrefillChunk, slice, _I64]] = []
        tokens, positions, blocks = [], [], []
        row = 0
        for chunk in prefills:
            n = len(chunk.tokens)
            table = np.asarray(chunk.block_table, dtype=np.int64)
            at = np.arange(chunk.start, chunk.start + n, dtype=np.int64)
            chunks.append((chunk, slice(row, row + n), table))
            tokens.append(np.asarray(chunk.tokens, dtype=np.int64))
            positions.append(at)
            blocks.append(table[at // size])
            row += n
        last = [slot.position for slot in decodes]
        tables = [np.asarray(slot.block_table, dtype=np.int64) for slot in decodes]
        own = self._attention.plan(range(row, row + len(decodes)), last, tables) if decodes else None
        tokens.append(np.array([slot.token for slot in decodes], dtype=np.int64))
        positions.append(np.array(last, dtype=np.int64))
        blocks.append(np.array([t[p // size] for t, p in zip(tables, last, strict=True)], dtype=np.int64))
        where = np.concatenate(positions)
        return _Plan(chunks, own, np.concatenate(tokens), where, np.concatenate(blocks), where % size)

    def _project(
        self, layer: LayerWeights, hidden: _F32, turn: tuple[_F32, _F32], count: int
    ) -> tuple[_F32, _F32, _F32]:
        """Returns Q (rotated, scaled), K (rotated) and V of the ``count`` real rows, ``(count, heads, head_dim)``."""
        config = self.config
        heads, kv, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_eps
        flat = np.matmul(layer.qkv, _rms_norm(hidden, layer.input_norm, eps))
        if layer.qkv_bias is not None:
            flat += layer.qkv_bias[:, None]
        by_head = flat.reshape(-1, heads + 2 * kv, dim, TILE)
        queries, keys = by_head[:, :heads], by_head[:, heads : heads + kv]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries[...] = _rms_norm(queries, layer.q_norm, eps)
            keys[...] = _rms_norm(keys, layer.k_norm, eps)
        rotate(by_head[:, : heads + kv], turn)
        queries *= self._scale
        rows = _to_rows(flat)[:count].reshape(count, heads + 2 * kv, dim)
        return rows[:, :heads], rows[:, heads : heads + kv], rows[:, heads + kv :]

    def _feed_forward(self, layer: LayerWeights, hidden: _F32) -> None:
        """Adds the SwiGLU layer's output to ``hidden``, a panel of tiles at a time."""
        for first in range(0, hidden.shape[0], _PANEL_TILES):
            panel = hidden[first : first + _PANEL_TILES]
            normed = _rms_norm(panel, layer.post_norm, self.config.rms_eps)
            gate = np.matmul(layer.gate, normed)
            up = np.matmul(layer.up, normed)
            up *= gate
            np.negative(gate, out=gate)
            np.exp(gate, out=gate)
            gate += np.float32(1.0)
            up /= gate
            panel += np.matmul(layer.down, up)

    def _logits(self, rows: _F32) -> _F32:
        """Returns the logits ``(n, vocab)`` of hidden rows ``(n, hidden)``."""
        # The sampler finds values that are not finite.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            normed = _rms_norm(_to_lanes(rows), self._weights.final_norm, self.config.rms_eps)
            return _to_rows(np.matmul(self._weights.head, normed))[: rows.shape[0]]


def _tiles(tokens: int) -> int:
    return -(-tokens // TILE)


def _lanes(hidden: _F32, lanes: _I64) -> _F32:
    """Returns rows ``(n, features)`` of ``(tiles, features, TILE)``."""
    return hidden[lanes // TILE, :, lanes % TILE]


def _to_lanes(rows: _F32) -> _F32:
    """Turns ``(n, features)`` into ``(tiles, features, TILE)``, with zeros in the lanes left over."""
    n, features = rows.shape
    tiles = -(-n // TILE)
    if n < tiles * TILE:
        padded = np.zeros((tiles * TILE, features), np.float32)
        padded[:n] = rows
        rows = padded
    return np.ascontiguousarray(rows.reshape(tiles, TILE, features).transpose(0, 2, 1))


def _to_rows(lanes: _F32) -> _F32:
    """Turns ``(tiles, features, TILE)`` into ``(tiles * TILE, features)``."""
    tiles, features, _ = lanes.shape
    return np.ascontiguousarray(lanes.transpose(0, 2, 1)).reshape(tiles * TILE, features)


def _rms_norm(lanes: _F32, weight: _F32, eps: float) -> _F32:
    """Normalizes over the features, the axis before the lanes: NumPy adds them in order, all lanes abreast."""
    scale = np.add.reduce(lanes * lanes, axis=-2, keepdims=True)
    scale *= np.float32(1.0 / lanes.shape[-2])
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    normed = np.divide(lanes, scale, dtype=np.float32)
    normed *= weight[:, None]
    return normed
