"""The decisions of an engine instance: the requests that get KV blocks, the prompts in progress, a step's content."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pinyon.batching import BATCHING_POLICIES, PromptQueue, StepLimits, StepScheduler
from pinyon.batching.interface import ServiceOrder
from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.journal import Journal
from pinyon.decisions.admission import Admission
from pinyon.decisions.batch_room import BatchRoom
from pinyon.eviction import EVICTION_POLICIES
from pinyon.eviction.interface import Refit, at_once
from pinyon.paging import BlockPool, LeaseTable, Reservations, SecondTier

ADMITTED_PER_PLACE = 2
"""Requests that may hold KV, per place in the batch: the prompts of those without a place are being computed."""
HEADROOM_SHARE = 100
"""New requests leave one block in so many to running ones. Otherwise, the first to grow would preempt one of them."""

INSTANCE_INPUTS = {
    "admission": ("enqueue", "withdraw", "admit", "grow", "end", "observe", "switch"),
    "eviction": ("switch", "adopt"),
    "reservations": (
        "extend",
        "publish",
        "hold",
        "release",
        "lease",
        "renew_lease",
        "end_lease",
        "overdue",
        "take_swaps",
        "swapped",
    ),
    "prompts": ("add", "start", "waits_for_room", "has_room", "reserved", "held_back", "published", "advanced", "end"),
    "steps": (
        "add_prefill",
        "remove_prefill",
        "add_decode",
        "remove_decode",
        "fill",
        "grown",
        "decide",
        "fold",
        "observe",
        "switch",
        "restore",
    ),
}
"""The methods that change state, by module."""


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """The configuration of the decisions. ``eviction``, ``batching`` and ``service_order`` are choices of policies."""

    pool_blocks: int
    block_tokens: int
    max_batch: int
    step_tokens: int
    chunk_tokens: int
    active_prefills: int
    max_prefills: int
    eviction: str = "lru"
    batching: str = "fcfs"
    service_order: str = "fifo"
    kernel: str = ""
    """The way in which the engine's decode attention reads shared KV, for batching policies; "": not known."""
    spare_queued: bool = False
    """True: blocks that waiting requests and prompts want are evicted last."""
    refits_apart: bool = False
    """True: a fit of the policy arrives by :meth:`Eviction.adopt` and is not computed during an eviction."""
    first_lease_id: int = 1
    dram_blocks: int = 0
    """Blocks of the second tier; 0: there is none."""
    step_tbt_s: float = 0.0
    """See :class:`StepLimits`."""


class Eviction:
    """The inputs to the pool's eviction from outside: a change of policy, and fits that were learned elsewhere.

    Its calls change which blocks are evicted, so a journal records them. A fit that a thread has made counts from the
    call of :meth:`adopt`, not from when it was ready. So a replay applies the fit at the same place."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.switches = 0
        """The number of policies that were given up."""

    def switch(self, choice: str, now_s: float) -> None:
        """Switches to another policy, which takes over all keys. O(blocks). Raises ``ValueError`` if unknown."""
        policy = EVICTION_POLICIES.make(choice)
        self._pool.switch(policy, now_s, None if self._pool.below is None else EVICTION_POLICIES.make(choice))
        self.switches += 1

    def adopt(self, fit: Any, switches: int, both: bool = False) -> bool:
        """Hands a fit to the policy that was in force after so many switches: the policy of the pool's keys or, with
        two tiers, of ``both`` tiers' keys. Returns False if that policy is no longer in force."""
        if switches != self.switches:
            return False
        (self._pool.of_all if both else self._pool.eviction).adopt(fit)
        return True


class InstanceDecisions:
    """The parts of an instance, put together. With a ``journal``, all their inputs are recorded."""

    def __init__(self, config: InstanceConfig, journal: Journal | None = None, apart: Refit | None = None) -> None:
        """Makes the parts. ``apart`` does the work of ``refits_apart`` elsewhere and calls back in the owner's thread;
        a replay has no ``apart``. Raises ``ValueError`` for an unknown policy."""
        self._apart = apart
        limits = StepLimits(
            config.max_batch, config.step_tokens, config.chunk_tokens, config.block_tokens, config.step_tbt_s
        )
        make = functools.partial(EVICTION_POLICIES.make, config.eviction)
        below = SecondTier(config.dram_blocks, make(), self._refit(config, both=True)) if config.dram_blocks else None
        refit = self._refit(config, both=False)
        self.pool = BlockPool(config.pool_blocks, make(), below, refit, spares=config.spare_queued)
        reservations = Reservations(self.pool, LeaseTable(first_id=config.first_lease_id))
        self.eviction = Eviction(self.pool)
        batching = BATCHING_POLICIES.make(config.batching)
        self.reservations = reservations
        headroom = math.ceil(config.pool_blocks / HEADROOM_SHARE)
        slots = ADMITTED_PER_PLACE * config.max_batch
        self.admission = Admission(batching.policy, self.pool, reservations, slots=slots, headroom=headroom)
        waiting: ServiceOrder[Any] = SERVICE_ORDERS.make(config.service_order)
        computed: ServiceOrder[Any] = SERVICE_ORDERS.make(config.service_order)
        self.prompts = PromptQueue(self.pool, active=config.active_prefills, limit=config.max_prefills, order=waiting)
        self.steps = StepScheduler(limits, computed, batching.rounds(config.kernel), config.kernel)
        self.room = BatchRoom(self.admission, self.prompts, config.max_batch, config.pool_blocks - headroom)
        if journal is not None:
            for name, inputs in INSTANCE_INPUTS.items():
                setattr(self, name, journal.record(name, getattr(self, name), inputs))

    def _refit(self, config: InstanceConfig, *, both: bool) -> Refit:
        """Returns a function that refits the policy of the pool's keys, or of ``both`` tiers' keys. A fit that is made
        apart comes back as an input."""

        def refit(work: Callable[[], Any], _: Callable[[Any], object]) -> None:
            if self._apart is not None:
                switches = self.eviction.switches
                self._apart(work, lambda fit: self.eviction.adopt(fit, switches, both))

        return refit if config.refits_apart else at_once
