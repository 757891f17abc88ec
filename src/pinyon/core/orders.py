"""Orders that a worker computes."""

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
    """Returns the tokens in little-endian u32 bytes."""
    return np.frombuffer(raw, "<u4")


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A prompt to compute. Its full blocks have ``keys``; its last ``sample_index`` tokens were generated before."""

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
    """The predicted time to compute the prompt in seconds; 0 if unknown."""
    ttft_left_s: float = math.inf
    """The seconds left until the first token is due, as of the order's arrival."""
    ask_store: bool = False
    """True if no conductor has planned ``fetches``, so that the instance looks the blocks up in the store."""

    @property
    def shares(self) -> bool:
        """True if the computed KV is kept for other requests."""
        return not (self.no_reuse or self.request_class.no_store)

    @property
    def tells_prompt(self) -> bool:
        """True if the log-probabilities of the prompt's tokens are wanted, so that all of it must be computed.

        False if tokens were generated before: the log-probabilities are sent with the first token.
        """
        return self.sampling.prompt_logprobs and not self.sample_index


@dataclass(frozen=True, slots=True)
class GenerateOrder:
    """A request for the instance to own: a prompt, tokens generated elsewhere so far, and the generation to do."""

    prompt: PrefillOrder
    prefill_instance_id: str
    """The instance that computes the prompt; empty if this instance does."""
    prefill_address: str
    timeout_s: float
    placement_number: int
    """The conductor's number, under which the first token's time is reported; 0 if the conductor does not ask."""
