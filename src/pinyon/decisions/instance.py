"""What an engine instance decides: who gets KV blocks, which prompts are on their way, what the next step computes."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.batching import BATCHING_POLICIES, PromptQueue, StepLimits, StepScheduler
from pinyon.core.journal import Journal
from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import BlockPool, LeaseTable, Reservations

__all__ = ["InstanceConfig", "InstanceDecisions"]

INSTANCE_INPUTS = {
    "reservations": (
        *("reserve", "withdraw", "extend", "publish", "hold", "release"),
        *("lease", "end_lease", "overdue"),
        *("grow", "preempt", "settle"),
    ),
    "prompts": ("add", "start", "waits_for_room", "has_room", "published", "advanced", "end"),
    "steps": ("add_prefill", "remove_prefill", "add_decode", "remove_decode", "admit", "grown", "decide", "fold"),
}
"""The methods that change something, by module."""


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """What the decisions depend on beside their inputs. ``eviction`` and ``batching`` are choices of policies."""

    pool_blocks: int
    block_tokens: int
    max_batch: int
    step_tokens: int
    chunk_tokens: int
    active_prefills: int
    max_prefills: int
    eviction: str = "lru"
    batching: str = "fcfs"
    first_lease_id: int = 1
    headroom_blocks: int = 0
    """Left to running requests by those that enter."""


class InstanceDecisions:
    """The parts, wired. With a ``journal``, whatever they are told is written down."""

    def __init__(self, config: InstanceConfig, journal: Journal | None = None) -> None:
        """Raises ``ValueError`` for an unknown policy."""
        limits = StepLimits(config.max_batch, config.step_tokens, config.chunk_tokens, config.block_tokens)
        self.pool = BlockPool(config.pool_blocks, EVICTION_POLICIES.make(config.eviction))
        self.reservations = Reservations(self.pool, LeaseTable(first_id=config.first_lease_id), config.headroom_blocks)
        self.prompts = PromptQueue(self.pool, active=config.active_prefills, limit=config.max_prefills)
        self.steps = StepScheduler(BATCHING_POLICIES.make(config.batching), limits)
        if journal is not None:
            self.reservations = journal.record("reservations", self.reservations, INSTANCE_INPUTS["reservations"])
            self.prompts = journal.record("prompts", self.prompts, INSTANCE_INPUTS["prompts"])
            self.steps = journal.record("steps", self.steps, INSTANCE_INPUTS["steps"])
