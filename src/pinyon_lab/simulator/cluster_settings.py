"""The settings of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from pinyon.batching import BATCHING_DEFAULT
from pinyon.batching.engine_step import GROUPED, WHOLE
from pinyon.batching.service_order import SERVICE_ORDER_DEFAULT
from pinyon.core.request import Role
from pinyon.decisions import InstanceConfig
from pinyon.placement.scaling import ScalingSettings

COST_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    """The wait of an engine for its scheduler before each step. Raises ``ValueError`` if it is not from 0 to 60 s."""

    step_s: float = 0.0
    waiting_s: float = 0.0
    """The additional time for each request that waits then for KV memory or for a place in the decode batch."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= COST_S_MAX:
                raise ValueError(f"{field.name} of scheduling must be from 0 to {COST_S_MAX:g} seconds")

    def of(self, waiting: int) -> float:
        """Returns the cost of one step in seconds, while ``waiting`` requests wait."""
        return self.step_s + self.waiting_s * waiting


NO_COST = SchedulingCost()


KERNELS: Final = (WHOLE, GROUPED)
"""The attention kernels that profiles distinguish."""


class StepRule(StrEnum):
    """The rules of what an engine step may consist of."""

    MIXED = "mixed"
    """Steps with prefill chunks beside decoding, as in a worker."""
    PREFILL_FIRST = "prefill_first"
    """Steps of whole prompts as long as there are any, without decoding: vLLM without chunked prefill. This is the
    coupled baseline of Mooncake §5.2, and what DualMap runs on (A.8)."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of a cluster; its instances, listed by role, are all alike. Tokens are of KV, in whole blocks. In a
    ``pipeline``, an instance's numbers hold for each of its nodes."""

    roles: tuple[Role, ...]
    block_tokens: int
    hbm_tokens: int
    """The HBM of each instance for requests and cached blocks."""
    dram_tokens: int = 0
    """The DRAM of each instance, which takes the blocks that its HBM has no room for."""
    pool_tokens: int = 0
    """The share of each instance's host in a global pool: the host's KV is kept there for all instances to fetch."""
    pool_on_ssd: bool = False
    prefix_cache: bool = True
    """True if computed blocks may be reused by other requests."""
    step_rule: StepRule = StepRule.MIXED
    max_batch: int = 256
    step_tokens: int = 2048
    chunk_tokens: int = 2048
    step_tbt_s: float = 0.0
    """The step time up to which chunks beside decoding grow (:attr:`StepRule.MIXED`); 0: token limits decide."""
    whole_tokens: int = 32_768
    """The limit, in tokens, of whole prompts in one step (:attr:`StepRule.PREFILL_FIRST`); a prompt alone may be
    longer. vLLM takes the model's context length for it, so that any prompt fits."""
    active_prefills: int = 8
    max_prefills: int = 1 << 20
    pipeline: int = 1
    """The nodes of a prefill instance, each of which computes a part of the layers and holds its KV (Mooncake §3.3).
    Chunks pass through the nodes one after the other. Together the nodes hold, and move, ``pipeline`` times as much."""
    eviction: str = "lru"
    pool_eviction: str = "lru"
    batching: str = BATCHING_DEFAULT
    service_order: str = SERVICE_ORDER_DEFAULT
    attention_kernel: str = WHOLE
    """The attention kernel of engines whose profile gains by it. The kernel ``whole`` reads once the KV that the whole
    batch shares; ``grouped`` (as PAT) also KV that only some of its requests share."""
    scheduling: SchedulingCost = NO_COST
    """The time that scheduling decisions take; by default none."""
    slo_s: float = 5.0
    """The time by which a first token should be there; orders of service consider it."""
    ttft_slo_s: float = 0.0
    """The TTFT beyond which a placement is rejected (Mooncake's Algorithm 1, line 18); 0: none is."""
    tbt_slo_s: float = 0.0
    """The time between tokens beyond which a placement is rejected, unless the request has begun; 0: none is."""
    front_slots: int = 1 << 30
    """The limit of requests in flight at once; others wait at the front."""
    front_queue: int = 1 << 30
    """The limit of requests that wait at the front; others are refused."""
    scaling: ScalingSettings | None = None
    """The rules by which instances that prefill are added and removed; None: their number is fixed."""
    boot_s: float = 10.0
    """The time from the decision to add an instance until it serves."""
    decode_sharing: bool = True
    """True if the choice of a decode instance considers which instances decode others of the prompt's prefix."""
    path_s: float = 0.0
    """The time of a request through the services to its instance, and of its first token back, without queueing."""
    attempts: int = 3
    """The number of times that a request is tried where its instances die."""
    placement_wait_s: float = 5.0
    """The time that a request waits for an instance that accepts it."""
    lease_s: float = 30.0
    room_wait_s: float = 600.0
    """The time that a prompt waits for KV memory of its prefill instance if it is decoded elsewhere."""

    def __post_init__(self) -> None:
        if self.attention_kernel not in KERNELS:
            raise ValueError(f"attention_kernel must be one of {', '.join(KERNELS)}, not {self.attention_kernel!r}")

    def nodes(self, role: Role) -> int:
        return self.pipeline if role is Role.PREFILL else 1

    def instance(self, nodes: int = 1) -> InstanceConfig:
        """Returns the settings of an instance of ``nodes`` nodes for its decisions. Each node has prompts under way."""
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
