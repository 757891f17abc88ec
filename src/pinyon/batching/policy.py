"""The seam where a batching policy plugs in.

The policy is told of every request that waits for a place in the batch and of every one that leaves, so it can keep
an index of its own (FEATHER's chunked hash tree, §4.2) instead of looking at all requests in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pinyon.core.block_keys import BlockKey
from pinyon.core.request import UNKNOWN_CLASS, RequestClass

__all__ = ["BatchRequest", "BatchingPolicy"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a policy may look at. ``number`` is unique as long as the request lives."""

    number: int
    prompt_tokens: int
    max_new_tokens: int
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's full blocks: equal keys mean an equal prefix."""
    arrived_s: float = 0.0
    """When it came to this instance, by the clock that ``admit`` is called with."""
    request_class: RequestClass = UNKNOWN_CLASS


class BatchingPolicy(Protocol):
    """Waiting requests become running ones in the order the policy chooses. Owned by one thread; not re-entrant."""

    @property
    def waiting(self) -> int:
        """Requests enqueued and not yet admitted."""
        ...

    @property
    def running(self) -> int:
        """Requests admitted and not yet removed."""
        ...

    def enqueue(self, request: BatchRequest) -> None:
        """A request whose KV is in place now waits for the batch. Raises ``ValueError`` if its number is known."""
        ...

    def admit(self, slots: int, now_s: float) -> list[int]:
        """Choose at most ``slots`` waiting requests to enter the batch now; they count as running from here on."""
        ...

    def remove(self, number: int) -> bool:
        """A request ended or was cancelled, waiting or running. False if it is not known."""
        ...
