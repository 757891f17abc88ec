"""``SelectDecodingInstance`` of Mooncake's Algorithm 1 (line 17): the least loaded one that has room."""

from __future__ import annotations

from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.probing import decode_due

__all__ = ["decode_blocks", "select_decode"]

# Loads this close count as equal; then what saves KV transfers decides.
NEAR_SHARE = 0.125
# For instances that name no limit.
BATCH_DEFAULT = 256
EXPECTED_NEW_TOKENS = 256
"""About what an answer has in the mean: 211 in Azure's conversations of 2023, 343 in Mooncake's published ones."""
OVERFULL = 1.01
"""Share of an instance where somebody waits for blocks, whatever is free."""


def decode_blocks(request: PlacementRequest, block_tokens: int) -> int:
    """KV blocks that the request is expected to hold at the decode instance: its prompt and what is generated, which
    nobody knows: ``max_tokens`` is seldom used up. Those that generate more show in what the instance reports."""
    tokens = request.prompt_tokens + min(max(1, request.max_tokens), EXPECTED_NEW_TOKENS)
    return -(-tokens // block_tokens)


def select_decode(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float
) -> tuple[InstanceState, float]:
    """The decode instance and its predicted time between tokens in seconds.

    Load is the larger share of batch slots and KV blocks in use with this request added; over 1, the request would
    first wait. Among the least loaded and those near it (if they have room as well) the prefill instance itself is
    preferred, as then no KV moves; then the one that holds most of the prefix. Those that would be too slow for the
    request are passed over while there are others, but not when they are due to be measured.
    """
    if pool.together:
        return prefill, _tbt_s(prefill)
    block_tokens = pool.layout.block_tokens
    decodes = pool.decodes
    if request.tbt_slo_s > 0:
        limit_s = request.tbt_slo_s
        decodes = tuple(each for each in decodes if _tbt_s(each) <= limit_s or decode_due(each, now_s)) or decodes
    loads: list[tuple[float, InstanceState]] = []
    for state in decodes:
        share = (state.decoding_requests() + 1) / (state.info.max_batch or BATCH_DEFAULT)
        capacity = state.info.capacity_blocks
        if capacity:
            share = max(share, (state.blocks_in_use() + decode_blocks(request, block_tokens)) / capacity)
        if state.load.room_wait_ms > 0:
            share = max(share, OVERFULL)
        loads.append((share, state))
    least = min(share for share, _ in loads)
    bound = least if least > 1 else min(1.0, least + NEAR_SHARE)
    _, _, _, _, chosen = min(
        (state is not prefill, -match.held_by(state), share, index, state)
        for index, (share, state) in enumerate(loads)
        if share <= bound
    )
    return chosen, _tbt_s(chosen)


def _tbt_s(state: InstanceState) -> float:
    """With one request more."""
    return state.decode_model.predict_s(min(state.decoding_requests() + 1, state.info.max_batch or BATCH_DEFAULT))
