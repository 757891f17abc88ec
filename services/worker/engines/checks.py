"""The input checks that all engines share and run before they write, and a base for engines without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.request import SAMPLING_FIELDS
from pinyon.model.config import ModelConfig

STEP_TOKENS_MAX = 65_536
"""A limit on the rows of one step, which bounds the activations' workspace."""

_OF_LOGITS = frozenset(each.name for each in SAMPLING_FIELDS if each.of_logits)
"""The fields of the sampling parameters that an engine without logits cannot heed."""


class Hollow:
    """A base for engines that compute nothing: it has a pool whose bytes never change."""

    def __init__(self, config: ModelConfig, layout: KvLayout, num_blocks: int) -> None:
        self.config = config
        self.layout = layout
        self.num_blocks = num_blocks
        self.unsupported = _OF_LOGITS
        self.kernel = ""
        self.pool = np.zeros((num_blocks, *layout.shape), np.float32)

    def check(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> None:
        check_step(self.config, self.layout, self.num_blocks, prefills, decodes)


def check_step(
    config: ModelConfig,
    layout: KvLayout,
    num_blocks: int,
    prefills: Sequence[PrefillChunk],
    decodes: Sequence[DecodeSlot],
) -> None:
    """Raises :class:`InvalidArgument`, with the field, for bad token ids, positions, block tables or sizes."""
    rows = len(decodes)
    for chunk in prefills:
        tokens = chunk.tokens
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise InvalidArgument("a prefill chunk's tokens must be a 1-D integer array", field="tokens")
        n = len(tokens)
        rows += n
        if n == 0:
            raise InvalidArgument("a prefill chunk must hold at least one token", field="tokens")
        low, high = int(np.min(tokens)), int(np.max(tokens))
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise InvalidArgument(f"token id {bad} is outside the vocabulary of {config.vocab_size}", field="tokens")
        _check_positions(config, layout, num_blocks, chunk.start, n, chunk.block_table)
        _check_index(chunk.sample_index)
        if chunk.next_tokens is not None and not n - 1 <= len(chunk.next_tokens) <= n:
            raise InvalidArgument(
                f"{len(chunk.next_tokens)} tokens do not follow {n} ones of a prompt", field="next_tokens"
            )
    for slot in decodes:
        if not 0 <= slot.token < config.vocab_size:
            raise InvalidArgument(
                f"token id {slot.token} is outside the vocabulary of {config.vocab_size}", field="token"
            )
        _check_positions(config, layout, num_blocks, slot.position, 1, slot.block_table)
        _check_index(slot.sample_index)
    if rows > STEP_TOKENS_MAX:
        raise InvalidArgument(f"a step of {rows} tokens is over the limit of {STEP_TOKENS_MAX}", field="tokens")


def _check_positions(
    config: ModelConfig, layout: KvLayout, num_blocks: int, start: int, count: int, table: Sequence[int]
) -> None:
    end = start + count
    if start < 0 or end > config.max_context:
        raise InvalidArgument(
            f"positions [{start}, {end}) are outside the context of {config.max_context}", field="position"
        )
    need = layout.blocks_for(end)
    if len(table) < need:
        raise InvalidArgument(f"block table has {len(table)} blocks, {end} tokens need {need}", field="block_table")
    if need > num_blocks:
        raise InvalidArgument(f"{end} tokens need {need} blocks, the pool has {num_blocks}", field="block_table")
    inside = True
    if isinstance(table, list):  # the case of each decoded token, in every step
        for place in range(need):
            block: int = table[place]
            if block < 0 or block >= num_blocks:
                inside = False
    else:
        used = table[:need]
        inside = min(used) >= 0 and max(used) < num_blocks
    if not inside:
        raise InvalidArgument(f"block table names a block outside [0, {num_blocks})", field="block_table")


def _check_index(index: int) -> None:
    if not 0 <= index < 2**63:
        raise InvalidArgument(f"sample_index must be in [0, 2**63), got {index}", field="sample_index")
