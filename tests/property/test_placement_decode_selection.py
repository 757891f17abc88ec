"""The choice of a decode instance from arrays, against the rules as a loop over instances."""

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.block_keys import SharedPrefix, unpack_keys
from pinyon.core.request import Role
from pinyon.placement.decode_selection import NEAR_SHARE, decode_blocks, least_loaded, select_decode, shared_at
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from tests.unit.placement.conftest import LAYOUT, hold, info, keys, make_fleet

BLOCK = LAYOUT.block_tokens
NOW_S = 100.0


def tbt_s(state, request, shared=0) -> float:
    """Returns the time between tokens with the request added."""
    wanted = state.decoding_requests() + 1
    batch = min(wanted, state.info.max_batch or 256)
    load = state.load
    twice = sum((each.requests - 1) * each.blocks * BLOCK for each in load.shared)
    tokens = load.kv_tokens
    if twice:  # the requests of the batch read it once
        tokens = max(0, tokens - twice * load.running_requests / max(1, load.running_requests + load.pending_requests))
    if state.inflight_decodes > 2 * state.load.running_requests:  # most of them are still to arrive
        tokens = max(tokens, BLOCK * state.inflight_decode_blocks)
    tokens += BLOCK * (decode_blocks(request, BLOCK) - shared)
    return state.decode_model.predict_s(batch, tokens * batch / wanted)


def due(state) -> bool:
    return not state.decoding_requests() and NOW_S - state.decode_learned_s >= 5.0


def oracle(request, pool, match, prefill):
    """Chooses by looking at one instance after the other."""
    if pool.together and prefill.info.role.decodes:
        return prefill
    decodes = pool.decodes
    if request.tbt_slo_s > 0:
        fast = [each for each in decodes if tbt_s(each, request) <= request.tbt_slo_s or due(each)]
        decodes = fast or decodes
    loads = []
    for state in decodes:
        share = (state.decoding_requests() + 1) / (state.info.max_batch or 256)
        if state.info.capacity_blocks:
            blocks = state.blocks_in_use() + decode_blocks(request, BLOCK)
            share = max(share, blocks / state.info.capacity_blocks)
        if state.load.room_wait_ms > 0:
            share = max(share, 1.01)
        loads.append((share, state))
    least = min(share for share, _ in loads)
    bound = least if least > 1 else min(1.0, least + NEAR_SHARE)
    least_loaded = min(
        (state is not prefill, -match.held_by(state), share, index, state)
        for index, (share, state) in enumerate(loads)
        if share <= bound
    )[4]
    return cheaper(request, pool, prefill, least_loaded)


def cost_s(state, request, shared) -> float:
    """Returns the request's time between tokens, plus what the present requests lose."""
    _, per_request, per_token = state.decode_model.coefficients
    wanted, most = state.decoding_requests() + 1, state.info.max_batch or 256
    tokens = BLOCK * (decode_blocks(request, BLOCK) - shared)
    more_s = per_request + per_token * (min(wanted, most) / wanted) * tokens
    return tbt_s(state, request, shared) + state.decoding_requests() * more_s


def cheaper(request, pool, prefill, least_loaded):
    """Returns an instance that decodes some of the same prefix, if it costs less."""
    if least_loaded is prefill or request.no_reuse:
        return least_loaded
    limit_s = request.tbt_slo_s or float("inf")
    best, best_s = least_loaded, cost_s(least_loaded, request, shares(least_loaded, request))
    if tbt_s(least_loaded, request, shares(least_loaded, request)) > limit_s:
        if due(least_loaded):
            return least_loaded
        best_s = float("inf")
    for state in pool.decodes:
        shared = shares(state, request)
        share = (state.decoding_requests() + 1) / (state.info.max_batch or 256)
        if state.info.capacity_blocks:
            blocks = state.blocks_in_use() + decode_blocks(request, BLOCK) - shared
            share = max(share, blocks / state.info.capacity_blocks)
        if not shared or share > 1 or state.load.room_wait_ms > 0 or tbt_s(state, request, shared) > limit_s:
            continue
        if cost_s(state, request, shared) < best_s:
            best, best_s = state, cost_s(state, request, shared)
    return best


