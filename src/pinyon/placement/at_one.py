"""The decision that one instance computes the prompt with the prefix that it holds, and fetches nothing."""

from __future__ import annotations

from pinyon.placement.decode_selection import select_decode
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch


def at_one(
    name: str,
    request: PlacementRequest,
    pool: Pool,
    match: PrefixMatch,
    prefill: InstanceState,
    now_s: float,
    alternate: InstanceState | None = None,
) -> PlacementDecision:
    """Returns the decision to compute the prompt at ``prefill``, in the name of the policy ``name``."""
    local = match.soon.held_by(prefill)
    reused = request.reused_tokens(local, pool.layout.block_tokens)
    prefill_s = prefill.prefill_model.predict_s(request.prompt_tokens, reused)
    decode, tbt_s, shared = select_decode(request, pool, match, prefill, now_s)
    queue_s = prefill.prefill_queue_s(now_s)
    decision = PlacementDecision(prefill, decode, local, (), name, queue_s, 0.0, prefill_s, tbt_s, shared)
    decision.alternate = alternate
    return decision
