"""An engine that computes nothing: for measuring what everything around an engine costs.

Tokens are deterministic and printable by the built-in byte tokenizer; the pool exists, and its bytes never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.layout import KvLayout
from pinyon.model.config import ModelConfig
from services.worker.engines.checks import COMPUTES_NOTHING, check_step
from services.worker.engines.protocol import StepResult

__all__ = ["InstantEngine"]


class InstantEngine:
    """The generated token depends on its index only: ``a`` to ``z`` around, or what the vocabulary has."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        pool: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.config = config
        self.layout: KvLayout = config.kv_layout(block_tokens)
        self.num_blocks = num_blocks
        self.unsupported = COMPUTES_NOTHING
        self.kernel = ""
        self.pool = np.zeros((num_blocks, *self.layout.shape), np.float32) if pool is None else pool

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        check_step(self.config, self.layout, self.num_blocks, prefills, decodes)
        for chunk in prefills:
            if chunk.wait_layer is not None or chunk.on_layer is not None:
                for layer in range(self.layout.layers):
                    if chunk.wait_layer is not None:
                        chunk.wait_layer(layer)
                    if chunk.on_layer is not None:
                        chunk.on_layer(layer)
        return StepResult(
            [None if chunk.sampling is None else self._token(chunk.sample_index) for chunk in prefills],
            [self._token(slot.sample_index) for slot in decodes],
        )

    def _token(self, index: int) -> int:
        return (ord("a") + index % 26) % self.config.vocab_size
