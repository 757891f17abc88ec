"""``SelectDecodingInstance`` of Mooncake's Algorithm 1 (line 17): the least loaded one that has room.

Where what requests share is read once, an instance that decodes others of the prompt's prefix may cost less: FEATHER
leaves open how instances are chosen so that batches stay homogeneous. The cost of a place is what all that are decoded
there wait longer for each of their tokens, and the request's own time between tokens:

    cost = tbt(n + 1) + n * (per request + per token of KV * (tokens - shared))

for the ``n`` that are there: what is shared is read once, and not once more. Who is taken instead of the least loaded
one costs less than that one. It grows with the batch, and so no prefix piles up at one instance.
"""

from __future__ import annotations

from math import inf
from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from pinyon.placement.admission import PROBE_AFTER_S
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import DecodeChoice, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

# Loads this close count as equal; then what saves KV transfers decides.
NEAR_SHARE: Final = 0.125
LOOKED_MAX: Final = 8
"""Of the instances with room that decode others of a prefix, so many are compared."""
EXPECTED_NEW_TOKENS: Final = 256
"""About what an answer has in the mean: 211 in Azure's conversations of 2023, 343 in Mooncake's published ones."""


def decode_blocks(request: PlacementRequest, block_tokens: int) -> int:
    """KV blocks that the request is expected to hold at the decode instance: its prompt and what is generated, which
    nobody knows: ``max_tokens`` is seldom used up. Those that generate more show in what the instance reports."""
    tokens = request.prompt_tokens + min(max(1, request.max_tokens), EXPECTED_NEW_TOKENS)
    return -(-tokens // block_tokens)


def select_decode(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float
) -> DecodeChoice:
    """The decode instance.

    Load is the larger share of batch slots and KV blocks in use with this request added; over 1, the request would
    first wait. Among the least loaded and those near it (if they have room as well) the prefill instance itself is
    preferred, as then no KV moves; then the one that holds most of the prefix. Those that would be too slow for the
    request are passed over while there are others, but not when they are due to be measured. Then those are looked at
    that decode others of the request's prefix (see the module), but not if the prefill instance decodes it itself.
    """
    block_tokens = pool.layout.block_tokens
    blocks = decode_blocks(request, block_tokens)
    tokens = blocks * block_tokens
    if pool.together:
        shared = 0 if _no_prefixes(request, prefill) else _found(request, prefill, prefill.row).get(prefill.row, 0)
        return DecodeChoice(prefill, prefill.decode_s(tokens - shared * block_tokens), shared)
    place = least_loaded(request, pool, match, prefill, now_s, blocks)
    shared = 0
    if not _no_prefixes(request, prefill):
        place, shared = shared_at(request, pool, prefill, now_s, blocks, place)
    chosen = pool.decodes[place]
    return DecodeChoice(chosen, chosen.decode_s(tokens - shared * block_tokens), shared)


def _no_prefixes(request: PlacementRequest, state: InstanceState) -> bool:
    """Nobody decodes anything that this one could share."""
    return state.loads.prefixes.empty or request.no_reuse


def _found(request: PlacementRequest, state: InstanceState, row: int) -> dict[int, int]:
    return state.loads.prefixes.found(request.block_keys, row)


def shared_at(
    request: PlacementRequest, pool: Pool, prefill: InstanceState, now_s: float, blocks: int, place: int
) -> tuple[int, int]:
    """The place that costs least of this one, the least loaded, and of those with room that share some of the prompt,
    and the blocks that are shared there. One that is fast enough goes before one that is not."""
    own: i64 = pool.decode_row_numbers[place]
    found = _found(request, prefill, own)
    shared = found.get(own, 0)
    if len(found) <= (own in found) or pool.decodes[place] is prefill:
        return place, shared
    loads, block_tokens, limit_s = prefill.loads, pool.layout.block_tokens, request.tbt_slo_s
    tbt_s, token_s, request_s = loads.tbt_s, loads.tbt_token_s, loads.tbt_request_s
    used, most, slots, batch = loads.blocks, loads.blocks_max, loads.slots, loads.batch
    rest = float((blocks - shared) * block_tokens)
    slow = limit_s > 0 and tbt_s[own] + token_s[own] * rest > limit_s
    if slow and batch[own] == 0 and now_s - loads.decode_learned_s[own] >= PROBE_AFTER_S:
        return place, shared  # it is due to be measured
    least_s = inf
    if not slow:
        count = float(batch[own])
        least_s = tbt_s[own] + token_s[own] * rest + count * (request_s[own] + token_s[own] * rest)
    best, looked = place, 0
    for each, depth in found.items():
        at = pool.decode_place_of.get(each, -1)
        row: i64 = each
        if at < 0 or row == own or max(slots[row], (used[row] + float(blocks - depth)) / most[row]) > 1:
            continue
        if looked == LOOKED_MAX:
            break
        looked += 1
        rest = float((blocks - depth) * block_tokens)
        own_s = tbt_s[row] + token_s[row] * rest
        if limit_s > 0 and own_s > limit_s:
            continue
        count = float(batch[row])
        cost_s = own_s + count * (request_s[row] + token_s[row] * rest)
        if cost_s < least_s:
            best, shared, least_s = at, depth, cost_s
    return best, shared


def _bound(least: float) -> float:
    """The largest share that counts as near."""
    return least if least > 1 else min(1.0, least + NEAR_SHARE)


def least_loaded(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float, blocks: int
) -> int:
    """The place of the least loaded one: see :func:`select_decode`."""
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
        held = match.held_by_row(last_row + 1)
    chosen = near[0]
    for place in near:
        more: i64 = 0
        if len(held):
            more = held[rows[place]] - held[rows[chosen]]
        if more > 0 or (more == 0 and shares[place] < shares[chosen]):
            chosen = place
    return chosen
