"""The interface of a batching policy, which decides what request is admitted next, before it holds any KV memory.

The policy is told of every request that waits and of every request that leaves. So it can keep an index of its own
(FEATHER's chunked hash tree, §4.2) instead of looking at all requests in each step. An admitted request gets its blocks
at once: those that it reuses, and empty ones for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pinyon.core.block_keys import BlockKey
from pinyon.eviction.interface import Traits


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The facts that a policy may look at. ``number`` is unique, larger for later requests, and kept on giving way."""

    number: int
    prompt_tokens: int
    blocks: int
    """Blocks held after admission: for the prompt and, if the request is decoded here, for its next token."""
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's full blocks: equal keys mean an equal prefix."""
    reusable: int = 0
    """Leading keys whose blocks the request may take over from others."""
    decodes: bool = True
    """False if its prompt is computed for another instance; then it takes no slot."""
    max_new_tokens: int = 0
    arrived_s: float = 0.0
    """The time of its arrival at this instance, by the clock of ``admit``."""
    traits: Traits | None = None
    """Traits for eviction; None: unknown. A journal records what decisions are told, so other class fields stay out."""
    seconds: float = 0.0
    """Predicted seconds to compute its prompt; 0: unknown."""
    deadline_s: float = 0.0
    """The time at which its first token is due, by the same clock; 0: unknown."""
    computes: bool = False
    """True if this instance computes and publishes the ``reusable`` keys where no other request has done so.

    Blocks that another such request already has for these keys are neither counted nor held twice."""


class BlockNeed(NamedTuple):
    """The blocks that a request needs; ``held`` of them have content already."""

    held: int
    missing: int
    """Blocks that the request takes out of the room. Blocks that nobody uses are part of the room, cached or not."""


class HeldBlocks(Protocol):
    """The blocks that requests hold now."""

    def need(self, request: BatchRequest) -> BlockNeed:
        """Returns what a request needs, in O(its reusable keys)."""

    def behind(self, number: int) -> int:
        """Returns the blocks, shared ones included, of admitted requests that came later. O(admitted)."""


class StepSeen(NamedTuple):
    """A finished engine step, or ``steps`` equal ones in a row: decoded tokens, computed prompt tokens, and time."""

    decoded: int
    prefill_tokens: int
    seconds: float
    steps: int = 1
    growth_s: float = 0.0
    """Seconds by which each of several steps took longer than the one before it."""
    decode_s: float = 0.0
    """Seconds of a step with prompts that decoding took, if the engine knows; otherwise 0."""
