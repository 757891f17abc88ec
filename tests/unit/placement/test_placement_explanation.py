"""Explanations tell what was true at the decision, by an independent count, whatever happens afterwards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.block_keys import SharedPrefix
from pinyon.core.errors import PinyonError
from pinyon.placement.decision_log import DecisionLog
from pinyon.placement.explanation import CANDIDATES_MAX, Explanation, explain
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from tests.unit.placement.conftest import (
    DECODE,
    LAYOUT,
    MIXED,
    PREFILL,
    STORE,
    hold,
    id_of_pair,
    info,
    keys,
    make_fleet,
    member,
)

BLOCK = LAYOUT.block_tokens
FETCHING = ("kvcache_centric", "pinyon")


def expected_of(fleet, request, decision, now_s, fetching):
    """Returns the held blocks and predicted seconds to the first token by instance id, computed one by one."""
    found = {}
    reusable = request.reusable_blocks(BLOCK)
    match = fleet.index.match(request.block_keys, reusable, fleet.inflight.expected)
    (pool,) = fleet.pools("m")
    for state in pool.prefills:
        soon = max(match.held_by(state), match.soon.held_by(state))
        decode_s = decision.decode.load.room_wait_ms / 1e3 if state is not decision.decode else 0.0
        if decision.decode is decision.prefill:
            decode_s = 0.0
        wait_s = state.wait_s(now_s) + decode_s
        ways = [state.prefill_model.predict_s(request.prompt_tokens, soon * BLOCK)]
        reach = match.extent(soon, pool.asked & ~state.bit)
        if fetching and reach > soon:
            fetch_s = state.transfer_model.predict_s((reach - soon) * LAYOUT.block_bytes)
            ways.append(fetch_s + state.prefill_model.predict_s(request.prompt_tokens, reach * BLOCK))
        found[state.info.instance_id] = match.held_by(state), wait_s + min(ways)
    return found


def decide(fleet, policy, request, now_s=1.0, before=None) -> tuple[Explanation, dict]:
    """Decides, and explains the decision only after everything has changed."""
    scheduler, log = Scheduler(fleet, PLACEMENT_POLICIES.make(policy)), DecisionLog(10, 1 << 20, 1)
    seen = {}

    def consider(asked, decision, pool, match):
        fetching = policy.partition(":")[0] in FETCHING or bool(decision.fetches)
        seen.update(expected_of(fleet, asked, decision, now_s, fetching))
        log.consider(asked, decision, pool, match)

    scheduler.consider = consider
    try:
        scheduler.schedule(request, now_s)
        log.placed(request, now_s)
    except PinyonError as error:
        log.refused(request, error, now_s)
    for state in fleet.instances():
        hold(fleet, state.info.instance_id, range(100, 110))
        fleet.set_load(state, InstanceLoad(pending_prefill_tokens=9999, room_wait_ms=7e3), now_s)
        if state.info.role.prefills:
            fleet.learn_prefills(state, [(1000, 0, 77.0)], now_s)
        fleet.learn_transfers(state, [(1 << 20, 55.0, None)], now_s)
    for number in range(100):  # the load table grows
        fleet._instances_max = 1000
        fleet.join(info(f"z{number}", MIXED), now_s)
    fleet.leave(fleet.instances()[0].info.instance_id)
    ((logged,),) = log.search(request.request_id)
    return explain(logged), seen


LOADS = st.tuples(st.integers(0, 12), st.integers(0, 4000), st.integers(0, 3000), st.integers(1, 40))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(LOADS, min_size=2, max_size=14),
    st.sampled_from(
        ("pinyon", "kvcache_centric", "algorithm1", "min_ttft", "dualmap", "least_loaded", "round_robin", "random")
    ),
    st.booleans(),
)
def test_what_is_said_was_so_then(loads, policy, apart):
    names = [f"i{number:02}" for number in range(len(loads))]
    decode = ("d", DECODE) if apart else ("i00", MIXED)
    fleet = make_fleet(*((name, PREFILL if apart else MIXED) for name in names[0 if apart else 1 :]), decode)
    for name, (held, tokens, room_ms, speed) in zip(names, loads, strict=True):
        state = member(fleet, name)
        hold(fleet, name, range(held))
        fleet.set_load(state, InstanceLoad(pending_prefill_tokens=tokens, room_wait_ms=room_ms), 0.0)
        fleet.learn_prefills(state, [(1000, 0, 0.01 * speed)], 0.0)
        fleet.learn_transfers(state, [(1 << 20, 0.001 * speed, None)], 0.0)
    Scheduler(fleet, PLACEMENT_POLICIES.make("least_loaded")).schedule(
        PlacementRequest("before", "m", 16 * 6 + 1, keys(*range(6)), 8), 0.5
    )
    request = PlacementRequest("r", "m", 16 * 12 + 5, keys(*range(12)), 8)
    said, seen = decide(fleet, policy, request)
    assert said.chosen is not None
    others = {each.instance_id: each for each in said.others}
    assert said.could == len(seen) == len(names)
    assert len(others) == min(CANDIDATES_MAX, len(names) - 1)
    assert said.chosen.instance_id not in others
    for name, each in others.items():
        held, ttft_s = seen[name]
        assert each.held_blocks == held
        assert each.ttft_s == pytest.approx(ttft_s, rel=1e-9, abs=1e-9)
    assert said.chosen.held_blocks == seen[said.chosen.instance_id][0]
    times = [each.ttft_s for each in said.others]
    assert times == pytest.approx(sorted(times), abs=1e-8)
    left = sorted(seen[name][1] for name in seen if name != said.chosen.instance_id)
    assert times[0] == pytest.approx(left[0], rel=1e-9, abs=1e-8), "the soonest of the others is among them"


def test_the_words():
    fleet = make_fleet(("a", MIXED), ("b", MIXED))
    hold(fleet, "a", range(10))
    fleet.learn_prefills(member(fleet, "a"), [(1000, 0, 0.1)], 0.0)
    fleet.set_load(member(fleet, "b"), InstanceLoad(pending_prefill_tokens=15_000), 0.0)
    request = PlacementRequest("r", "m", 16 * 12, keys(*range(12)), 8)
    said, _ = decide(fleet, "min_ttft", request)
    because = "went to a because min_ttft chose it: it holds 10 of 12 blocks and nobody waits there, first token in "
    assert said.because.startswith(because)
    assert "; b would have taken 1.5 s (queue 1.4 s, holds 0 of 12 blocks)" in said.because


def test_prompt_shorter_than_a_block_is_said_to_be_that():
    fleet = make_fleet(("a", MIXED), ("b", MIXED))
    said, _ = decide(fleet, "min_ttft", PlacementRequest("r", "m", 7, b"", 8))
    assert (
        "because min_ttft chose it: it holds no block (the prompt is shorter than one) and nobody waits there"
        in said.because
    )
    assert "of 0 blocks" not in said.because


def test_what_its_decoding_shares_is_said():
    fleet = make_fleet(("p", PREFILL), ("d", DECODE))
    shared = (SharedPrefix(keys(*range(10))[-16:], 10, 3),)
    fleet.set_load(member(fleet, "d"), InstanceLoad(running_requests=3, level_blocks=4, shared=shared), 0.0)
    said, _ = decide(fleet, "min_ttft", PlacementRequest("r", "m", 16 * 12, keys(*range(12)), 8))
    words = "(decodes on d beside others that begin with the same 160 of 192 tokens, whose KV is read once)"
    assert words in said.because


def test_one_that_is_not_the_soonest_was_chosen_by_its_policy():
    fleet = make_fleet(("a", MIXED), ("b", MIXED))
    fleet.set_load(member(fleet, "a"), InstanceLoad(pending_prefill_tokens=15_000), 0.0)
    said, _ = decide(fleet, "round_robin", PlacementRequest("r", "m", 33, keys(1, 2), 8))
    assert said.because.startswith(
        "went to a because round_robin chose it: it holds 0 of 2 blocks and 1.5 s of others'"
    )


def test_equal_ones_are_said_to_be_equal():
    fleet = make_fleet(("a", MIXED), ("b", MIXED))
    said, _ = decide(fleet, "min_ttft", PlacementRequest("r", "m", 33, keys(1, 2), 8))
    assert said.because.endswith("; b would have taken as long")


def test_a_pair_is_named():
    fleet = make_fleet(*((f"i{number}", MIXED) for number in range(40)))
    for number in range(40):
        hold(fleet, f"i{number}", range(number % 3))
    said, _ = decide(fleet, "dualmap", PlacementRequest("r", "m", 49, keys(1, 2, 3), 8))
    assert said.could == 40
    assert len(said.others) == CANDIDATES_MAX
    assert "because of the pair of its prefix, " in said.because
    other = said.because.partition(" and ")[2].partition(",")[0]
    assert other in [each.instance_id for each in said.others]


def queues():
    """Returns a fleet in which a token takes 0.1 ms.

    At ``a`` seven prompts wait, 4 s each; the prompt being computed at ``b`` takes 6 s more."""
    fleet = make_fleet()
    for name in "ab":
        fleet.join(info(name, MIXED, short_first=True, max_context_tokens=0, capacity_blocks=0), 0.0)
        member(fleet, name).prefill_model = KnownPrefillCost((0.0, 1e-4, 0.0))
        member(fleet, name).learned()
    for _ in range(7):
        fleet.loads.count(member(fleet, "a").row, 4_000_000)
    fleet.loads.ends_s[member(fleet, "b").row] = 7.0
    return fleet


def test_the_time_of_others_is_said_where_it_decided():
    said, _ = decide(queues(), "pinyon:pair=false", PlacementRequest("r", "m", 10_000, b"", 8))
    assert said.because == (
        "went to b because pinyon counts what others lose, too: it holds 0 of 625 blocks and 6.0 s of others' work "
        "waits there, first token in 7.0 s; "
        "a would have taken 1.0 s (holds 0 of 625 blocks, others would have lost 7.0 s)"
    )
    (other,) = said.others
    assert (other.others_s, other.about) == (pytest.approx(7.0), False)


@pytest.mark.parametrize(
    ("decoding", "because"),
    [
        (
            1,
            "went to a because it holds 0 of 62 blocks and nobody waits there, first token in 200 ms, others lose 6 ms",
        ),
        (3, "went to b because pinyon counts what others lose, too: it holds 0 of 62 blocks and nobody waits there, "),
    ],
)
def test_what_decodes_lose_is_a_reason_only_where_it_decided(decoding: int, because: str) -> None:
    fleet = make_fleet(("a", MIXED), ("b", MIXED))
    fleet.together = True
    for name, token_s in (("a", 2e-4), ("b", 2.1e-4)):
        member(fleet, name).prefill_model = KnownPrefillCost((0.0, token_s, 0.0))
        member(fleet, name).learned()
    member(fleet, "a").decodes_changed(decoding, 0)
    said, _ = decide(fleet, "pinyon:pair=false", PlacementRequest("r", "m", 1000, b"", 8))
    assert said.because.startswith(because)


def test_the_limit_is_named_where_it_decided():
    said, _ = decide(queues(), "pinyon:pair=false", PlacementRequest("r", "m", 10_000, b"", 8, ttft_slo_s=5.0))
    assert said.because == (
        "went to a because b, which costs least, would have been late: it holds 0 of 625 blocks and nobody waits "
        "there, first token in 1.0 s, others lose 7.0 s; b would have taken 7.0 s (queue 6.0 s, holds 0 of 625 blocks)"
    )


def test_the_pair_is_named_where_it_decided():
    fleet = make_fleet(("a", MIXED), ("b", MIXED), ("c", MIXED))
    request_id = id_of_pair(fleet, {1, 2})
    said, _ = decide(fleet, "pinyon", PlacementRequest(request_id, "m", 33, b"", 8))
    assert said.because.startswith(("went to b because of the pair of its prefix: it", "went to c because of the pair"))
    assert "; a would have taken " in said.because


def test_a_fetch_that_nobody_looked_into_takes_about_as_long():
    """Twenty equal instances all seem to fetch; the planner looks at one of them, which is chosen."""
    fleet = make_fleet(*((f"i{number:02}", MIXED) for number in range(20)), ("s", STORE))
    hold(fleet, "s", range(40))
    for number in range(20):
        fleet.learn_prefills(member(fleet, f"i{number:02}"), [(1000, 0, 10.0)], 0.0)
    said, _ = decide(fleet, "pinyon:pair=false", PlacementRequest("r", "m", 16 * 40 + 5, keys(*range(40)), 8))
    assert said.chosen is not None
    assert (said.chosen.fetched_blocks, said.chosen.about) == (40, False)
    assert {each.about for each in said.others} == {True}
    assert "would have taken about " in said.because


def test_a_refusal_says_who_would_have_been_the_one():
    fleet = make_fleet(("a", MIXED), ("b", MIXED))
    for name in ("a", "b"):
        fleet.set_load(member(fleet, name), InstanceLoad(pending_prefill_tokens=90_000), 0.0)
    said, _ = decide(fleet, "min_ttft", PlacementRequest("r", "m", 33, keys(1, 2), 8, ttft_slo_s=2.0))
    assert said.because.startswith("refused: predicted time to first token 9.0")
    assert said.because.endswith(
        "a would have been the one: it holds 0 of 2 blocks and 9.0 s of others' work waits there"
    )
    assert not said.probe


def test_a_probe_is_called_one():
    fleet = make_fleet(("a", MIXED))
    fleet.learn_prefills(member(fleet, "a"), [(1000, 0, 100.0)], 0.0)
    said, _ = decide(fleet, "min_ttft", PlacementRequest("r", "m", 1000, b"", 8, ttft_slo_s=1.0), now_s=100.0)
    assert said.probe
    assert said.because.startswith("went to a although it was predicted to be late")


def test_what_never_came_to_a_policy():
    said, _ = decide(make_fleet(("a", MIXED)), "min_ttft", PlacementRequest("r", "none", 33))
    assert said == Explanation("refused: no instance serves the model 'none'", None, (), 0, False)


def test_a_probe_is_explained_by_the_instances_that_were_due():
    fleet = make_fleet(*((name, MIXED) for name in "abc"))
    for name in "abc":
        fleet.learn_prefills(member(fleet, name), [(1000, 0, 100.0)], 0.0)
    for name in "ab":  # busy instances get no trials
        fleet.set_load(member(fleet, name), InstanceLoad(pending_prefill_tokens=100), 0.0)
    said, _ = decide(fleet, "pinyon", PlacementRequest("r", "m", 1000, b"", 8, ttft_slo_s=1.0), now_s=100.0)
    assert said.probe
    assert said.chosen is not None
    assert (said.chosen.instance_id, said.could) == ("c", 1)
