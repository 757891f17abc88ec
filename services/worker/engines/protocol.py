"""What the worker asks of an engine, whatever computes it: NumPy here, a GPU or vLLM elsewhere.

An engine owns the model and the pool; the worker owns which block belongs to whom. One ``step`` computes any mix of
prompt chunks and single decoded tokens. It blocks; the worker calls it off its event loop, from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pinyon.core.layout import KvLayout
from pinyon.core.request import SamplingParams
from pinyon.model.config import ModelConfig

__all__ = ["DecodeSlot", "Engine", "LayerHook", "PrefillChunk", "StepResult"]

LayerHook = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens at positions ``[start, start + len(tokens))``; the KV of ``[0, start)`` is in the pool, or arrives
    layer by layer while the step runs.

    ``block_table``: pool block ids that cover ``[0, start + len(tokens))``, in token order.
    ``sampling``: set on a prompt's last chunk only; then one token is sampled after its last token.
    ``sample_index``: index of that generated token, the counter of the counter-based generator.
    ``wait_layer(layer)``: called once per layer before that layer's reused KV is read; may block until it has arrived.
    ``on_layer(layer)``: called right after that layer's K and V of these tokens are in the pool.
    A hook that raises aborts the step: the exception passes through, and no request of the step has advanced.
    """

    tokens: npt.NDArray[np.uint32]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None = None
    sample_index: int = 0
    wait_layer: LayerHook | None = None
    on_layer: LayerHook | None = None


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """One generated (or last prompt) ``token`` at ``position``; its KV is written there, then the next one is sampled.

    ``block_table`` covers ``[0, position]``. ``sample_index`` is the index of the token that is sampled now.
    """

    token: int
    position: int
    block_table: Sequence[int]
    sampling: SamplingParams
    sample_index: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens in the order of the step's arguments; None for a chunk without ``sampling``."""

    prefill_tokens: list[int | None]
    decode_tokens: list[int]


class Engine(Protocol):
    """``pool`` is the registered memory: shape ``(num_blocks, *layout.shape)``, C-contiguous, dtype of the layout, so
    block ``b`` is the KV object's bytes as they travel.

    A request's tokens and KV bytes depend on its own tokens and sampling only: not on what shares the step, on how the
    prompt is chunked, or on whether the KV it reads was computed by prefill, by decode, or elsewhere.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def pool(self) -> npt.NDArray[np.float32]: ...

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        """Raises :class:`pinyon.core.errors.InvalidArgument` before anything is computed or written if an input is out
        of range, :class:`pinyon.core.errors.Internal` if the model computes a non-finite logit."""
        ...
