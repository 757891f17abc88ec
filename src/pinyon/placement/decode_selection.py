"""``SelectDecodingInstance`` of Mooncake's Algorithm 1 (line 17): the least loaded one that has room."""

from __future__ import annotations

from math import inf
from typing import Final

import numpy as np
from librt.vecs import append, vec
from mypy_extensions import i64

from pinyon.core.compiled import in_loops
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.probing import PROBE_AFTER_S

__all__ = ["chosen_by_arrays", "chosen_in_loop", "decode_blocks", "select_decode"]

# Loads this close count as equal; then what saves KV transfers decides.
NEAR_SHARE: Final = 0.125
EXPECTED_NEW_TOKENS: Final = 256
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
    if in_loops(len(pool.decodes)):
        place = chosen_in_loop(request, pool, match, prefill, now_s, blocks)
    else:
        place = chosen_by_arrays(request, pool, match, prefill, now_s, blocks)
    chosen = pool.decodes[place]
    return chosen, chosen.decode_s(tokens)


def _bound(least: float) -> float:
    """The largest share that counts as near."""
    return least if least > 1 else min(1.0, least + NEAR_SHARE)


def chosen_by_arrays(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float, blocks: int
) -> int:
    """The place of the one that is chosen."""
    loads, rows, tokens = prefill.loads, pool.decode_rows, blocks * pool.layout.block_tokens
    shares = loads.decode_shares(rows, blocks)
    if request.tbt_slo_s > 0:
        fast = loads.decodes_s(rows, tokens) <= request.tbt_slo_s
        if not fast.all():
            fast |= loads.decodes_due(rows, now_s, PROBE_AFTER_S)
            if fast.any():
                shares[~fast] = np.inf
    near = np.flatnonzero(shares <= _bound(float(shares.min())))
    own = near[rows[near] == prefill.row]
    if len(own):
        near = own
    elif match.blocks and len(near) > 1:
        nearest = rows[near]
        held = match.held_by_row(int(nearest.max()) + 1).take(nearest)
        near = near[held == held.max()]
    return int(near[np.argmin(shares[near])])


def chosen_in_loop(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float, blocks: int
) -> int:
    """The same, one by one."""
    loads, rows, limit_s = prefill.loads, pool.decode_row_numbers, request.tbt_slo_s
    batch, learned_s = loads.batch, loads.decode_learned_s
    used, most, slots, tbt_s, token_s = loads.blocks, loads.blocks_max, loads.slots, loads.tbt_s, loads.tbt_token_s
    new_blocks, tokens = float(blocks), float(blocks * pool.layout.block_tokens)
    count: i64 = len(rows)
    probe_after_s = PROBE_AFTER_S
    shares, slow = vec[float]([0.0] * count), vec[bool]([False] * count)
    least = least_fast = inf
    for place in range(count):
        row = rows[place]
        share = shares[place] = max(slots[row], (used[row] + new_blocks) / most[row])
        least = min(least, share)
        due = batch[row] == 0 and now_s - learned_s[row] >= probe_after_s
        if limit_s > 0 and tbt_s[row] + token_s[row] * tokens > limit_s and not due:
            slow[place] = True
        else:
            least_fast = min(least_fast, share)
    passes_slow = least_fast < inf  # while there are others
    bound, own = _bound(least_fast if passes_slow else least), prefill.row
    near = vec[i64]()
    for place in range(count):
        if shares[place] <= bound and not (passes_slow and slow[place]):
            if rows[place] == own:
                return place
            near = append(near, place)
    held = vec[i64]()
    if match.blocks and len(near) > 1:
        last_row: i64 = 0
        for place in near:
            last_row = max(last_row, rows[place])
        held = match.held_in_loop(last_row + 1)
    chosen = near[0]
    for place in near:
        more: i64 = 0
        if len(held):
            more = held[rows[place]] - held[rows[chosen]]
        if more > 0 or (more == 0 and shares[place] < shares[chosen]):
            chosen = place
    return chosen
