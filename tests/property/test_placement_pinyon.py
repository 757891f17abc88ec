"""pinyon's own placement against a search of every instance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.core.request import Role
from pinyon.placement.costs import EXAMINED_MAX, Costs, CostTerms
from pinyon.placement.decode_selection import select_decode
from pinyon.placement.fetch_plan import FetchPlanner
from pinyon.placement.fetch_time import path_kind
from pinyon.placement.fleet import Fleet
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.instances import InstanceLoad, InstanceState
from pinyon.placement.load_table import CLASSES
from pinyon.placement.pairs import Pairs
from pinyon.placement.policy import PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.scheduler import Scheduler
from pinyon.placement.transfer_cost import PATH_KINDS, PathKind, TransferCostModel
from pinyon_lab.policies.placement import LabPinyon, LabPinyonSettings
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from tests.long import usually
from tests.unit.placement.conftest import LAYOUT, hold, info, keys, make_fleet, member

BLOCK, NOW_S = LAYOUT.block_tokens, 50.0


@dataclass
class World:
    fleet: Fleet
    names: tuple[str, ...]
    waiting: dict[str, list[int]]
    """The prompts that wait at each instance, in microseconds."""
    ends_s: dict[str, float]
    request: PlacementRequest

    @property
    def pool(self) -> Pool:
        return self.fleet.pools("m")[0]

    @property
    def match(self) -> PrefixMatch:
        return self.fleet.index.match(self.request.block_keys, self.request.reusable_blocks(BLOCK))


def world(seed: int, *, sources: int, short_first: bool | None, apart: bool = False) -> World:
    """Makes a world; with ``short_first`` None some instances serve short prompts first.

    Each source beyond an instance's own blocks is a store node. Instances share three hosts, each kind of path has a
    random speed, and some store nodes have SSDs. With ``apart`` each store node has its own host and keeps its blocks
    in memory."""
    rng = Random(seed)
    names = tuple(f"m{number}" for number in range(rng.randrange(2, 7)))
    fleet = make_fleet()
    fleet.together = rng.random() < 0.6
    prompts_only = rng.choice((0, 0, 1, len(names) - 1)) if fleet.together else 0
    for name in names:
        role = Role.PREFILL if int(name[1:]) < prompts_only else Role.MIXED
        first = rng.random() < 0.5 if short_first is None else short_first
        fleet.join(info(name, role, short_first=first, address=f"h{rng.randrange(3)}:{name}"), 0.0)
    blocks = rng.randrange(0, 40)
    deepest = 0
    for name in names:
        state = member(fleet, name)
        state.decodes_changed(rng.choice((0, 1, 5, 40)), 0)
        speed = rng.choice((1e-5, 1e-4, 1e-3))
        state.prefill_model = KnownPrefillCost((rng.choice((0.0, 1e-3)), speed, speed / 45_000))
        paths = [(rng.choice((0.0, 1e-3)), rng.choice((1e-9, 1e-8, 1e-7, 1e-6))) for _ in range(PATH_KINDS)]
        state.transfer_model = TransferCostModel(tuple(paths))
        state.learned()
        state.transfers_learned()
        own = rng.randrange(0, blocks // 2 + 1)
        deepest = max(deepest, own)
        hold(fleet, name, range(1, own + 1))
    for number in range(sources):
        where, on_ssd = (f"s{number}", False) if apart else (f"h{rng.randrange(4)}", rng.random() < 0.3)
        fleet.join(info(f"s{number}", Role.STORE, address=f"{where}:{number}", on_ssd=on_ssd), 0.0)
        cut = blocks * number // sources
        hold(fleet, f"s{number}", range(cut + 1, rng.randrange(max(cut, deepest), blocks + 1) + 1))
    waiting = {name: [rng.choice((900, 40_000, 700_000)) for _ in range(rng.randrange(0, 4))] for name in names}
    ends_s = {name: rng.choice((0.0, NOW_S - 1.0, NOW_S + 0.5)) for name in names}
    for name in names:
        state = member(fleet, name)
        state.loads.ends_s[state.row] = ends_s[name]
        for prefill_us in waiting[name]:
            state.loads.count(state.row, prefill_us)
    tokens = blocks * BLOCK + rng.randrange(1, 200)
    return World(fleet, names, waiting, ends_s, PlacementRequest("r", "m", tokens, keys(*range(1, blocks + 1))))


def costs(it: World, state: InstanceState, others: float, short_first: bool) -> tuple[float, float, float, float, int]:
    """Returns the cost there, the wait, the fetch and compute times, and the blocks that the instance has then."""
    pool, match, tokens = it.pool, it.match, it.request.prompt_tokens
    local = match.held_by(state)
    prefill_s, transfer_s, reach = state.prefill_model.predict_s(tokens, local * BLOCK), 0.0, local
    most = match.extent(local, pool.asked_by(state) & ~state.bit, FETCH_SPANS_MAX)
    if most > local:
        fetch_s = FetchPlanner(pool, match).fetch_s(state, local, most)
        short_s = state.prefill_model.predict_s(tokens, most * BLOCK)
        if fetch_s + short_s < prefill_s:
            prefill_s, transfer_s, reach = short_s, fetch_s, most
    name = state.info.instance_id
    size = round(prefill_s * 1e6).bit_length()
    before = [us for us in it.waiting[name] if not short_first or us.bit_length() <= size]
    behind = len(it.waiting[name]) - len(before)
    wait_s = max(0.0, it.ends_s[name] - NOW_S) + sum(before) * 1e-6
    most = max(8, *(each.decoding_requests() for each in pool.prefills))
    only = [each for each in pool.prefills if each.info.role is Role.PREFILL]
    lost_s = others * behind * prefill_s
    if pool.together:
        slowed_s = prefill_s - state.prefill_model.coefficients[0] if only else prefill_s
        slowed_s = 0.0 if state in only else slowed_s
        lost_s += 0.25 * state.decoding_requests() / (1 if only else most) * slowed_s
    if state in only:
        decode, *_ = select_decode(it.request, pool, match, state, NOW_S)
        start_s, byte_s = decode.transfer_model.coefficients(path_kind(decode, only[0]))
        missing = tokens // BLOCK - match.held_by(decode)
        moved_s = start_s + byte_s * missing * LAYOUT.block_bytes if missing else 0.0
        transfer_s += moved_s + decode.decode_s(tokens)
    return wait_s + transfer_s + prefill_s + lost_s, wait_s, transfer_s, prefill_s, reach


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.0, 0.5, 1.0)), st.booleans())
def test_it_is_the_instance_that_costs_least(seed: int, others: float, short_first: bool) -> None:
    """The estimate is exact with one source; with several, an instance that seems cheaper may turn out not to be."""
    it = world(seed, sources=1, short_first=short_first)
    policy = LabPinyon(LabPinyonSettings(others=others, pair=False))
    decision = policy.place(it.request, it.pool, it.match, NOW_S, Random(0))
    each = {name: costs(it, member(it.fleet, name), others, short_first) for name in it.names}
    chosen = each[decision.prefill.info.instance_id]
    assert chosen[0] == pytest.approx(min(cost for cost, *_ in each.values()), abs=1e-8)
    said = decision.queue_s, decision.transfer_s, decision.prefill_s
    assert said == pytest.approx(chosen[1:4], abs=1e-9)
    assert decision.reused_blocks == chosen[4]


@settings(max_examples=usually(20, long=200), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 4))
def test_of_several_sources_as_well_where_prompts_come_in_turn(seed: int, sources: int) -> None:
    it = world(seed, sources=sources, short_first=False, apart=True)
    decision = LabPinyon(LabPinyonSettings(pair=False)).place(it.request, it.pool, it.match, NOW_S, Random(0))
    each = {name: costs(it, member(it.fleet, name), 1.0, False) for name in it.names}
    chosen = each[decision.prefill.info.instance_id]
    assert chosen[0] == pytest.approx(min(cost for cost, *_ in each.values()), abs=1e-8)
    assert decision.reused_blocks == chosen[4]


@settings(max_examples=usually(35, long=400), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.02, 0.3, 0.8, 2.0)), st.booleans(), st.booleans())
def test_who_is_late_has_it_only_where_all_are(seed: int, limit_s: float, named: bool, pair: bool) -> None:
    """The choice is the cheapest of those in time, or the cheapest of all where that is in time."""
    it = world(seed, sources=1, short_first=True)
    request = replace(it.request, ttft_slo_s=limit_s, ttft_slo_named=named)
    each = {name: costs(it, member(it.fleet, name), 1.0, True) for name in it.names}
    ttfts_s = {name: wait_s + transfer_s + prefill_s for name, (_, wait_s, transfer_s, prefill_s, _) in each.items()}
    limits_s = {
        name: limit_s if named else max(limit_s, 1.25 * (transfer_s + prefill_s))
        for name, (_, _, transfer_s, prefill_s, _) in each.items()
    }
    in_time = [name for name in it.names if ttfts_s[name] <= limits_s[name]]
    policy = LabPinyon(LabPinyonSettings(pair=pair))
    chosen = policy.place(request, it.pool, it.match, NOW_S, Random(0)).prefill.info.instance_id
    assert (chosen in in_time) == bool(in_time)
    among = in_time or it.names
    if not pair:
        assert each[chosen][0] == pytest.approx(min(each[name][0] for name in among), abs=1e-8)
    asked = CostTerms(1.0, True, True, decodes=0.25), request, it.pool, it.match, NOW_S
    place = Costs(*asked).cheapest_in_time(0.0, -1)
    if place is None:
        assert not in_time
    else:
        assert each[it.names[place]][0] == pytest.approx(min(each[name][0] for name in in_time), abs=1e-8)


@settings(max_examples=usually(20, long=200), deadline=None)
@given(st.integers(0, 1 << 32))
def test_one_of_the_pair_has_it_where_that_costs_hardly_more(seed: int) -> None:
    it = world(seed, sources=1, short_first=True)
    options = LabPinyonSettings()
    decision = LabPinyon(options).place(it.request, it.pool, it.match, NOW_S, Random(0))
    plain = LabPinyon(LabPinyonSettings(pair=False)).place(it.request, it.pool, it.match, NOW_S, Random(0))
    each = {name: costs(it, member(it.fleet, name), 1.0, True) for name in it.names}
    best, chosen = plain.prefill.info.instance_id, decision.prefill.info.instance_id
    new_tokens = it.request.prompt_tokens - each[best][4] * BLOCK
    start_s, byte_s = member(it.fleet, best).transfer_model.coefficients(PathKind.NETWORK)
    worth_s = start_s + byte_s * new_tokens * LAYOUT.block_bytes / BLOCK
    if chosen != best:
        pairs = Pairs(HotnessSettings(), options.virtual_nodes, options.seed, options.key_tokens)
        pair = {it.names[at] for at in pairs.places_of(it.request, it.pool, NOW_S) if at is not None}
        assert chosen in pair
        assert best not in pair
        assert each[chosen][0] <= each[best][0] + worth_s + 1e-8


@settings(max_examples=usually(20, long=100), deadline=None)
@given(st.integers(0, 1 << 32))
def test_without_its_parts_it_is_who_has_the_first_token_soonest(seed: int) -> None:
    it = world(seed, sources=0, short_first=True)
    it.fleet.together = False  # nobody hands KV over
    bare = LabPinyon(LabPinyonSettings(others=0.0, decodes=0.0, fetch=False, order=False, pair=False))
    decision = bare.place(it.request, it.pool, it.match, NOW_S, Random(0))
    soonest = min(
        member(it.fleet, name).wait_s(NOW_S)
        + member(it.fleet, name).prefill_model.predict_s(
            it.request.prompt_tokens, it.match.held_by(member(it.fleet, name)) * BLOCK
        )
        for name in it.names
    )
    assert decision.ttft_s == pytest.approx(soonest, abs=1e-8)
    assert not decision.fetches


def crowd(count: int, sources: dict[str, list[int]]) -> Fleet:
    """Returns idle instances that hold nothing, and store nodes with these blocks; computing is slow."""
    fleet = make_fleet()
    for number in range(count):
        fleet.join(info(f"m{number:02}", Role.MIXED), 0.0)
        state = member(fleet, f"m{number:02}")
        state.prefill_model = KnownPrefillCost((0.0, 1e-3, 0.0))
        state.learned()
    for name, blocks in sources.items():
        fleet.join(info(name, Role.STORE), 0.0)
        hold(fleet, name, blocks)
    return fleet


@pytest.mark.parametrize("pair", [False, True])
def test_what_nobody_may_be_asked_for_is_computed(pair: bool) -> None:
    """The holder is known but draining, so no instance left unexamined may seem to fetch from it."""
    fleet = crowd(12, {"s0": [*range(1, 41)], "s1": [*range(1, 11)]})
    fleet.set_load(member(fleet, "s0"), InstanceLoad(draining=True), 0.0)
    request = PlacementRequest("r", "m", 40 * BLOCK + 5, keys(*range(1, 41)))
    decision = Scheduler(fleet, LabPinyon(LabPinyonSettings(pair=pair))).schedule(request, 1.0)
    assert [(each.source.info.instance_id, each.first_block, each.block_count) for each in decision.fetches] == [
        ("s1", 0, 10)
    ]


def test_an_examined_instance_is_taken_where_none_can_fetch() -> None:
    """All instances lost trust in the only holder, which only a look at each of them tells."""
    fleet = crowd(12, {"s0": [*range(1, 41)]})
    for number in range(12):
        fleet.set_load(member(fleet, f"m{number:02}"), InstanceLoad(failed_sources=frozenset({"s0:1"})), 0.0)
    request = PlacementRequest("r", "m", 40 * BLOCK + 5, keys(*range(1, 41)))
    decision = Scheduler(fleet, LabPinyon()).schedule(request, 1.0)
    assert not decision.fetches
    assert decision.prefill_s == pytest.approx((40 * BLOCK + 5) * 1e-3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_waits_is_counted_and_taken_off(seed: int) -> None:
    """Placements, begins and ends in any order leave the table by classes equal to a list."""
    rng = Random(seed)
    fleet = make_fleet()
    for name in ("a", "b"):
        fleet.join(info(name, Role.MIXED, short_first=True), 0.0)
    scheduler = Scheduler(fleet, LabPinyon())
    open_: dict[str, str] = {}
    waits: dict[str, int] = {}
    for number in range(60):
        what = rng.random()
        if what < 0.5 or not open_:
            request = PlacementRequest(str(number), "m", rng.choice((10, 500, 4000)))
            decision = scheduler.schedule(request, float(number))
            open_[request.request_id] = decision.prefill.info.instance_id
            waits[request.request_id] = round(decision.prefill_s * 1e6)
        else:
            request_id = rng.choice(list(open_))
            state = member(fleet, open_[request_id])
            if what < 0.7:
                fleet.inflight.begin_prefill(request_id, state, float(number))
            elif what < 0.9:
                fleet.inflight.end_prefill(request_id, state, float(number))
                del open_[request_id]
            else:
                fleet.inflight.release(request_id)
                del open_[request_id]
            waits.pop(request_id, None)
        for name in ("a", "b"):
            row = member(fleet, name).row
            here = [us for request_id, us in waits.items() if open_.get(request_id) == name]
            assert int(fleet.loads.queued_us[row]) == sum(here)
            for size in range(CLASSES):
                assert fleet.loads.ahead_us[size * len(fleet.loads.queued_us) + row] == sum(
                    us for us in here if us.bit_length() <= size
                )
                assert fleet.loads.behind[size * len(fleet.loads.queued_us) + row] == sum(
                    us.bit_length() > size for us in here
                )


@pytest.mark.parametrize("count", [2, EXAMINED_MAX, EXAMINED_MAX + 1, 30])
def test_no_fetch_is_planned_where_no_holder_may_be_asked(count):
    fleet = make_fleet(("store", Role.STORE), *((f"m{number}", Role.MIXED) for number in range(count)))
    hold(fleet, "store", range(400))
    for number in range(count):
        load = InstanceLoad(failed_sources=frozenset({"store:1"}))
        fleet.set_load(member(fleet, f"m{number}"), load, 0.0)
    request = PlacementRequest("r", "m", 400 * BLOCK + 1, keys(*range(400)), 8)
    decision = Scheduler(fleet, LabPinyon()).schedule(request, NOW_S)
    assert (decision.fetches, decision.reused_blocks) == ((), 0)


def test_a_plan_never_has_more_spans_than_a_worker_takes():
    fleet = make_fleet(*((f"m{number}", Role.MIXED) for number in range(40)))
    for number in range(40):
        hold(fleet, f"m{number}", range(number % 20, 400, 20))
    request = PlacementRequest("r", "m", 400 * BLOCK + 1, keys(*range(400)), 8)
    decision = Scheduler(fleet, LabPinyon()).schedule(request, NOW_S)
    assert len(decision.fetches) <= FETCH_SPANS_MAX
