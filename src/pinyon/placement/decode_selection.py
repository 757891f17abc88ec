"""``SelectDecodingInstance`` of Mooncake's Algorithm 1 (line 17): the least loaded one that has room."""

from __future__ import annotations

import numpy as np

from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.probing import PROBE_AFTER_S

__all__ = ["decode_blocks", "select_decode"]

# Loads this close count as equal; then what saves KV transfers decides.
NEAR_SHARE = 0.125
EXPECTED_NEW_TOKENS = 256
"""About what an answer has in the mean: 211 in Azure's conversations of 2023, 343 in Mooncake's published ones."""


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
    block_tokens = pool.layout.block_tokens
    blocks = decode_blocks(request, block_tokens)
    tokens = blocks * block_tokens
    if pool.together:
        return prefill, prefill.decode_s(tokens)
    loads, rows = prefill.loads, pool.decode_rows
    shares = loads.decode_shares(rows, blocks)
    if request.tbt_slo_s > 0:
        fast = loads.decodes_s(rows, tokens) <= request.tbt_slo_s
        if not fast.all():
            fast |= loads.decodes_due(rows, now_s, PROBE_AFTER_S)
            if fast.any():
                shares[~fast] = np.inf
    least = float(shares.min())
    bound = least if least > 1 else min(1.0, least + NEAR_SHARE)
    near = np.flatnonzero(shares <= bound)
    own = near[rows[near] == prefill.row]
    if len(own):
        near = own
    elif match.blocks and len(near) > 1:
        nearest = rows[near]
        held = match.held_by_row(int(nearest.max()) + 1).take(nearest)
        near = near[held == held.max()]
    chosen = pool.decodes[near[np.argmin(shares[near])]]
    return chosen, chosen.decode_s(tokens)
