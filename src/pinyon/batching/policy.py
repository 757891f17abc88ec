"""The seam where a batching policy plugs in: which request is admitted next, before it holds any KV memory.

The policy is told of every request that waits and of every one that leaves. So it can keep an index of its own
(FEATHER's chunked hash tree, §4.2) instead of looking at all requests in each step. An admitted request gets its blocks
at once: those that it reuses and, for the rest, empty ones."""

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
    """Blocks held after admission: for the prompt and, if it is decoded here, the token after that."""
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
    """Traits that eviction is told; None: unknown. No more of its class, as a journal has what decisions are told."""
    seconds: float = 0.0
    """Predicted seconds to compute its prompt; 0: unknown."""
    deadline_s: float = 0.0
    """The time at which its first token is due, by the same clock; 0: unknown."""
    computes: bool = False
    """True if its ``reusable`` keys are computed here and published, where others have not done so.

    Blocks that another such request has for them already are neither counted nor held twice."""


class BlockNeed(NamedTuple):
    """The needs of a request: ``held`` blocks have content already."""

    held: int
    missing: int
    """Blocks it takes out of the room; unused blocks are part of the room, held or not."""


class HeldBlocks(Protocol):
    """The blocks that requests hold now."""

    def need(self, request: BatchRequest) -> BlockNeed:
        """Returns what a request needs, in O(its reusable keys)."""

    def behind(self, number: int) -> int:
        """Returns the blocks, also shared ones, of later admitted requests: decoded or in prefill. O(admitted)."""


class StepSeen(NamedTuple):
    """An ended engine step, or ``steps`` equal ones in a row: tokens decoded, prompt tokens computed, and the time."""

    decoded: int
    prefill_tokens: int
    seconds: float
    steps: int = 1
    growth_s: float = 0.0
    """Seconds by which each of several steps was longer than the one before it."""
    decode_s: float = 0.0
    """Seconds that decoding took of a step that also computed prompts, if the engine knows; 0 otherwise."""
