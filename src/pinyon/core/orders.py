"""What a worker is asked to compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.core.block_keys import BlockKey
from pinyon.core.fetch_span import FetchSpan
from pinyon.core.request import RequestClass, SamplingParams

Tokens = npt.NDArray[np.uint32]


def tokens_of(raw: bytes) -> Tokens:
    """Of 4 bytes each, the lowest first."""
    return np.frombuffer(raw, "<u4")


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A prompt to compute. ``keys`` are those of its full blocks; the last ``sample_index`` tokens were generated
    before."""

    request_id: str
    request_class: RequestClass
    tokens: Tokens
    keys: list[BlockKey]
    sampling: SamplingParams
    sample_index: int
    fetches: tuple[FetchSpan, ...]
    no_reuse: bool
    traceparent: str
    prefill_s: float = 0.0
    """Computing it takes about so long; 0: nobody said."""
    ttft_left_s: float = math.inf
    """Until its first token should be there, as of its coming."""
    ask_store: bool = False
    """No conductor has planned ``fetches``: what the store has of it is looked up."""

    @property
    def shares(self) -> bool:
        """What is computed for it is kept for others."""
        return not (self.no_reuse or self.request_class.no_store)

    @property
    def tells_prompt(self) -> bool:
        """The log-probabilities of its tokens are wanted, for which all of it has to be computed. Not again when tokens
        were generated before: they are told with the first one."""
        return self.sampling.prompt_logprobs and not self.sample_index


@dataclass(frozen=True, slots=True)
class GenerateOrder:
    """A request to own: a prompt, with what was generated of its answer elsewhere, and what follows it."""

    prompt: PrefillOrder
    prefill_instance_id: str
    """Empty: this instance computes the prompt itself."""
    prefill_address: str
    timeout_s: float
    placement_number: int
    """The conductor's, which is told what the first token took; 0: it does not ask."""
