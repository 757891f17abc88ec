"""The choice of a decode instance: ``SelectDecodingInstance`` of Mooncake's Algorithm 1 (line 17).

The least loaded instance that has room is chosen. Where shared prefixes are read once, an instance that decodes other
requests with the prompt's prefix may cost less. FEATHER leaves open how to choose instances so that batches stay
homogeneous. The cost of an instance is the time that each token of all requests there takes longer, plus the new
request's own time between tokens:

    cost = tbt(n + 1) + n * (per request + per token of KV * (tokens - shared))

for the ``n`` requests that are there: shared KV is read once, and not once more. Another instance is preferred to the
least loaded one only if it costs less. The cost grows with the batch, so no prefix piles up at one instance."""

from __future__ import annotations

from math import inf
from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from pinyon.placement.admission import PROBE_AFTER_S
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

# Loads this close count as equal; then the instance that saves KV transfers is preferred.
NEAR_SHARE: Final = 0.125
LOOKED_MAX: Final = 8
"""The maximum number of instances that are compared, of those with room that decode others of a prefix."""
EXPECTED_NEW_TOKENS: Final = 256
"""The approximate mean length of an answer: 211 tokens in Azure's conversations of 2023, 343 in Mooncake's."""


def decode_blocks(request: PlacementRequest, block_tokens: int) -> int:
    """Returns the KV blocks that the request is expected to hold at the decode instance, for its prompt and its answer.
    The answer's length is unknown: ``max_tokens`` is seldom used up, and longer ones show in the instance's reports."""
    tokens = request.prompt_tokens + min(max(1, request.max_tokens), EXPECTED_NEW_TOKENS)
    return -(-tokens // block_tokens)


def select_decode(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float
) -> tuple[InstanceState, float, int]:
    """Returns the decode instance, the predicted seconds between tokens, and the blocks that are read for others, too.

    Load is the larger share of batch slots and KV blocks in use with this request added; over 1, the request would
    first wait. Among the least loaded instances and those near them (if they have room as well) the prefill instance is
    preferred, as then no KV moves. Next comes the one that holds most of the prefix. Instances that would be too slow
    for the request are passed over while there are others, unless they are due to be measured. Then instances that
    decode others of the request's prefix are compared (see the module), unless the prefill instance decodes it itself.
    """
    block_tokens = pool.layout.block_tokens
    blocks = decode_blocks(request, block_tokens)
    tokens = blocks * block_tokens
    if pool.together and prefill.info.role.decodes:
        shared = 0 if _no_prefixes(request, prefill) else _found(request, prefill, prefill.row).get(prefill.row, 0)
        return prefill, prefill.decode_s(tokens - shared * block_tokens), shared
    place = least_loaded(request, pool, match, prefill, now_s, blocks)
    shared = 0
    if not _no_prefixes(request, prefill):
        place, shared = shared_at(request, pool, prefill, now_s, blocks, place)
    chosen = pool.decodes[place]
    return chosen, chosen.decode_s(tokens - shared * block_tokens), shared


def _no_prefixes(request: PlacementRequest, state: InstanceState) -> bool:
    """Returns whether no instance decodes anything that the request could share."""
    return state.loads.prefixes.empty or request.no_reuse


def _found(request: PlacementRequest, state: InstanceState, row: int) -> dict[int, int]:
    return state.loads.prefixes.found(request.block_keys, row)


def shared_at(
    request: PlacementRequest, pool: Pool, prefill: InstanceState, now_s: float, blocks: int, place: int
) -> tuple[int, int]:
    """Returns the place that costs least, of ``place`` (the least loaded one) and of those with room that share some of
    the prompt, and the blocks shared there. An instance that is fast enough goes before one that is not."""
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
    """Returns the largest share that counts as near ``least``."""
    return least if least > 1 else min(1.0, least + NEAR_SHARE)


def least_loaded(
    request: PlacementRequest, pool: Pool, match: PrefixMatch, prefill: InstanceState, now_s: float, blocks: int
) -> int:
    """Returns the place of the least loaded instance: see :func:`select_decode`."""
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
