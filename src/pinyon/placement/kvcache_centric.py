"""KVCache-centric scheduling (Mooncake Algorithm 1 and §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.placement.decode_selection import select_decode
from pinyon.placement.fetch_plan import plan_fetches
from pinyon.placement.policy import Fetch, PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["KvCacheCentric", "KvCacheCentricSettings"]


@dataclass(frozen=True, slots=True)
class KvCacheCentricSettings:
    """``balancing_threshold``: fetch a prefix that is more than this many times as long as the local one.

    The paper names no value ("adjusted manually"). What is reused is always more than best_len / threshold, so with 2
    at least half of the best prefix is reused and at least half of every fetched prefix is new to its reader.
    """

    balancing_threshold: float = 2.0

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1:
            raise ValueError(f"balancing_threshold must be at least 1, got {self.balancing_threshold}")


class KvCacheCentric:
    """The prefill instance with the shortest predicted TTFT = transfer + queue + prefill.

    For each instance the prefix is the one it holds, or the best one anyone holds if that is more than
    ``balancing_threshold`` times as long *and* fetching the difference takes less time than computing it. Where the
    paper differs or is silent:

    - best_len / 0 is infinite when best_len > 0, else 0 (erratum);
    - the best prefix is what all sources hold together, not what the best single one holds: a store spreads the blocks
      of one prompt over its nodes;
    - Algorithm 1 fetches whenever the ratio exceeds the threshold; §4.2 also compares the two times (its sentence has
      the comparison the wrong way round), and so do we;
    - the last prompt token is always computed: its logits give the first token.
    """

    name = "kvcache_centric"

    def __init__(self, settings: KvCacheCentricSettings = KvCacheCentricSettings()) -> None:
        self._threshold = settings.balancing_threshold

    def place(self, request: PlacementRequest, pool: Pool, match: PrefixMatch) -> PlacementDecision:
        tokens = request.prompt_tokens
        block_tokens = pool.layout.block_tokens
        block_bytes = pool.layout.block_bytes
        threshold, held = self._threshold, match.blocks
        best = None
        best_key = (float("inf"), 0)
        for state in pool.prefills:
            k0, k1, k2 = state.prefill_model.coefficients
            prefix = local = match.held_by(state)
            reused = local * block_tokens
            rest = tokens - reused
            prefill_s = k0 + k1 * rest + k2 * rest * (tokens + reused)
            transfer_s = 0.0
            if held > threshold * local:  # the extent is at most held
                reach = match.extent_for(state, local, pool.sources_for(state))
                if reach > threshold * local:
                    reused = reach * block_tokens
                    rest = tokens - reused
                    fetch_s = state.transfer_model.predict_s((reach - local) * block_bytes)
                    short_s = k0 + k1 * rest + k2 * rest * (tokens + reused)
                    if fetch_s + short_s < prefill_s:
                        prefix, transfer_s, prefill_s = reach, fetch_s, short_s
            queue_s = state.prefill_queue_s()
            # equal times: the one with the emptier cache, then the smaller id (the pool's order)
            key = (transfer_s + queue_s + prefill_s, state.load.cached_blocks)
            if key < best_key:
                best_key = key
                best = (state, local, prefix, queue_s, transfer_s, prefill_s)
        assert best is not None, "a pool has at least one prefill instance"
        state, local, prefix, queue_s, transfer_s, prefill_s = best
        fetches: tuple[Fetch, ...] = ()
        if prefix > local:
            fetches = plan_fetches(pool, match, state, local, prefix)
        decode, tbt_s = select_decode(request, pool, match, state)
        return PlacementDecision(state, decode, local, fetches, queue_s, transfer_s, prefill_s, tbt_s, self.name)
