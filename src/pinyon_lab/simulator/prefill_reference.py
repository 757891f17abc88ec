"""The plain reference: instances that prefill one prompt at a time, in time proportional to its new tokens.

The rules are few, so that anybody can compute it again and get the same numbers:

- A prefill takes 127 µs for each token that is not reused (DualMap's published code).
- A prompt reuses the longest leading run of blocks (of 512 tokens in Mooncake's traces) in the instance's cache when
  service starts, at most all tokens but one. All blocks of a prompt enter the cache when service ends; a cache is LRU,
  and deeper blocks of a prompt count as used before its shallower ones.
- TTFT is waiting and service.
- A policy sees the blocks in the cache and those of requests in service there. Where prompts are served in order of
  arrival, it also sees the blocks of requests that wait. It knows the exact rest of the service under way and, for each
  request that waits, the prediction made when it was queued there.
- At the same time, ends precede arrivals; times a nanosecond apart are the same.

All decisions are made by the modules that the conductor runs: fleet, block index, placements in flight, policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pinyon.batching.interface import ServiceOrder
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.cost_model import PrefillCostModel
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceInfo, InstanceState
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, WaitingPrompt
from pinyon.placement.scheduler import Scheduler
from pinyon.placement.transfer_cost import PATH_KINDS, TransferCostModel
from pinyon_lab.simulator.members import endless_fleet
from pinyon_lab.simulator.reference_memory import OwnCache, PooledCache, PoolRules
from pinyon_lab.simulator.report import NANO_S, ServedRequest
from pinyon_lab.simulator.workload import Arrival, packed

TOKEN_US = 127
MODEL = "prefill-reference"
PROGRESS_EVERY = 256


class KnownPrefillCost(PrefillCostModel):
    """The cost model of a machine whose times are given: it learns nothing."""

    __slots__ = ()

    def __init__(self, coefficients: tuple[float, float, float]) -> None:
        super().__init__()
        self._k = coefficients

    def observe(self, computed_tokens: int, prefix_tokens: int, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """The settings of the reference; ``eviction`` is the policy of each instance's cache."""

    instances: int
    cache_tokens: int
    """The size of each instance's cache."""
    block_tokens: int = 512
    slo_s: float = 5.0
    eviction: str = "lru"
    seed: int = 0
    token_us: float = TOKEN_US
    pool: PoolRules | None = None
    """The rules of a shared pool; None: each cache is for its own instance."""


