"""DualMap as a conductor runs it: by small blocks, with retried requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.block_keys import pack_keys
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.dualmap import DualMap, DualMapSettings, Hotness
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from tests.unit.placement.conftest import info, key, make_fleet

TOKEN_S = 127e-6


def fleet_of(models: dict[str, int], block_tokens: int = 512, context_tokens: int = 0) -> Fleet:
    """Returns a fleet with this many instances of each model, which hold nothing."""
    fleet = make_fleet(inflight_max=10_000)
    layout = KvLayout(1, 1, 1, block_tokens, "float16")
    limits = {"capacity_blocks": 0, "max_context_tokens": context_tokens, "layout": layout}
    for model, count in models.items():
        for number in range(count):
            name = f"{model}-{number}"
            state = fleet.join(info(name, Role.MIXED, model=model, model_fingerprint=model, **limits), 0.0)
            state.prefill_model = KnownPrefillCost((0.0, TOKEN_S, 0.0))
            state.learned()
            fleet.index.apply_snapshot(state, 0, b"", first=True, last=True)
    return fleet


def ask(name: object, blocks: Sequence[int], model: str = "m", block_tokens: int = 512, **changes) -> PlacementRequest:
    """Returns a request. Its block numbers stand for chained keys: whoever changes one changes all behind it."""
    packed = pack_keys([key(block) for block in blocks])
    return PlacementRequest(str(name), model, len(blocks) * block_tokens + 1, packed, 1, **changes)


def pair(decision: PlacementDecision) -> frozenset[str]:
    assert decision.alternate is not None
    return frozenset((decision.prefill.info.instance_id, decision.alternate.info.instance_id))


def new(policy: str, fleet: Fleet) -> Scheduler:
    return Scheduler(fleet, PLACEMENT_POLICIES.make(policy))


def chained(blocks: Sequence[int], per: int) -> list[int]:
    """Returns the same text in smaller blocks: ``per`` for each block, of which the last has the block's number."""
    return [block if part == per - 1 else (block << 20) + part for block in blocks for part in range(per)]


