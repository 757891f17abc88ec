"""The interface between the worker and an engine, whatever computes: NumPy here, a GPU or vLLM elsewhere.

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
    """Log-probabilities by place in the step's arguments, for the requests that ask for them."""

    prefills: dict[int, TokenLogprob] = field(default_factory=dict)
    """Log-probabilities of the sampled tokens, where a chunk's ``sampling.logprobs`` is not negative."""
    decodes: dict[int, TokenLogprob] = field(default_factory=dict)
    """Log-probabilities of decoded tokens, likewise."""
    prompts: dict[int, LogprobRows] = field(default_factory=dict)
    """Log-probabilities of a chunk's ``next_tokens``, where it has them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens in the order of the step's arguments; None for a chunk without ``sampling``."""

    prefill_tokens: list[int | None]
    decode_tokens: list[int]
    logprobs: StepLogprobs | None = None
    """The log-probabilities; None: no request asks for them."""
    kv_tokens_read: int = 0
    """Tokens of KV that decoding reads, per layer; KV that several requests read together counts once."""
    decode_share: float = 0.0
    """The share of decoding in the time of a step that does both; 0: unknown."""


class Engine(Protocol):
    """An engine with its ``pool``, the registered memory.

    The pool has shape ``(num_blocks, *layout.shape)``, C-contiguous, with the layout's dtype, so that block ``b`` is
    the KV object's bytes as they travel.

    A request's tokens, log-probabilities and KV bytes depend on its own tokens and sampling only. They do not depend on
    what shares the step, on how the prompt is chunked, or on whether its KV was computed by prefill, by decode, or
    elsewhere."""

    config: ModelConfig
    layout: KvLayout
    num_blocks: int
    unsupported: frozenset[str]
    """Fields of :class:`pinyon.core.request.SamplingParams` that it ignores; requests that set them are refused."""
    kernel: str
    """The decode kernel, of :data:`services.worker.engines.decode_plan.KERNELS`: who shares reads; "": unknown."""
    pool: npt.NDArray[np.float32]

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        """Computes a step.

        Raises :class:`pinyon.core.errors.InvalidArgument` before anything is computed or written if an input is out of
        range, :class:`pinyon.core.errors.Internal` if the model computes a non-finite logit."""
        ...
