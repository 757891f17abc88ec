"""Where the cache is, whatever the load: DualMap's baseline (§1, §2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.policies import check_bounds
from pinyon.placement.at_one import at_one
from pinyon.placement.instances import InstanceState
from pinyon.placement.pairs import SEED_MAX, PoolRings
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch


@dataclass(frozen=True, slots=True)
class CacheAffinitySettings:
    """``key_blocks``: so many leading blocks of ``key_tokens`` each are hashed to an instance; 0: the one that holds
    most of the prompt, of equals the least loaded. The paper describes both ("a prompt-aware mapping function", §1;
    "the highest expected cache reuse", §3.2); the second one sends everything to one instance where all prompts begin
    alike. ``virtual_nodes`` and ``seed`` are the ring's."""

    key_blocks: int = 2
    virtual_nodes: int = 128
    seed: int = 0
    key_tokens: int = 512

    def __post_init__(self) -> None:
        check_bounds(
            self, key_blocks=(0, 1 << 20), virtual_nodes=(1, 4096), seed=(0, SEED_MAX), key_tokens=(1, 1 << 20)
        )


class CacheAffinity:
    name: ClassVar[str] = "cache_affinity"
    settings_type: ClassVar[type[CacheAffinitySettings]] = CacheAffinitySettings

    def __init__(self, settings: CacheAffinitySettings = CacheAffinitySettings()) -> None:
        self._settings = settings
        self._rings = PoolRings(settings.virtual_nodes, (settings.seed,))

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return at_one(self.name, request, pool, match, self._prefill(request, pool, match, now_s), now_s)

    def _prefill(self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float) -> InstanceState:
        settings = self._settings
        if not settings.key_blocks:
            costs_s = pool.queues_s(now_s)
            reused = pool.reused_tokens(request, match.soon)
            costs_s[reused < reused.max()] = np.inf
            return pool.lowest(costs_s)
        (ring,) = self._rings.of(pool)
        stride = pool.stride(settings.key_tokens)
        strides = min(settings.key_blocks, len(request.block_keys) // (stride * KEY_BYTES))
        end = strides * stride * KEY_BYTES or KEY_BYTES  # what is shorter goes by its first block
        key = request.block_keys[end - KEY_BYTES : end] or request.request_id.encode()
        name = ring.owner(key, among=pool.place_of)
        assert name is not None, "a pool has at least one prefill instance"
        return pool.prefills[pool.place_of[name]]
