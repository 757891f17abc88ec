"""Placement policies to compare with: baselines of papers, and pinyon's own ones less a part of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from typing import ClassVar

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.policies import check_bounds
from pinyon.placement.at_one import at_one
from pinyon.placement.considered import CostColumns
from pinyon.placement.costs import NANO_S, OWN_TIME, Costs, CostTerms
from pinyon.placement.decode_selection import select_decode
from pinyon.placement.dualmap import DualMap, DualMapSettings, less_loaded, reuses_more
from pinyon.placement.fetch_time import fetch_s
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.instances import InstanceState
from pinyon.placement.pairs import SEED_MAX, PoolRings
from pinyon.placement.pinyon import Pinyon, PinyonSettings
from pinyon.placement.policy import Fetch, Move, PlacementDecision, PlacementRequest, Pool, Waiting
from pinyon.placement.prefix_match import PrefixMatch


@dataclass(frozen=True, slots=True)
class Algorithm1Settings:
    """The threshold of Algorithm 1, "adjusted manually" there; the paper names no value."""

    balancing_threshold: float = 2.0

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1:
            raise ValueError(f"balancing_threshold must be at least 1, got {self.balancing_threshold}")


class Algorithm1:
    """Mooncake's Algorithm 1 to the letter; the default is :class:`pinyon.placement.kvcache_centric.KvCacheCentric`.

    It chooses the first instance with the least sum of transfer, queue and prefill times (lines 4 to 16). The one
    instance that holds most is ``FindBestPrefixMatch``. Where its prefix is more than the threshold times the local
    one, it is fetched, whether that is sooner or not (lines 5 to 8, 20, 21). The ratio best_len / 0 is infinite when
    best_len > 0, else 0: the paper leaves that open. Only held prefixes count, not those being computed, and there are
    no stores besides the instances. Line 18 is :mod:`pinyon.placement.admission`'s."""

    name: ClassVar[str] = "algorithm1"
    settings_type: ClassVar[type[Algorithm1Settings]] = Algorithm1Settings

    def __init__(self, settings: Algorithm1Settings = Algorithm1Settings()) -> None:
        self._threshold = settings.balancing_threshold

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        held = {state: match.held_by(state) for state in pool.prefills}
        best_len, best_instance = 0, pool.prefills[0]
        for state, blocks in held.items():
            if blocks > best_len:
                best_len, best_instance = blocks, state
        block_tokens, block_bytes = pool.layout.block_tokens, pool.layout.block_bytes
        ttft_s = inf
        chosen: tuple[InstanceState, int, float, float, float] | None = None
        for state, local in held.items():
            prefix, transfer_s = local, 0.0
            if best_len > self._threshold * local:
                prefix = best_len
                transfer_s = fetch_s(state, [(best_instance, (best_len - local) * block_bytes)])
            queue_s = state.prefill_queue_s(now_s)
            prefill_s = state.prefill_model.predict_s(request.prompt_tokens, prefix * block_tokens)
            wait_s = state.wait_s(now_s)
            if transfer_s + wait_s + prefill_s < ttft_s:
                ttft_s = transfer_s + wait_s + prefill_s
                chosen = state, prefix, queue_s, transfer_s, prefill_s
        assert chosen is not None, "a pool has at least one prefill instance"
        state, prefix, queue_s, transfer_s, prefill_s = chosen
        local = held[state]
        fetches = (Fetch(best_instance, local, prefix - local),) if prefix > local else ()
        decode, tbt_s, shared = select_decode(request, pool, match, state, now_s)
        return PlacementDecision(
            state, decode, local, fetches, self.name, queue_s, transfer_s, prefill_s, tbt_s, shared
        )


def unfetched(request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float) -> tuple[CostColumns, list[int]]:
    """Returns the times at each prefill instance where nothing is fetched, and the tokens that each reuses."""
    columns = Costs(OWN_TIME, request, pool, match, now_s).columns
    return columns, [request.reused_tokens(blocks, pool.layout.block_tokens) for blocks in columns.local]


