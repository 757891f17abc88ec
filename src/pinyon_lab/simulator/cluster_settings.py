"""What a simulated cluster is like."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from pinyon.batching import BATCHING_DEFAULT
from pinyon.batching.feather_settings import GROUPED, WHOLE
from pinyon.batching.service_order import SERVICE_ORDER_DEFAULT
from pinyon.core.request import Role
from pinyon.decisions import InstanceConfig
from pinyon.placement.scaling import ScalingSettings

COST_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    """An engine waits for so long before each step. Raises ``ValueError`` for what is not from 0 to 60 s."""

    step_s: float = 0.0
    waiting_s: float = 0.0
    """More for each request that waits for KV memory, or for a place among those that are decoded, then."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= COST_S_MAX:
                raise ValueError(f"{field.name} of scheduling must be from 0 to {COST_S_MAX:g} seconds")

    def of(self, waiting: int) -> float:
        """Of one step, in seconds."""
        return self.step_s + self.waiting_s * waiting


NO_COST = SchedulingCost()


KERNELS: Final = (WHOLE, GROUPED)
"""Attention kernels that profiles tell apart."""


class StepRule(StrEnum):
    """What an engine step may consist of."""

    MIXED = "mixed"
    """Chunks of prompts beside what is decoded: as a worker does it."""
    PREFILL_FIRST = "prefill_first"
    """Whole prompts as long as there are any, and nothing is decoded meanwhile: vLLM without chunked prefill, the
    coupled baseline of Mooncake §5.2 and what DualMap runs on (A.8)."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Instances by their roles, all alike. Tokens are of KV, in whole blocks; those of an instance are of each node of
    a ``pipeline``."""

    roles: tuple[Role, ...]
    block_tokens: int
    hbm_tokens: int
    """Of each instance, for requests and what stays cached."""
    dram_tokens: int = 0
    """Of each instance, below its HBM: what HBM has no room for is demoted."""
    pool_tokens: int = 0
    """Of each instance's host, for a global pool: what is computed there is kept there and may be fetched by all."""
    pool_on_ssd: bool = False
    prefix_cache: bool = True
    """False: what is computed is of no use to others."""
    step_rule: StepRule = StepRule.MIXED
    max_batch: int = 256
    step_tokens: int = 2048
    chunk_tokens: int = 2048
    step_tbt_s: float = 0.0
    """Chunks beside what is decoded are as large as steps stay within it; 0: as their tokens say
    (:attr:`StepRule.MIXED`)."""
    whole_tokens: int = 32_768
    """Of whole prompts in one step (:attr:`StepRule.PREFILL_FIRST`); one alone may be longer. vLLM takes the model's
    context for it, so that any prompt fits."""
    active_prefills: int = 8
    max_prefills: int = 1 << 20
    pipeline: int = 1
    """Nodes of a prefill instance: each computes a part of the layers, one chunk after the other passes through them
    (Mooncake §3.3), and has its part of their KV: together they hold, and move, so many times as much."""
    eviction: str = "lru"
    pool_eviction: str = "lru"
    batching: str = BATCHING_DEFAULT
    service_order: str = SERVICE_ORDER_DEFAULT
    attention_kernel: str = WHOLE
    """Of engines whose profile gains by it: ``whole`` reads once what the whole batch shares, ``grouped`` (as PAT) what
    some of it do, too."""
    scheduling: SchedulingCost = NO_COST
    """What decisions take; as they are, none."""
    slo_s: float = 5.0
    """By which first tokens should be there: orders of service look at it."""
    ttft_slo_s: float = 0.0
    """Beyond which a placement is refused (Mooncake's Algorithm 1, line 18); 0: nobody is."""
    tbt_slo_s: float = 0.0
    """Likewise of the time between tokens. What was begun is not refused when it is placed again."""
    front_slots: int = 1 << 30
    """Requests in flight at once; others wait at the front."""
    front_queue: int = 1 << 30
    """Who waits there at most; others are refused."""
    scaling: ScalingSettings | None = None
    """When instances that compute prompts come and go; None: they do not."""
    boot_s: float = 10.0
    """Until one that was added is there."""
    decode_sharing: bool = True
    """Who decodes is chosen, too, by who decodes others of the prompt's prefix."""
    path_s: float = 0.0
    """Of a request through the services to its instance and of its first token back, where nobody waits."""
    attempts: int = 3
    """Of a request, where instances die under it."""
    placement_wait_s: float = 5.0
    """For an instance that takes it."""
    lease_s: float = 30.0
    room_wait_s: float = 600.0
    """For KV memory of a prompt that is decoded elsewhere."""

    def __post_init__(self) -> None:
        if self.attention_kernel not in KERNELS:
            raise ValueError(f"attention_kernel must be one of {', '.join(KERNELS)}, not {self.attention_kernel!r}")

    def nodes(self, role: Role) -> int:
        """Of an instance."""
        return self.pipeline if role is Role.PREFILL else 1

    def instance(self, nodes: int = 1) -> InstanceConfig:
        """What the decisions of one of so many nodes depend on. Prompts under way are in each of its nodes."""
        whole = self.step_rule is StepRule.PREFILL_FIRST
        return InstanceConfig(
            nodes * self.hbm_tokens // self.block_tokens,
            self.block_tokens,
            self.max_batch,
            1 << 30 if whole else self.step_tokens,
            1 << 30 if whole else self.chunk_tokens,
            nodes * self.active_prefills,
            self.max_prefills,
            eviction=self.eviction,
            batching=self.batching,
            service_order=self.service_order,
            kernel=self.attention_kernel,
            spare_queued=True,
            dram_blocks=nodes * self.dram_tokens // self.block_tokens,
            step_tbt_s=0.0 if whole else self.step_tbt_s,
        )
