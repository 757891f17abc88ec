"""The seam where a batching policy plugs in: who is admitted next, before KV memory is held for anybody.

The policy is told of every request that waits and of every one that leaves, so it can keep an index of its own
(FEATHER's chunked hash tree, §4.2) instead of looking at all requests in each step. Admitted, a request gets its blocks
at once: those that it reuses and, for the rest, empty ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pinyon.core.block_keys import BlockKey
from pinyon.eviction.policy import Traits


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a policy may look at. ``number`` is unique as long as the request lives, and larger than those of all that
    came before it; who gave way and waits again keeps its own."""

    number: int
    prompt_tokens: int
    blocks: int
    """Held once it is admitted: for the prompt and, if it is decoded here, the token after that."""
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's full blocks: equal keys mean an equal prefix."""
    reusable: int = 0
    """Leading keys whose blocks it may take over from others."""
    decodes: bool = True
    """False: its prompt is computed for another instance, and it takes no slot."""
    max_new_tokens: int = 0
    arrived_s: float = 0.0
    """When it came to this instance, by the clock that ``admit`` is called with."""
    traits: Traits | None = None
    """What eviction is told of it; None: nobody knows. Not more of its class: a journal has what decisions are told."""
    seconds: float = 0.0
    """Computing its prompt takes about so long; 0: nobody said."""
    deadline_s: float = 0.0
    """When its first token should be there, by the same clock; 0: nobody said."""
    computes: bool = False
    """Its ``reusable`` keys are computed here, where others have not done so, and published: blocks that another such
    request has for them already are not counted, and not held, twice."""


class BlockNeed(NamedTuple):
    """Of a request's blocks: how many are ``held`` with content, and how many it would take out of the room."""

    held: int
    missing: int
    """Those that nobody uses are part of the room, held or not."""


class Holdings(Protocol):
    """Who holds how much, as of now."""

    def need(self, request: BatchRequest) -> BlockNeed:
        """O(its reusable keys)."""

    def behind(self, number: int) -> int:
        """Blocks of those admitted that came after it: they are decoded, and can give way, or their prompts are being
        computed. O(admitted). Blocks that others share count, too."""


class StepSeen(NamedTuple):
    """An engine step that has ended, or so many equal ones in a row: tokens decoded, prompt tokens computed, and how
    long both took."""

    decoded: int
    prefill_tokens: int
    seconds: float
    steps: int = 1
    growth_s: float = 0.0
    """By which each of several was longer than the one before it."""
    decode_s: float = 0.0
    """Of a step with both, what decoding took of it, if the engine knows; 0: it does not say."""