def where_most(reused: Sequence[int], costs_s: Iterable[float]) -> list[float]:
    """Returns the costs of those that reuse most, infinite ones for all others."""
    most = max(reused)
    return [cost_s if tokens == most else inf for tokens, cost_s in zip(reused, costs_s, strict=True)]


def lowest(pool: Pool, costs: Sequence[float]) -> InstanceState:
    """Returns the prefill instance with the least cost. Ties go to the one that decodes least, then to the first."""
    least = min(costs) + NANO_S
    near = (state for state, cost in zip(pool.prefills, costs, strict=True) if cost <= least)
    return min(near, key=lambda state: state.loads.decoding[state.row])


@dataclass(frozen=True, slots=True)
class CacheAffinitySettings:
    """The settings of :class:`CacheAffinity`.

    The first ``key_blocks`` blocks of ``key_tokens`` each are hashed to an instance. With 0 it is the instance that
    holds most of the prompt; ties go to the least loaded. The paper describes both ("a prompt-aware mapping function",
    §1; "the highest expected cache reuse", §3.2). The second way sends everything to one instance where all prompts
    begin alike. The ring has ``virtual_nodes`` and ``seed``."""

    key_blocks: int = 2
    virtual_nodes: int = 128
    seed: int = 0
    key_tokens: int = 512

    def __post_init__(self) -> None:
        check_bounds(
            self, key_blocks=(0, 1 << 20), virtual_nodes=(1, 4096), seed=(0, SEED_MAX), key_tokens=(1, 1 << 20)
        )


class CacheAffinity:
    """The choice of the instance that has the cache, whatever the load: DualMap's baseline (§1, §2.2)."""

    name: ClassVar[str] = "cache_affinity"
    settings_type: ClassVar[type[CacheAffinitySettings]] = CacheAffinitySettings

    def __init__(self, settings: CacheAffinitySettings = CacheAffinitySettings()) -> None:
        self._settings = settings
        self._rings = PoolRings(settings.virtual_nodes, (settings.seed,), HotnessSettings())

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return at_one(self.name, request, pool, match, self._prefill(request, pool, match, now_s), now_s)

    def _prefill(self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float) -> InstanceState:
        settings = self._settings
        if not settings.key_blocks:
            columns, reused = unfetched(request, pool, match, now_s)
            return lowest(pool, where_most(reused, columns.wait_s))
        (ring,) = self._rings.of(pool).rings
        stride = pool.stride(settings.key_tokens)
        strides = min(settings.key_blocks, len(request.block_keys) // (stride * KEY_BYTES))
        end = strides * stride * KEY_BYTES or KEY_BYTES  # a shorter prompt goes by its first block
        key = request.block_keys[end - KEY_BYTES : end] or request.request_id.encode()
        name = ring.owner(key, among=pool.place_of)
        assert name is not None, "a pool has at least one prefill instance"
        return pool.prefills[pool.place_of[name]]


@dataclass(frozen=True, slots=True)
class PrebleSettings:
    """The settings of :class:`Preble`.

    An instance that holds more than ``share`` of the prompt gets it. Otherwise "a combination of request inference cost
    and current instance load" decides (appendix B), or load alone without ``combined``."""

    share: float = 0.5
    combined: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, share=(0, 1))


class Preble:
    """Preble (Srivatsa et al.), as DualMap's appendix B describes it: exploit a long prefix, else explore.

    It exploits the instance that holds most of the prompt (ties go to the least loaded), if that is more than a share
    of it."""

    name: ClassVar[str] = "preble"
    settings_type: ClassVar[type[PrebleSettings]] = PrebleSettings

    def __init__(self, settings: PrebleSettings = PrebleSettings()) -> None:
        self._share = settings.share
        self._combined = settings.combined

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        columns, reused = unfetched(request, pool, match, now_s)
        costs_s = [wait_s + room_s for wait_s, room_s in zip(columns.wait_s, columns.room_s, strict=True)]
        if max(reused) > self._share * request.prompt_tokens:
            costs_s = where_most(reused, costs_s)
        elif self._combined:
            costs_s = [*columns.cost_s]
        return at_one(self.name, request, pool, match, lowest(pool, costs_s), now_s)


LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """The settings of :class:`Dynamo`; the appendix names neither weight nor unit.

    The load is an instance's share of the longest queue, plus its wait for KV memory as such a share, two at most."""

    load_weight: float = 1.0

    def __post_init__(self) -> None:
        check_bounds(self, load_weight=(0, 1e6))


class Dynamo:
    """Dynamo's cost function as DualMap's appendix B prints it: the held share of the prompt less the load.

    It chooses the instance with the greatest difference; ties go to the one that decodes least, then to the smallest
    id."""

    name: ClassVar[str] = "dynamo"
    settings_type: ClassVar[type[DynamoSettings]] = DynamoSettings

    def __init__(self, settings: DynamoSettings = DynamoSettings()) -> None:
        self._weight = settings.load_weight

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        columns, reused = unfetched(request, pool, match, now_s)
        # The longest queue is the unit: one instance without memory must not make the others look idle.
        longest_s = max(*columns.wait_s, LEAST_S)
        costs: list[float] = []
        for queue_s, room_s, tokens in zip(columns.wait_s, columns.room_s, reused, strict=True):
            load = queue_s / longest_s + min(room_s / longest_s, 2.0)
            costs.append(self._weight * load - tokens / request.prompt_tokens)
        return at_one(self.name, request, pool, match, lowest(pool, costs), now_s)


class PairRule(StrEnum):
    """The rule that chooses between a request's two instances."""

    SLO = "slo"
    CACHE_AFFINITY = "cache_affinity"
    LEAST_LOADED = "least_loaded"
    MIN_TTFT = "min_ttft"


@dataclass(frozen=True, slots=True)
class LabDualMapSettings(DualMapSettings):
    """The settings of :class:`LabDualMap`: the rule between both instances, and whether waiting requests may move."""

    choice: PairRule = PairRule.SLO
    rebalance: bool = True


class LabDualMap(DualMap):
    """DualMap less a part of it, as its paper compares it (Fig. 5): see :class:`LabDualMapSettings`."""

    settings_type: ClassVar[type[LabDualMapSettings]] = LabDualMapSettings

    def __init__(self, settings: LabDualMapSettings = LabDualMapSettings()) -> None:
        super().__init__(settings)
        self._choice, self._rebalance = settings.choice, settings.rebalance

    def _taken(self, request: PlacementRequest, both: Sequence[PlacementDecision]) -> int:
        match self._choice:
            case PairRule.SLO:
                return super()._taken(request, both)
            case PairRule.MIN_TTFT:
                return int(round(both[1].ttft_s, 9) < round(both[0].ttft_s, 9))
            case PairRule.CACHE_AFFINITY if (more := reuses_more(both)) is not None:
                return more
        return less_loaded(both)

    def moves(self, request: PlacementRequest, decision: PlacementDecision, waiting: Waiting) -> list[Move]:
        return super().moves(request, decision, waiting) if self._rebalance else []


@dataclass(frozen=True, slots=True)
class LabPinyonSettings(PinyonSettings):
    """The settings of :class:`LabPinyon`: whether to fetch prefixes, heed the order of service, and prefer pairs."""

    fetch: bool = True
    order: bool = True
    pair: bool = True


class LabPinyon(Pinyon):
    """Pinyon less a part of it, to see what that part is worth: see :class:`LabPinyonSettings`."""

    settings_type: ClassVar[type[LabPinyonSettings]] = LabPinyonSettings

    def __init__(self, settings: LabPinyonSettings = LabPinyonSettings()) -> None:
        super().__init__(settings, CostTerms(settings.others, settings.fetch, settings.order, decodes=settings.decodes))
        self._prefers_pairs = settings.pair

    def _of_pair(self, costs: Costs, place: int) -> int:
        return super()._of_pair(costs, place) if self._prefers_pairs else place
