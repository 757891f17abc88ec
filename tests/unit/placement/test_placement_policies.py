"""Each placement policy against its paper, worked by hand in the same fleet."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pinyon.core.errors import Rejected
from pinyon.core.hash_ring import HashRing
from pinyon.core.request import Role
from pinyon.placement.dualmap import DualMap, DualMapSettings, Hotness, Reading
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.pairs import SECOND
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementDecision, PlacementRequest, WaitingPrompt
from pinyon.placement.prefix_match import NO_MATCH
from pinyon.placement.scheduler import Scheduler
from pinyon_lab.policies.placement import CacheAffinity, CacheAffinitySettings, LabDualMap, LabDualMapSettings, PairRule
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from tests.long import usually
from tests.on_compiled import REPLACES_METHODS
from tests.unit.placement.conftest import hold, info, keys, make_fleet, member

BLOCK = 16
TOKEN_S = 0.01
NAMES = ["i0", "i1", "i2", "i3", "i4"]


def fleet_of(queues: dict[str, int], held: dict[str, int]):
    """Returns equally fast instances, each with ``queues`` tokens of work and ``held`` leading blocks of the prompt."""
    fleet = make_fleet(*((name, Role.MIXED) for name in queues))
    fleet.together = True
    for name, tokens in queues.items():
        state = member(fleet, name)
        state.prefill_model = KnownPrefillCost((0.0, TOKEN_S, 0.0))
        state.learned()
        hold(fleet, name, range(held.get(name, 0)))
        if tokens:
            decision = PlacementDecision(state, state, prefill_s=tokens * TOKEN_S)
            fleet.inflight.add(f"before {name}", decision, 0, 0.0)
    return fleet


def ask(name: str = "r", blocks: int = 8, first: int = 0, **changes) -> PlacementRequest:
    prompt = keys(*range(first, first + blocks))
    return PlacementRequest(name, "m", **{"prompt_tokens": BLOCK * blocks + 1, "block_keys": prompt, **changes})


def placed(policy: str, fleet, request: PlacementRequest | None = None) -> str:
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(policy))
    return scheduler.decide(request or ask(), 0.0).prefill.info.instance_id


CASES = {
    "queues": st.fixed_dictionaries({name: st.sampled_from((0, 10, 40, 64, 200)) for name in NAMES}),
    "held": st.fixed_dictionaries({name: st.integers(0, 8) for name in NAMES}),
}


@settings(max_examples=usually(60, long=150), deadline=None)
@given(**CASES)
def test_the_least_predicted_ttft(queues, held):
    times = {name: queues[name] + 129 - 16 * held[name] for name in NAMES}
    assert placed("min_ttft", fleet_of(queues, held)) == min(NAMES, key=lambda name: (times[name], name))


@settings(max_examples=usually(60, long=150), deadline=None)
@given(**CASES)
def test_preble_exploits_more_than_half_and_else_explores(queues, held):
    most = max(held.values())
    if most * BLOCK > 0.5 * 129:
        among = [name for name in NAMES if held[name] == most]
        exploited = min(among, key=lambda name: (queues[name], name))
        assert placed("preble", fleet_of(queues, held)) == exploited
        assert placed("preble:combined=false", fleet_of(queues, held)) == exploited
    else:
        cost = {name: queues[name] + 129 - 16 * held[name] for name in NAMES}
        assert placed("preble", fleet_of(queues, held)) == min(NAMES, key=lambda name: (cost[name], name))
        least = min(NAMES, key=lambda name: (queues[name], name))
        assert placed("preble:combined=false", fleet_of(queues, held)) == least


@settings(max_examples=usually(60, long=150), deadline=None)
@given(**CASES)
def test_dynamo_takes_the_greatest_match_less_load(queues, held):
    longest = max(queues.values()) or 1
    score = {name: 16 * held[name] / 129 - queues[name] / longest for name in NAMES}
    best = max(score.values())
    assert score[placed("dynamo", fleet_of(queues, held))] == pytest.approx(best)


@settings(max_examples=usually(60, long=150), deadline=None)
@given(**CASES)
def test_affinity_alone_takes_what_holds_most(queues, held):
    most = max(held.values())
    among = [name for name in NAMES if held[name] == most]
    found = placed("cache_affinity:key_blocks=0", fleet_of(queues, held))
    assert found == min(among, key=lambda name: (queues[name], name))


def test_affinity_by_hash_looks_at_the_beginning_alone():
    fleet = fleet_of(dict.fromkeys(NAMES, 0), {})
    scheduler = Scheduler(fleet, CacheAffinity(CacheAffinitySettings(key_blocks=2, key_tokens=BLOCK)))
    where = [
        scheduler.decide(ask(block_keys=keys(0, first, *range(50, 56))), 0.0).prefill.info.instance_id
        for first in range(1, 41)
        for _ in range(2)
    ]
    assert where[::2] == where[1::2]
    assert len(set(where)) == len(NAMES)
    same = {
        scheduler.decide(ask(block_keys=keys(0, 1, *range(50, 50 + more)), prompt_tokens=200), 0.0).prefill
        for more in range(8)
    }
    assert len(same) == 1, "what follows does not matter"


def test_one_after_the_other_while_they_come_and_go():
    fleet = fleet_of(dict.fromkeys(NAMES, 0), {})
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make("round_robin"))
    where = [scheduler.decide(ask(), 0.0).prefill.info.instance_id for _ in range(7)]
    assert where == [*NAMES, "i0", "i1"]
    fleet.leave("i2")
    assert scheduler.decide(ask(), 0.0).prefill.info.instance_id == "i3"


def test_chance_is_the_seeds():
    fleet = fleet_of(dict.fromkeys(NAMES, 0), {})
    policy = PLACEMENT_POLICIES.make("random")
    runs = [
        [Scheduler(fleet, policy, rng).decide(ask(), 0.0).prefill.info.instance_id for _ in range(200)]
        for rng in (Random(1), Random(1), Random(2))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert all(runs[0].count(name) > 20 for name in NAMES)


# -- DualMap


def pair_of(settings_: DualMapSettings, fleet, request: PlacementRequest) -> tuple[str, str]:
    (pool,) = fleet.pools("m")
    first, second = DualMap(settings_).pair(request, pool, 0.0)
    assert second is not None
    return first.info.instance_id, second.info.instance_id


@settings(max_examples=usually(80, long=200), deadline=None)
@given(
    **CASES,
    seed=st.integers(0, 50),
    choice=st.sampled_from(list(PairRule)),
    reading=st.sampled_from(list(Reading)),
    slo_s=st.sampled_from((0.5, 1.0, 2.0, 3.0)),
)
def test_the_better_one_of_two(queues, held, seed, choice, reading, slo_s):
    """The instance that reuses more wins until it is overloaded (§3.2), then the less loaded one, as among equals."""
    settings_ = LabDualMapSettings(slo_s=slo_s, reading=reading, share=0.5, choice=choice, seed=seed)
    fleet = fleet_of(queues, held)
    one, two = pair_of(settings_, fleet, ask())
    assert one != two
    less = two if queues[two] < queues[one] else one
    more = less if held[one] == held[two] else max(one, two, key=lambda name: held[name])
    ttft_s = {name: (queues[name] + 129 - 16 * held[name]) * TOKEN_S for name in (one, two)}
    over = ttft_s[more] > slo_s if reading is Reading.EXPECTED else queues[more] * TOKEN_S > 0.5 * slo_s
    expected = {
        PairRule.SLO: less if over else more,
        PairRule.CACHE_AFFINITY: more,
        PairRule.LEAST_LOADED: less,
        PairRule.MIN_TTFT: two if ttft_s[two] < ttft_s[one] - 1e-12 else one,
    }[choice]
    decision = Scheduler(fleet, LabDualMap(settings_)).decide(ask(), 0.0)
    assert decision.prefill.info.instance_id == expected
    assert decision.alternate is not None
    assert {expected, decision.alternate.info.instance_id} == {one, two}


def test_the_requests_or_policys_slo_counts_not_the_conductors():
    queues = dict.fromkeys(NAMES, 0)
    one, two = pair_of(DualMapSettings(), fleet_of(queues, {}), ask())
    fleet = fleet_of({**queues, one: 100}, {one: 8})

    def taken(settings_: DualMapSettings, **changes) -> str:
        return Scheduler(fleet, DualMap(settings_)).decide(ask(**changes), 0.0).prefill.info.instance_id

    assert taken(DualMapSettings()) == one
    assert taken(DualMapSettings(slo_s=1.9)) == two, "more than half of it wait at the other one"
    assert taken(DualMapSettings(), ttft_slo_s=1.9) == two
    assert taken(DualMapSettings(slo_s=1.9), ttft_slo_s=30.0) == one
    assert taken(DualMapSettings(slo_s=1.9), ttft_slo_s=30.0, ttft_slo_named=False) == two


def test_what_one_of_a_pair_would_be_refused_at_the_other_takes():
    queues = dict.fromkeys(NAMES, 0)
    one, two = pair_of(DualMapSettings(slo_s=10.0), fleet_of(queues, {}), ask())
    fleet = fleet_of({**queues, one: 400}, {one: 8})
    scheduler = Scheduler(fleet, DualMap(DualMapSettings(slo_s=10.0)))
    assert scheduler.decide(ask(), 0.0).prefill.info.instance_id == one, "not overloaded yet"
    late = ask(ttft_slo_s=3.0, ttft_slo_named=False)
    assert scheduler.decide(late, 0.0).prefill.info.instance_id == two
    with pytest.raises(Rejected):
        scheduler.decide(ask(ttft_slo_s=1.0), 0.0)


def test_prefixes_grow_by_tokens_whatever_the_blocks():
    """A system prompt has 640 blocks of 16 tokens, or 20 of 512: by single blocks, all requests go to one pair."""
    fleet = fleet_of(dict.fromkeys(NAMES, 0), {})
    shared = range(640)
    asked = [ask(f"r{n}", block_keys=keys(*shared, *range(10_000 + 64 * n, 10_064 + 64 * n))) for n in range(1200)]

    (pool,) = fleet.pools("m")

    def last_ones(key_tokens: int) -> set[str]:
        policy = DualMap(DualMapSettings(key_tokens=key_tokens))
        pairs = [policy.pair(each, pool, 0.0) for each in asked]
        return {first.info.instance_id for first, _ in pairs[-12:]}

    assert len(last_ones(512)) > 2
    assert len(last_ones(BLOCK)) <= 2


def test_what_is_hot_is_asked_of_the_own_model_alone():
    """One request in forty is of the rare model, and all of its requests begin alike."""
    fleet = make_fleet(instances_max=64)
    for model in "ab":
        for number in range(8):
            fleet.join(info(f"{model}{number}", Role.MIXED, model=model, model_fingerprint=model), 0.0)
    (common,), (rare,) = fleet.pools("a"), fleet.pools("b")
    policy = DualMap(DualMapSettings(key_tokens=BLOCK))
    pairs = set()
    for number in range(8_000):
        blocks = keys(7, number + 100, number + 50_000)
        if number % 40:
            policy.pair(ask(f"{number}", block_keys=keys(number + 100_000, 1, 2)), common, 0.0)
        else:
            first, second = policy.pair(ask(f"{number}", block_keys=blocks), rare, 0.0)
            pairs.add((first, second))
    assert len(pairs) > 8


def test_by_the_texts_bounds_exclusion_changes_no_pairs():
    fleet = fleet_of(dict.fromkeys(NAMES, 0), {})
    (pool,) = fleet.pools("m")
    policy = DualMap(DualMapSettings(hotness=Hotness.TEXT, key_tokens=BLOCK))

    def pair(number: int, exclude: frozenset[str] = frozenset()):
        asked = ask(f"{number}", block_keys=keys(7, number + 100, number + 5_000), exclude=exclude)
        return policy.pair(asked, pool.without(exclude), 0.0)

    for number in range(100):
        pair(number)
    spread = {pair(number) for number in range(100, 140)}
    pair(141, frozenset(NAMES[1:]))  # 2 / n of one instance: no prefix is that hot
    assert {pair(number) for number in range(100, 140)} == spread
    assert len(spread) > 1


def test_who_waits_for_memory_is_loaded():
    queues = dict.fromkeys(NAMES, 0)
    fleet = fleet_of(queues, {})
    one, two = pair_of(DualMapSettings(), fleet, ask())
    report(fleet, one, room_wait_ms=2_000)
    assert Scheduler(fleet, DualMap()).decide(ask(), 0.0).prefill.info.instance_id == two
    hold(fleet, one, range(8))
    assert Scheduler(fleet, DualMap()).decide(ask(), 0.0).prefill.info.instance_id == one, "not overloaded"
    report(fleet, one, room_wait_ms=2_600)
    assert Scheduler(fleet, DualMap()).decide(ask(), 0.0).prefill.info.instance_id == two


def test_alone_there_is_no_pair():
    fleet = fleet_of({"i0": 0}, {})
    decision = Scheduler(fleet, DualMap()).decide(ask(), 0.0)
    assert (decision.prefill.info.instance_id, decision.alternate) == ("i0", None)


def queue_up(fleet, scheduler: Scheduler, source: str, other: str, count: int, placed_s: float) -> list[WaitingPrompt]:
    waiting = []
    for number in range(count):
        request = ask(f"w{number}", first=100 * (number + 1))
        decision = scheduler.decide_at(request, member(fleet, source), member(fleet, other), 0.0)
        fleet.inflight.add(request.request_id, decision, 0, 0.0)
        waiting.append(WaitingPrompt(request, decision, placed_s))
    return waiting


def moved(
    settings_: DualMapSettings, others_tokens: int, count: int, now_s: float = 0.0, placed_s: float = 0.0
) -> list[str]:
    """Returns the requests that move from one instance of a pair to the other.

    The requests that wait take 1.29 s each; the other instance has ``others_tokens`` of other work."""
    one, two = pair_of(settings_, fleet_of(dict.fromkeys(NAMES, 0), {}), ask())
    fleet = fleet_of({**dict.fromkeys(NAMES, 0), two: others_tokens}, {})
    scheduler = Scheduler(fleet, DualMap(settings_))
    waiting = queue_up(fleet, scheduler, one, two, count, placed_s)
    decision = scheduler.decide_at(ask(), member(fleet, one), member(fleet, two), now_s)
    at = {one: waiting}
    moves = scheduler.moves(ask(), decision, lambda state: at.get(state.info.instance_id, []), now_s)
    assert all((move.source, move.target) == (member(fleet, one), member(fleet, two)) for move in moves)
    return [move.request.request_id for move in moves]


@REPLACES_METHODS
@settings(max_examples=usually(80, long=200), deadline=None)
@given(**CASES, reading=st.sampled_from(list(Reading)), slo_s=st.sampled_from((0.5, 1.0, 1.5, 2.0, 3.0)))
def test_what_may_move_is_looked_for_where_both_are_overloaded(queues, held, reading, slo_s):
    """A.2.2 compares the expected times of this request at both, or the work of both."""
    policy = DualMap(DualMapSettings(slo_s=slo_s, reading=reading))
    looked: list[str] = []
    policy._relieve = lambda state, *_: looked.append(state.info.instance_id) or []  # type: ignore[method-assign,func-returns-value]
    fleet = fleet_of(queues, held)
    scheduler = Scheduler(fleet, policy)
    decision = scheduler.schedule(ask(), 0.0)
    assert decision.alternate is not None
    taken, other = names = [each.info.instance_id for each in (decision.prefill, decision.alternate)]
    scheduler.moves(ask(), decision, fleet.inflight.waiting, 0.0)
    own = {name: 129 - 16 * held[name] for name in names}
    if reading is Reading.EXPECTED:
        over = all(round((queues[name] + own[name]) * TOKEN_S - slo_s, 9) > 0 for name in names)
    else:
        work = {taken: queues[taken] + own[taken], other: queues[other]}
        over = all(round(work[name] * TOKEN_S - 0.5 * slo_s, 9) > 0 for name in names)
    assert looked == (names if over else [])


def test_nothing_moves_unless_both_are_overloaded():
    assert moved(DualMapSettings(slo_s=8.0), others_tokens=0, count=10) == []
    assert moved(DualMapSettings(slo_s=8.0), others_tokens=401, count=1) == []


def test_who_gains_most_goes_first_until_the_rest_is_in_time():
    """The last two of eight would wait 9.0 and 10.3 s; on the other instance, with 4.5 s of work, 5.8 and 7.1 s."""
    assert moved(DualMapSettings(slo_s=8.0), others_tokens=450, count=8) == ["w7", "w6"]
    assert moved(DualMapSettings(slo_s=8.0), others_tokens=450, count=6) == [], "all six are in time where they are"


def test_nobody_goes_where_it_would_be_late():
    assert moved(DualMapSettings(slo_s=8.0), others_tokens=700, count=8) == []
    assert moved(DualMapSettings(slo_s=8.0), others_tokens=660, count=8) == ["w7"], "and only as many as have room"


def test_what_waited_already_counts():
    """Two seconds later and with nothing done, two more requests are late; two of those that gain have room."""
    assert moved(DualMapSettings(slo_s=8.0, stuck_s=100.0), others_tokens=450, count=8, now_s=1.5) == ["w7"]


def test_an_instance_that_completes_nothing_becomes_overloaded():
    """Three seconds pass without a completed prefill (A.8), while five requests of 1.29 s would be in time."""
    busy = DualMapSettings(slo_s=11.0)
    assert moved(busy, others_tokens=560, count=5, now_s=2.9) == []
    assert moved(busy, others_tokens=560, count=5, now_s=3.1) == ["w4"]
    assert moved(busy, others_tokens=560, count=5, now_s=103.1, placed_s=100.2) == [], "before, nobody waited"


@settings(max_examples=usually(120, long=300), deadline=None)
@example([(24, True, False), (14, False, True)], 24, 100, [0.0, 2.5] * 4)
@example(
    [
        (1, False, True),
        (1, False, True),
        (21, True, False),
        (1, False, False),
        (1, True, False),
        (1, True, False),
        (4, False, False),
    ],
    21,
    271,
    [0.0, 0.0, 0.0, 2.5, 0.0, 0.0, 0.0, 0.0],
)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.booleans(), st.booleans()), min_size=1, max_size=8),
    held=st.integers(0, 24),
    others_tokens=st.integers(50, 900),
    ages_s=st.lists(st.sampled_from((0.0, 0.5, 1.0, 2.5)), min_size=8, max_size=8),
)
def test_moves_are_those_of_a_search_that_counts_anew_each_time(sizes, held, others_tokens, ages_s):
    """A.2.2 moves the request that gains most and is in time there, again and again, until the rest is in time."""
    settings_ = DualMapSettings(slo_s=6.0, share=0.1, stuck_s=1e6)
    one, two = pair_of(settings_, fleet_of(dict.fromkeys(NAMES, 0), {}), ask())
    fleet = fleet_of({**dict.fromkeys(NAMES, 0), two: others_tokens}, {two: held})
    scheduler = Scheduler(fleet, DualMap(settings_))
    now_s, waiting = 10.0, []
    seconds = [(1 if reuses else 16 * blocks + 1) * TOKEN_S for blocks, _, reuses in sizes]
    for number, ((blocks, shares, _), age_s) in enumerate(zip(sizes, ages_s, strict=False)):
        request = ask(f"w{number}", blocks=blocks, first=0 if shares else 1000 * (number + 1))
        decision = PlacementDecision(member(fleet, one), member(fleet, one), prefill_s=seconds[number])
        decision.alternate = member(fleet, two)
        fleet.inflight.add(request.request_id, decision, 0, now_s)
        waiting.append(WaitingPrompt(request, decision, now_s - age_s))
    at = {one: waiting}
    decision = scheduler.decide_at(ask(), member(fleet, one), member(fleet, two), now_s)
    moves = scheduler.moves(ask(), decision, lambda state: at.get(state.info.instance_id, []), now_s)

    there_s = [(16 * blocks + 1 - 16 * min(held * shares, blocks)) * TOKEN_S for blocks, shares, _ in sizes]
    other_s = others_tokens * TOKEN_S

    def here(gone: set[int]) -> list[float]:
        return [
            sum(s for n, s in enumerate(seconds[: place + 1]) if n not in gone) + ages_s[place]
            for place in range(len(sizes))
        ]

    gone: set[int] = set()
    order: list[str] = []
    if sum(seconds) > 0.1 * 6.0 and other_s > 0.1 * 6.0:
        start = here(gone)
        gains = sorted(
            (ages_s[place] + other_s + there_s[place] - start[place], place)
            for place in range(len(sizes))
            if ages_s[place] + other_s + there_s[place] < min(start[place], 6.0) - 1e-9
        )
        for _, place in gains:
            left = here(gone)
            if all(left[each] <= 6.0 + 1e-9 for each in range(len(sizes)) if each not in gone):
                break
            if ages_s[place] + other_s + there_s[place] < min(left[place], 6.0) - 1e-9:
                order.append(f"w{place}")
                gone.add(place)
                other_s += there_s[place]
    assert [move.request.request_id for move in moves] == order


def test_the_two_rings_are_independent():
    (pool,) = fleet_of(dict.fromkeys(NAMES, 0), {}).pools("m")
    policy = DualMap(DualMapSettings(seed=5))
    rings = HashRing(NAMES, 128, 5), HashRing(NAMES, 128, 5 ^ SECOND)
    for first in range(200):
        prompt = keys(1000 + first)
        one, two = policy.pair(ask(block_keys=prompt), pool, 0.0)
        assert two is not None
        assert one.info.instance_id == rings[0].owner(prompt)
        assert two.info.instance_id == rings[1].owner(prompt, other_than=one.info.instance_id)


def test_nothing_moves_without_rebalancing():
    for policy in ("dualmap:rebalance=false", "least_loaded"):
        fleet = fleet_of(dict.fromkeys(NAMES, 900), {})
        scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(policy))
        decision = scheduler.decide(ask(), 0.0)
        assert scheduler.moves(ask(), decision, lambda state: [], 0.0) == []


@pytest.mark.parametrize(
    "choice",
    [
        "dualmap:slo_s=0",
        "dualmap:virtual_nodes=0",
        "dualmap:reading=maybe",
        "preble:share=2",
        "dynamo:load_weight=-1",
        "cache_affinity:key_blocks=-1",
        "cache_affinity:seed=-1",
    ],
)
def test_settings_are_checked(choice):
    with pytest.raises(ValueError, match=r"from|one of"):
        PLACEMENT_POLICIES.make(choice)


def test_nothing_known_of_a_prompt():
    fleet = fleet_of(dict.fromkeys(NAMES, 0), {})
    for name in PLACEMENT_POLICIES.names:
        decision = Scheduler(fleet, PLACEMENT_POLICIES.make(name)).decide(ask(block_keys=b""), 0.0)
        assert decision.local_blocks == NO_MATCH.blocks


def test_a_long_queue_is_looked_at_once_for_each_instance():
    """The caller that answers which requests wait somewhere may have to list them."""
    settings_ = DualMapSettings(slo_s=8.0)
    one, two = pair_of(settings_, fleet_of(dict.fromkeys(NAMES, 0), {}), ask())
    fleet = fleet_of({**dict.fromkeys(NAMES, 0), two: 450}, {})
    scheduler = Scheduler(fleet, DualMap(settings_))
    at = {one: queue_up(fleet, scheduler, one, two, 50, 0.0)}
    asked: list[str] = []

    def queues(state):
        asked.append(state.info.instance_id)
        return at.get(state.info.instance_id, [])

    assert scheduler.moves(ask(), scheduler.decide_at(ask(), member(fleet, one), member(fleet, two), 0.0), queues, 0.0)
    assert sorted(asked) == sorted((one, two))


CHOOSERS = ("least_loaded", "min_ttft", "preble", "dynamo", "kvcache_centric", "algorithm1")


def report(fleet, name: str, **load: float) -> None:
    fleet.set_load(member(fleet, name), InstanceLoad(**load), 0.0)


@pytest.mark.parametrize("policy", CHOOSERS)
def test_who_waits_for_memory_waits(policy):
    """Algorithm 1 chooses and refuses by the same TTFT (lines 12 to 18)."""
    fleet = fleet_of({"i0": 0, "i1": 100}, {})
    report(fleet, "i0", room_wait_ms=30_000)
    assert placed(policy, fleet, ask(ttft_slo_s=10.0)) == "i1"
    report(fleet, "i0", room_wait_ms=0)
    assert placed(policy, fleet, ask()) == "i0"


@pytest.mark.parametrize("policy", ["least_loaded", "min_ttft", "preble", "dynamo"])
def test_of_equal_waits_the_one_that_decodes_least(policy):
    """The first instance would else get all requests while none waits and nothing is kept, and decodes pile up."""
    fleet = fleet_of({"i0": 0, "i1": 0, "i2": 0}, {})
    report(fleet, "i0", running_requests=3)
    report(fleet, "i1", running_requests=1, pending_requests=1)
    assert placed(policy, fleet) == "i2"
    report(fleet, "i2", running_requests=4)
    assert placed(policy, fleet) == "i1"


def test_one_without_memory_does_not_make_a_queue_look_short():
    fleet = fleet_of({"i0": 200, "i1": 0, "i2": 0}, {"i0": 2})
    assert placed("dynamo", fleet) == "i1"
    report(fleet, "i2", room_wait_ms=600_000)
    assert placed("dynamo", fleet) == "i1"


def test_what_is_reported_of_many_instances_is_kept():
    fleet = make_fleet(*((f"i{number:03d}", Role.MIXED) for number in range(200)), instances_max=300)
    for number in range(200):
        report(fleet, f"i{number:03d}", running_requests=number != 150, room_wait_ms=0)
    assert placed("least_loaded", fleet) == "i150"


def test_a_fetch_that_would_make_a_request_late_is_not_doubted():
    """The request's wait for KV memory there counts as well."""
    fleet = make_fleet(("p0", Role.PREFILL), ("d0", Role.DECODE), ("s0", Role.STORE))
    state = member(fleet, "p0")
    state.prefill_model = KnownPrefillCost((0.0, TOKEN_S, 0.0))
    state.learned()
    hold(fleet, "s0", range(8))
    for _ in range(200):
        fleet.learn_transfers(state, [(8 * 16 * 256, 2.5, None)], 0.0)
    request = ask(ttft_slo_s=3.5)
    doubting = Scheduler(fleet, PLACEMENT_POLICIES.make("kvcache_centric")).decide(request, 300.0)
    assert doubting.doubts_transfer
    report(fleet, "p0", room_wait_ms=1_500)
    sure = Scheduler(fleet, PLACEMENT_POLICIES.make("kvcache_centric")).decide(request, 300.0)
    assert not sure.doubts_transfer
