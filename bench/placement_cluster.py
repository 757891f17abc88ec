"""A conductor's fleet with a full block index, and the life of the requests placed on it. Reports and cache events come
between decisions as instances would send them, on a virtual clock."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from bench.index import PROMPT_BLOCKS, Filled
from pinyon.core.block_keys import KEY_BYTES, unpack_keys
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.cost_model import PrefillCostModel
from pinyon.placement.cost_priors import parse_priors
from pinyon.placement.fleet import Fleet
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.instances import InstanceInfo, InstanceLoad, InstanceState
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from services.conductor.settings import ConductorSettings

BLOCK_TOKENS = 16
LAYOUT = KvLayout(layers=28, kv_heads=4, head_dim=128, block_tokens=BLOCK_TOKENS, dtype="bfloat16")
PROFILE = "910b-qwen2.5-7b"
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 8
"""All blocks are full, and the last token is in none of them."""
SHARED_BLOCKS = PROMPT_BLOCKS // 2
NEW_TOKENS = 256
BUSY = 0.7
"""The share of the time in which an instance computes prompts, of which half is reused."""
DECODE_S = 2.0
KEPT_BATCHES = 2
"""The mean number of batches of blocks that each instance stores before the oldest batch is evicted."""
PROMPTS = 4000
TBT_MS = 20.0


def default_of(setting: str) -> float:
    """Returns the conductor's default of a setting."""
    return float(ConductorSettings.model_fields[setting].default)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a cluster. The index is told of ``blocks``, one in ``stride_tokens // 16`` of them by its key. If
    ``separate``, half of the instances prefill and the others decode; else each does both."""

    instances: int
    blocks: int
    stride_tokens: int
    separate: bool = False


@dataclass
class Turn:
    """Decisions one after another: µs each by the wall clock, ns of CPU of these, and of the rest of their lives."""

    decisions_us: list[float] = field(default_factory=list)
    decisions_ns: int = 0
    reports_ns: int = 0
    reports: int = 0
    events_ns: int = 0
    event_blocks: int = 0
    reused_blocks: int = 0
    fetching: int = 0


class Cluster:
    """A cluster on which one policy after the other places requests; what is in flight stays."""

    def __init__(self, shape: Shape, seed: int, prompts: int = PROMPTS) -> None:
        self.shape, self._dice = shape, Random(seed)
        priors = parse_priors(PROFILE)
        inflight = InFlightTable(
            int(default_of("inflight_max")),
            default_of("inflight_unclaimed_s"),
            default_of("inflight_prefill_s"),
            default_of("inflight_decode_s"),
        )
        index = BlockIndex(shape.blocks)
        self.fleet = Fleet(index, inflight, shape.instances, priors=priors, stride_tokens=shape.stride_tokens)
        states = [self.fleet.join(self._info(number), 0.0) for number in range(shape.instances)]
        self._numbers = {state.info.instance_id: number for number, state in enumerate(states)}
        self.every = self.fleet.sample_of(LAYOUT)
        self.filled = Filled(index, states, shape.blocks // self.every, self.every, self._dice, prompts)
        self._policies: dict[str, PlacementPolicy] = {}
        self._ids = count()
        self._now_s = 1.0
        self._free_s = dict.fromkeys(states, 0.0)
        """The time at which each instance has computed what it began."""
        self._due: list[tuple[float, int, Callable[[Turn], None]]] = []
        self._stored: deque[tuple[int, bytes]] = deque()
        self._decoding: Counter[InstanceState] = Counter()
        prefills = sum(state.info.role.prefills for state in states)
        half_s = PrefillCostModel(priors[""].prefill).predict_s(PROMPT_TOKENS, SHARED_BLOCKS * BLOCK_TOKENS)
        self._each_s = half_s / (BUSY * prefills)
        self._steady = round((DECODE_S + 2 * half_s) / self._each_s)

    def _info(self, number: int) -> InstanceInfo:
        role = Role.MIXED
        if self.shape.separate:
            role = Role.DECODE if number % 2 else Role.PREFILL
        capacity = 2 * self.shape.blocks // self.shape.instances + 20_000
        return InstanceInfo(
            f"instance-{number:04}", "boot", role, f"10.0.{number // 250}.{number % 250}:7000", "model", "weights",
            LAYOUT, capacity, max_batch=256, short_first=True,
        )  # fmt: skip

    def warm(self, policy: str) -> None:
        """Places requests until as many end as come."""
        self.turn(policy, self._steady)

    def request(self) -> PlacementRequest:
        """Returns a request of which some instance holds the first half, and none the rest; no prompt comes twice."""
        held = self._dice.choice(self.filled.prompts)[: SHARED_BLOCKS * KEY_BYTES]
        own = self.filled.prompt()[SHARED_BLOCKS * KEY_BYTES :]
        return PlacementRequest(
            f"request-{next(self._ids)}", "model", PROMPT_TOKENS, held + own, NEW_TOKENS,
            default_of("ttft_slo_ms") / 1e3, ttft_slo_named=False,
        )  # fmt: skip

    def turn(self, policy: str, decisions: int) -> Turn:
        """Makes ``decisions`` decisions by a policy."""
        if policy not in self._policies:
            self._policies[policy] = PLACEMENT_POLICIES.make(policy)
        scheduler = Scheduler(self.fleet, self._policies[policy])
        taken = Turn()
        for _ in range(decisions):
            request = self.request()
            self._now_s += self._each_s
            while self._due and self._due[0][0] <= self._now_s:
                heappop(self._due)[2](taken)
            cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
            decision = scheduler.schedule(request, self._now_s)
            ended_ns = time.perf_counter_ns()
            taken.decisions_ns += time.thread_time_ns() - cpu_ns
            taken.decisions_us.append((ended_ns - began_ns) / 1e3)
            taken.reused_blocks += decision.reused_blocks
            taken.fetching += bool(decision.fetches)
            self._live(request, decision)
        return taken

    def match_us(self, requests: int) -> tuple[list[float], float]:
        """Returns the µs of look-ups alone, and the mean number of blocks found."""
        taken, found = [], 0
        for _ in range(requests):
            keys = self.request().block_keys
            began_ns = time.perf_counter_ns()
            match = self.fleet.index.match(keys, PROMPT_BLOCKS, self.fleet.inflight.expected, self.every)
            taken.append((time.perf_counter_ns() - began_ns) / 1e3)
            found += match.blocks
        return taken, found / requests

    def thin(self, share: float) -> None:
        """Removes ``share`` of the blocks from each holder of a prompt that may be asked for. They are anywhere in the
        prompt, as in a cache that evicts by request."""
        for prompt, numbers in zip(self.filled.prompts, self.filled.held_by, strict=True):
            for number in numbers:
                places = (at for at in range(0, len(prompt), KEY_BYTES) if self._dice.random() < share)
                if gone := b"".join(prompt[at : at + KEY_BYTES] for at in places):
                    self.filled.store(number, b"", gone)

    def scattered_per_s(self, prompts: int) -> float:
        """Returns the blocks of ``prompts`` prompts that are removed per second, in changes of as many blocks as a
        prompt has, taken from all of them."""
        stored = [self.filled.prompt() for _ in range(prompts)]
        for prompt in stored:
            self.filled.store(0, prompt)
        keys = [key for prompt in stored for key in unpack_keys(prompt)]
        self._dice.shuffle(keys)
        changes = (b"".join(keys[at : at + PROMPT_BLOCKS]) for at in range(0, len(keys), PROMPT_BLOCKS))
        return len(keys) / sum(self.filled.store(0, b"", change) for change in changes)

    def _live(self, request: PlacementRequest, decision: PlacementDecision) -> None:
        """Schedules what the instances will report of a placement."""
        prefill = decision.prefill
        seconds = decision.prefill_s * self._dice.uniform(0.9, 1.1)
        begins_s = max(self._now_s + decision.transfer_s, self._free_s[prefill])
        ends_s = self._free_s[prefill] = begins_s + seconds
        for at_s, step in (
            (begins_s, lambda turn: self._begun(request, decision, begins_s, turn)),
            (ends_s, lambda turn: self._computed(request, decision, ends_s, seconds, turn)),
            (ends_s + DECODE_S, lambda turn: self._ended(request, decision, ends_s + DECODE_S, turn)),
        ):
            heappush(self._due, (at_s, next(self._ids), step))

    def _begun(self, request: PlacementRequest, decision: PlacementDecision, at_s: float, turn: Turn) -> None:
        self._decoding[decision.decode] += 1
        load = self._load(decision.prefill)
        began_ns = time.thread_time_ns()
        inflight = self.fleet.inflight
        self.fleet.set_load(decision.prefill, load, at_s)
        inflight.begin_decode(request.request_id, decision.decode)
        inflight.begin_prefill(request.request_id, decision.prefill, at_s)
        turn.reports_ns += time.thread_time_ns() - began_ns
        turn.reports += 1

    def _computed(
        self, request: PlacementRequest, decision: PlacementDecision, at_s: float, seconds: float, turn: Turn
    ) -> None:
        prefill, reused = decision.prefill, decision.reused_blocks * BLOCK_TOKENS
        load = self._load(prefill)
        began_ns = time.thread_time_ns()
        self.fleet.set_load(prefill, load, at_s)
        self.fleet.learn_prefills(prefill, [(request.prompt_tokens - reused, reused, seconds)], at_s)
        for span in decision.fetches:
            size = span.block_count * LAYOUT.block_bytes
            self.fleet.learn_transfers(prefill, [(size, decision.transfer_s, span.source)], at_s)
        self.fleet.inflight.end_prefill(request.request_id, prefill, at_s)
        turn.reports_ns += time.thread_time_ns() - began_ns
        turn.reports += 1
        self._store(prefill, request.block_keys[decision.local_blocks * KEY_BYTES :], turn)
        if decision.decode is not prefill:
            self._store(decision.decode, request.block_keys, turn)

    def _ended(self, request: PlacementRequest, decision: PlacementDecision, at_s: float, turn: Turn) -> None:
        self._decoding[decision.decode] -= 1
        load = self._load(decision.decode)
        began_ns = time.thread_time_ns()
        self.fleet.set_load(decision.decode, load, at_s)
        self.fleet.inflight.end_decode(request.request_id, decision.decode)
        turn.reports_ns += time.thread_time_ns() - began_ns
        turn.reports += 1

    def _store(self, state: InstanceState, keys: bytes, turn: Turn) -> None:
        """Stores keys on an instance, and removes the oldest that were stored so."""
        self._stored.append((self._numbers[state.info.instance_id], keys))
        changes = [(self._stored[-1][0], keys, b"")]
        if len(self._stored) > KEPT_BATCHES * self.shape.instances:
            number, gone = self._stored.popleft()
            changes.append((number, b"", gone))
        for number, come, gone in changes:
            began_ns = time.thread_time_ns()
            self.filled.store(number, come, gone)
            turn.events_ns += time.thread_time_ns() - began_ns
            turn.event_blocks += (len(come) + len(gone)) // KEY_BYTES

    def _load(self, state: InstanceState) -> InstanceLoad:
        decoding = self._decoding[state]
        tokens = decoding * (PROMPT_TOKENS + NEW_TOKENS // 2)
        return InstanceLoad(
            running_requests=decoding,
            used_blocks=tokens // BLOCK_TOKENS,
            mean_tbt_ms=TBT_MS if decoding else 0.0,
            mean_batch=decoding,
            mean_kv_tokens=tokens,
            kv_tokens=tokens,
        )
