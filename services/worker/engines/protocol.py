"""What the worker asks of an engine, whatever computes it: NumPy here, a GPU or vLLM elsewhere.

An engine owns the model and the pool; the worker owns which block belongs to whom. One ``step`` computes any mix of
prompt chunks and single decoded tokens. It blocks; the worker calls it off its event loop, from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.layout import KvLayout
from pinyon.core.logprobs import LogprobRows, TokenLogprob
from pinyon.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities by place in the step's arguments, of those that ask."""

    prefills: dict[int, TokenLogprob] = field(default_factory=dict)
    """Of the sampled token, where a chunk's ``sampling.logprobs`` is not negative."""
    decodes: dict[int, TokenLogprob] = field(default_factory=dict)
    """The same of decoded tokens."""
    prompts: dict[int, LogprobRows] = field(default_factory=dict)
    """Of a chunk's ``next_tokens``, where it has them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens in the order of the step's arguments; None for a chunk without ``sampling``."""

    prefill_tokens: list[int | None]
    decode_tokens: list[int]
    logprobs: StepLogprobs | None = None
    """None: nobody asks."""
    kv_tokens_read: int = 0
    """Tokens of KV that the decoded tokens read, per layer; what several requests read together counts once."""
    decode_share: float = 0.0
    """Of the time of a step with both, what the decoded tokens took; 0: that cannot be said."""


class Engine(Protocol):
    """``pool`` is the registered memory: shape ``(num_blocks, *layout.shape)``, C-contiguous, dtype of the layout, so
    block ``b`` is the KV object's bytes as they travel.

    A request's tokens and KV bytes depend on its own tokens and sampling only: not on what shares the step, on how the
    prompt is chunked, or on whether the KV it reads was computed by prefill, by decode, or elsewhere. The same holds
    for log-probabilities.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields of :class:`pinyon.core.request.SamplingParams` that it would not heed: requests that set one are
        refused before they get here."""
        ...

    @property
    def kernel(self) -> str:
        """Who reads KV together in decode, one of :data:`services.worker.engines.decode_plan.KERNELS`; "" if that is
        not known."""
        ...

    @property
    def pool(self) -> npt.NDArray[np.float32]: ...

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        """Raises :class:`pinyon.core.errors.InvalidArgument` before anything is computed or written if an input is out
        of range, :class:`pinyon.core.errors.Internal` if the model computes a non-finite logit."""
        ...
