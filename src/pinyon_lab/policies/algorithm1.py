"""Mooncake's Algorithm 1 to the letter, as a baseline. What runs by default is
:class:`pinyon.placement.kvcache_centric.KvCacheCentric`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random
from typing import ClassVar

from pinyon.placement.decode_selection import select_decode
from pinyon.placement.fetch_time import fetch_s
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Fetch, PlacementDecision, PlacementRequest, Pool, Times
from pinyon.placement.prefix_match import PrefixMatch


@dataclass(frozen=True, slots=True)
class Algorithm1Settings:
    """``balancing_threshold``: as there, "adjusted manually"; the paper names no value."""

    balancing_threshold: float = 2.0

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1:
            raise ValueError(f"balancing_threshold must be at least 1, got {self.balancing_threshold}")


class Algorithm1:
    """The instance with the least sum of transfer, queue and prefill times (lines 4 to 16); of equals the first one.

    ``FindBestPrefixMatch`` is the one instance that holds most. Where its prefix is more than the threshold times the
    local one, it is fetched, whether that is sooner or not (lines 5 to 8, 20, 21). best_len / 0 is infinite when
    best_len > 0, else 0: the paper leaves that open. Prefixes are those that are held, none that are being computed,
    and there are no stores besides the instances. Line 18 is :mod:`pinyon.placement.admission`'s.
    """

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
        decode = select_decode(request, pool, match, state, now_s)
        times = Times(queue_s, transfer_s, prefill_s)
        return PlacementDecision(state, decode, local, fetches, times, self.name)