@pytest.mark.parametrize("policy", ["dualmap", "cache_affinity"])
@given(
    texts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=40, max_size=80),
    per=st.sampled_from((2, 16, 32)),
)
@settings(max_examples=30, deadline=None)
def test_prompts_go_where_they_go_by_blocks_of_512(policy: str, texts: list[list[int]], per: int) -> None:
    """The instances' block size does not matter: their keys say the same in smaller steps."""
    large, small = fleet_of({"m": 5}), fleet_of({"m": 5}, 512 // per)
    by_large, by_small = new(policy, large), new(policy, small)
    for number, text in enumerate(texts):
        prefixes = [int("".join(map(str, text[: end + 1]))) for end in range(len(text))]
        one = by_large.decide(ask(number, prefixes), 0.0)
        two = by_small.decide(ask(number, chained(prefixes, per), block_tokens=512 // per), 0.0)
        assert one.prefill.info.instance_id == two.prefill.info.instance_id
        if policy == "dualmap":
            assert pair(one) == pair(two)


@pytest.mark.parametrize("policy", ["dualmap", "cache_affinity:key_blocks=1"])
def test_a_prompt_of_whole_units_keeps_its_place_when_it_grows(policy: str) -> None:
    scheduler, where = new(policy, fleet_of({"m": 8}, 32)), set()
    for blocks in range(16, 400, 50):
        where.add(scheduler.decide(ask(blocks, range(1, blocks + 1), block_tokens=32), 0.0).prefill.info.instance_id)
        where.add(scheduler.decide(ask(-blocks, range(1, 17), block_tokens=32), 0.0).prefill.info.instance_id)
    assert len(where) <= 2


@pytest.mark.parametrize("shared_tokens", [2048, 9216])
def test_what_all_prompts_share_is_told_apart_soon(shared_tokens: int) -> None:
    """The prompts are a system prompt, and then a user's own text, in blocks of 32 tokens."""
    scheduler, pairs = new("dualmap", fleet_of({"m": 8}, 32)), set()
    for number in range(600):
        blocks = [*range(shared_tokens // 32), *range(10**6 + 40 * number, 10**6 + 40 * number + 8)]
        decision = scheduler.decide(ask(number, blocks, block_tokens=32), 0.0)
        if number >= 450:
            pairs.add(pair(decision))
    assert len(pairs) > 20


@pytest.mark.parametrize("gone", ["excluded", "disconnected", "too small"])
def test_instances_that_one_request_cannot_have_count(gone: str) -> None:
    """The text calls 2 / n hot and 1 / n cold: counted in a pool of one instance, everything would be cold."""
    fleet, policy = fleet_of({"m": 7}, context_tokens=50_000), DualMap(DualMapSettings(hotness=Hotness.TEXT))
    layout = fleet.pools("m")[0].layout
    fleet.join(
        info("m-7", Role.MIXED, model_fingerprint="m", layout=layout, capacity_blocks=0, max_context_tokens=0), 0.0
    )
    scheduler = Scheduler(fleet, policy)
    for number in range(200):
        scheduler.decide(ask(number, [1 if number % 5 < 3 else 10**6 + number, 100 + number]), number * 0.01)
    (tree,) = (each.tree for each in policy._pairs._rings._of_group.values())
    before = dict(tree._extended)
    assert before
    most = frozenset(f"m-{number}" for number in range(7))
    if gone == "disconnected":
        for name in most:
            fleet.set_connected(fleet.get(name), False)
        most = frozenset()
    tokens = 1025
    if gone == "too small":
        tokens, most = 100_000, frozenset()
    scheduler.decide(replace(ask("x", [1, 2000], exclude=most), prompt_tokens=tokens), 2.01)
    assert tree._extended == before


@pytest.mark.parametrize("policy", ["dualmap", "cache_affinity"])
def test_the_turns_of_a_short_conversation_stay_together(policy: str) -> None:
    """A conversation has 4 to 24 blocks of 16 tokens, so less than 512 tokens, and no prefix is hot."""
    scheduler = new(policy, fleet_of({"m": 8}, block_tokens=16))
    where: dict[int, set[str]] = {}
    for turn in range(1, 7):
        for chat in range(60):
            blocks = range(1000 * (chat + 1), 1000 * (chat + 1) + 4 * turn)
            decision = scheduler.decide(ask(f"{chat}.{turn}", blocks, block_tokens=16), 0.0)
            where.setdefault(chat, set()).add(decision.prefill.info.instance_id)
    assert {len(each) for each in where.values()} == {1}


def test_what_is_too_slow_at_one_goes_to_the_other() -> None:
    fleet = fleet_of({"m": 2})
    fleet.together = True
    slow = fleet.get("m-0")
    for _ in range(60):
        slow.decode_model.observe(1, 0, 0.2)
        fleet.get("m-1").decode_model.observe(1, 0, 0.01)
    scheduler = new("dualmap", fleet)
    found = {scheduler.decide(ask(n, [n + 1], tbt_slo_s=0.05), 0.0).prefill.info.instance_id for n in range(20)}
    assert found == {"m-1"}


def test_nothing_moves_to_where_there_is_no_memory() -> None:
    """The pair's other instance gains by Eq. 6, but for the wait that it reports."""

    def moved(room_wait_ms: float) -> int:
        fleet = fleet_of({"m": 2})
        fleet.together = True
        scheduler = new("dualmap:slo_s=8", fleet)
        here, there = fleet.get("m-0"), fleet.get("m-1")
        for state, tokens in ((here, 0), (there, 32_000)):
            busy = PlacementDecision(state, state, prefill_s=tokens * TOKEN_S)
            fleet.inflight.add(f"before {state.info.instance_id}", busy, 0, 0.0)
        for number in range(8):
            request = ask(f"w{number}", range(100 * number + 1, 100 * number + 21))
            decision = scheduler.decide_at(request, here, there, 0.0)
            fleet.inflight.add(request.request_id, decision, 0, 0.0, b"", request)
        fleet.set_load(there, InstanceLoad(room_wait_ms=room_wait_ms), 0.0)
        last = ask("last", [1])
        decision = scheduler.decide_at(last, here, there, 0.0)
        return len(scheduler.moves(last, decision, fleet.inflight.waiting, 0.0))

    assert moved(0.0) > 0
    assert moved(60_000.0) == 0