def shares(state, request) -> int:
    """Returns how many blocks the request would share."""
    ours = set(unpack_keys(request.block_keys))
    said = [each.blocks for each in state.load.shared if each.key in ours]
    return max([*said, *PLACED.get(state.info.instance_id, [])], default=0)


PLACED: dict[str, list[int]] = {}
"""The depths in blocks, by instance, at which its current placements count."""


LOADS = st.builds(
    InstanceLoad,
    pending_requests=st.integers(0, 8),
    running_requests=st.integers(0, 8),
    used_blocks=st.integers(0, 40),
    kv_tokens=st.integers(0, 1 << 20),
    room_wait_ms=st.sampled_from((0.0, 0.0, 0.0, 5.0)),
)


@st.composite
def instances(draw):
    return (
        draw(st.sampled_from((Role.DECODE, Role.MIXED))),
        draw(st.sampled_from((0, 4, 8))),
        draw(st.sampled_from((0, 32, 64))),
        draw(LOADS),
        draw(st.integers(0, 6)),  # blocks of the prompt that it holds
        draw(st.sampled_from((0.0, 0.01, 0.03))),  # the time between tokens that it reported
        draw(st.sampled_from((0.0, 98.0))),  # the time of that report
        draw(st.lists(st.integers(1, 12), max_size=4)),  # blocks of what was placed there
        draw(st.sampled_from((0, 0, 1, 2))),  # blocks per level of its batches
        draw(st.integers(0, 6)),  # blocks of the prompt that it says it decodes
        draw(st.integers(0, 6)),  # blocks of the prompt in what was placed there
    )


@given(
    st.lists(instances(), min_size=1, max_size=8),
    st.sampled_from((0.0, 0.005, 0.0101, 0.012, 0.05)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 16),
)
def test_as_the_loop_over_instances(members, tbt_slo_s, together, no_reuse, seed):
    PLACED.clear()
    fleet = make_fleet(("p0", Role.PREFILL))
    fleet.together = together
    for number, (role, batch, capacity, load, held, tbt, when_s, placed, level, said, theirs) in enumerate(members):
        name = f"d{number}"
        state = fleet.join(replace(info(name, role), max_batch=batch, capacity_blocks=capacity), 0.0)
        hold(fleet, name, range(held))
        if tbt:
            seen = InstanceLoad(running_requests=1, mean_tbt_ms=1e3 * tbt)
            fleet.set_load(state, seen, when_s)
        shared = (SharedPrefix(keys(*range(said))[-16:], said, 3),) if level and said else ()
        fleet.set_load(state, replace(load, level_blocks=level, shared=shared), when_s)
        prefill = fleet.get("p0")
        for each, blocks in enumerate(placed):
            decision = PlacementDecision(prefill, state)
            fleet.inflight.add(f"{name}-{each}", decision, blocks, 0.0)
        if level:
            decision = PlacementDecision(prefill, state)
            fleet.inflight.add(f"{name}-same", decision, 1, 0.0, decoded_keys=keys(*range(theirs)))
            PLACED[name] = [depth for depth in (level, 4 * level, 16 * level) if depth <= theirs]
    for each in range(0, len(members), 2):  # some have ended
        fleet.inflight.release(f"d{each}-0")
    (pool,) = fleet.pools("m")
    request = PlacementRequest("r", "m", 6 * BLOCK + 1, keys(*range(6)), 16, tbt_slo_s=tbt_slo_s, no_reuse=no_reuse)
    match = fleet.index.match(request.block_keys, 6, fleet.inflight.expected)
    prefill = Random(seed).choice(pool.prefills)
    chosen, predicted_s, shared = select_decode(request, pool, match, prefill, NOW_S)
    assert chosen is oracle(request, pool, match, prefill)
    if not (together and prefill.info.role.decodes):
        asked = request, pool, match, prefill, NOW_S, decode_blocks(request, BLOCK)
        place = least_loaded(*asked)
        common = request, pool, prefill, NOW_S, decode_blocks(request, BLOCK)
        found = place if no_reuse else shared_at(*common, place)[0]
        assert pool.decodes[found] is chosen
    assert shared == (0 if no_reuse else shares(chosen, request))
    assert abs(predicted_s - tbt_s(chosen, request, shared)) < 1e-12
    fleet.loads.prefixes.check_integrity()
    for state in fleet.instances():
        fleet.leave(state.info.instance_id)
    assert fleet.loads.prefixes.empty
