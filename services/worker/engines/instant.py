"""An engine that computes nothing: for measuring what everything around an engine costs.

Tokens are deterministic and printable by the built-in byte tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.model.config import ModelConfig
from services.worker.engines.checks import Hollow
from services.worker.engines.protocol import StepResult


class InstantEngine(Hollow):
    """An engine whose generated token depends on its index only: ``a`` to ``z`` around, within the vocabulary."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_tokens: int) -> None:
        super().__init__(config, config.kv_layout(block_tokens), num_blocks)

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        self.check(prefills, decodes)
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