class _Request(PlacementRequest):
    """A request whose partial last block has a key as well, and is reused but for the last token."""

    def keys_max(self, block_tokens: int) -> int:
        return -(-self.prompt_tokens // block_tokens)

    def reusable_blocks(self, block_tokens: int) -> int:
        return self.keys_max(block_tokens)

    def reused_tokens(self, blocks: int, block_tokens: int) -> int:
        return min(blocks * block_tokens, self.prompt_tokens - 1)


@dataclass(eq=False, slots=True)
class _ReferenceJob:
    number: int
    arrival: Arrival
    request: PlacementRequest
    decision: PlacementDecision | None = None
    started_s: float = 0.0
    hit_tokens: int = 0


class _ReferenceInstance:
    def __init__(
        self,
        number: int,
        fleet: Fleet,
        settings: ReferenceSettings,
        order: ServiceOrder[_ReferenceJob],
        where: dict[int, PooledCache],
    ) -> None:
        self.number = number
        self.waiting = order
        self.served: _ReferenceJob | None = None
        name = f"instance-{number:06d}"
        layout = KvLayout(1, 1, 1, settings.block_tokens, "float16")
        info = InstanceInfo(
            name, name, Role.MIXED, f"{name}:1", MODEL, MODEL, layout, short_first=self.waiting.short_first
        )
        self.state = fleet.join(info, 0.0)
        self.state.prefill_model = KnownPrefillCost((0.0, settings.token_us * 1e-6, 0.0))
        self.state.learned()
        memory = fleet, self.state, settings.eviction, settings.cache_tokens // settings.block_tokens
        if settings.pool is None:
            self.cache = OwnCache(*memory)
        else:
            self.cache = PooledCache(*memory, settings.pool, where)
            byte_s = settings.pool.fetch_us * 1e-6 * layout.block_tokens / layout.block_bytes
            self.state.transfer_model = TransferCostModel(((0.0, byte_s),) * PATH_KINDS)
            self.state.transfers_learned()


class PrefillReference:
    """The instances 0 to ``settings.instances`` - 1 under one policy."""

    def __init__(
        self, settings: ReferenceSettings, policy: PlacementPolicy, order: Callable[[], ServiceOrder[_ReferenceJob]]
    ) -> None:
        self._slo_s, self._token_us = settings.slo_s, settings.token_us
        self._block_tokens = settings.block_tokens
        self._fleet = endless_fleet(together=True)
        self.scheduler = Scheduler(self._fleet, policy, Random(settings.seed))
        where: dict[int, PooledCache] = {}
        self._instances = [
            _ReferenceInstance(number, self._fleet, settings, order(), where) for number in range(settings.instances)
        ]
        self._ends: list[tuple[float, int]] = []
        self._served: dict[int, ServedRequest] = {}

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None] = lambda _: None) -> list[ServedRequest]:
        """Serves all requests and returns their outcomes in order of arrival."""
        for number, arrival in enumerate(arrivals):
            self._serve_until(arrival.time_s)
            self._arrive(number, arrival)
            if number % PROGRESS_EVERY == 0:
                progress(number)
        self._serve_until(math.inf)
        return [self._served[number] for number in range(len(arrivals))]

    def _arrive(self, number: int, arrival: Arrival) -> None:
        job = _ReferenceJob(number, arrival, _Request(str(number), MODEL, arrival.tokens, packed(arrival.blocks)))
        decision = self.scheduler.decide(job.request, arrival.time_s)
        self._queue(job, decision, arrival.time_s)
        for move in self.scheduler.moves(job.request, decision, self._waiting, arrival.time_s):
            self._move(move, arrival.time_s)

    def _waiting(self, state: InstanceState) -> list[WaitingPrompt]:
        jobs = self._instances[state.row].waiting
        return [
            WaitingPrompt(job.request, job.decision, job.arrival.time_s) for job in jobs if job.decision is not None
        ]

    def _move(self, move: Move, now_s: float) -> None:
        source = self._instances[move.source.row]
        job = next(job for job in source.waiting if job.request is move.request)
        source.waiting.remove(job)
        self._fleet.inflight.release(job.request.request_id)
        self._queue(job, self.scheduler.decide_at(job.request, move.target, move.source, now_s), now_s)

    def _queue(self, job: _ReferenceJob, decision: PlacementDecision, now_s: float) -> None:
        instance = self._instances[decision.prefill.row]
        job.decision = decision
        decision.fetches = ()  # these blocks are moved when the job's own turn comes
        self._fleet.inflight.add(job.request.request_id, decision, 0, now_s, job.request.block_keys)
        instance.waiting.add(job, now_s, decision.prefill_s, job.arrival.time_s + self._slo_s)
        if instance.served is None:
            self._start(instance, now_s)

    def _start(self, instance: _ReferenceInstance, now_s: float) -> None:
        job = next(instance.waiting.turns(now_s), None)
        if job is None:
            return
        instance.waiting.take(job, now_s)
        reused, moving_us = instance.cache.read(job.arrival.blocks, now_s, job.arrival.traits)
        job.hit_tokens = job.request.reused_tokens(reused, self._block_tokens)
        job.started_s = now_s
        seconds = (job.arrival.tokens - job.hit_tokens) * self._token_us * 1e-6
        seconds += moving_us * self._block_tokens * 1e-6
        instance.served = job
        self._fleet.inflight.begin_prefill(job.request.request_id, instance.state, now_s, seconds)
        heapq.heappush(self._ends, (now_s + seconds, instance.number))

    def _serve_until(self, time_s: float) -> None:
        while self._ends and self._ends[0][0] <= time_s + NANO_S:
            now_s, number = heapq.heappop(self._ends)
            instance = self._instances[number]
            job, instance.served = instance.served, None
            assert job is not None
            arrival = job.arrival
            times = arrival.time_s, number, job.started_s, now_s - arrival.time_s
            self._served[job.number] = ServedRequest(*times, arrival.tokens, job.hit_tokens)
            instance.cache.store(arrival.blocks, now_s, arrival.traits)
            self._fleet.inflight.end_prefill(job.request.request_id, instance.state, now_s)
            self._fleet.inflight.release(job.request.request_id)
            self._start(instance, now_s)
