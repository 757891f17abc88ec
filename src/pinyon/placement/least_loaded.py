"""Load balancing without regard to caches: the baseline of Mooncake Fig. 5."""

from __future__ import annotations

from pinyon.placement.decode_selection import select_decode
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["LeastLoaded"]


class LeastLoaded:
    """The prefill instance with the shortest queue; it reuses what it happens to hold and fetches nothing."""

    name = "least_loaded"

    def place(self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float) -> PlacementDecision:
        queue_s, _, _, state = min(
            (state.prefill_queue_s(), state.load.cached_blocks, index, state)
            for index, state in enumerate(pool.prefills)
        )
        block_tokens = pool.layout.block_tokens
        reusable = request.reusable_blocks(block_tokens)
        local = state.expected.leading(request.block_keys, match.held_by(state), reusable)
        prefill_s = state.prefill_model.predict_s(request.prompt_tokens, local * block_tokens)
        decode, tbt_s = select_decode(request, pool, match, state, now_s)
        return PlacementDecision(state, decode, local, (), queue_s, 0.0, prefill_s, tbt_s, self.name)
