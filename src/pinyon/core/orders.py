"""Orders that a worker computes: where reused blocks are read from, and what computing has cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pinyon.core.block_keys import BlockKey
from pinyon.core.request import RequestClass, SamplingParams

FETCH_SPANS_MAX: Final = 256
"""The maximum number of spans of a prompt, in the conductor's plans and for workers; further blocks are computed."""


class KvSource(StrEnum):
    """The kind of process from which reused KV comes."""

    PEER = "peer"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """The blocks ``[first, end)`` of a prompt to read from one source, whose gRPC address is ``address``."""

    source_id: str
    address: str
    source: KvSource
    first: int
    end: int


class PrefillReport(NamedTuple):
    """A report of the instance that computed the prompt, in milliseconds and tokens. Fetching may overlap computing."""

    prefill_instance_id: str = ""
    queue_ms: float = 0.0
    """The time before any work began."""
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    push_ms: float = 0.0
    """The time from the last computed layer until all layers had arrived at the decode instance."""
    computed_tokens: int = 0
    local_tokens: int = 0
    """Tokens found in that instance's own pool."""
    peer_tokens: int = 0
    store_tokens: int = 0
    decode_local_tokens: int = 0
    """Tokens held by the decode instance, so that they were not sent."""

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.peer_tokens + self.store_tokens


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

        False if tokens were generated before: the log-probabilities are sent with the first token."""
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
