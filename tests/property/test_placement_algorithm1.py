"""Mooncake's Algorithm 1 against a second implementation, line by line over sets of keys."""

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.errors import Rejected
from pinyon.core.request import Role
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon_lab.policies.placement import Algorithm1, Algorithm1Settings
from tests.long import usually
from tests.unit.placement.conftest import LAYOUT, hold, info, keys, make_fleet, member

BLOCK = LAYOUT.block_tokens
PREFILL_NAMES = ("p0", "p1", "p2")
ALL_NAMES = (*PREFILL_NAMES, "d0", "s0", "s1")
INF = math.inf


@dataclass(frozen=True)
class Case:
    prompt_tokens: int
    holders: dict[str, frozenset[int]]
    queued_tokens: tuple[int, int, int]
    speeds: tuple[float, float, float]  # s/token
    bandwidth: float  # bytes/s
    threshold: float
    exclude: frozenset[str]


@st.composite
def cases(draw) -> Case:
    blocks = draw(st.integers(0, 12))
    prompt = blocks * BLOCK + draw(st.integers(1 if blocks == 0 else 0, BLOCK - 1))
    holders = {}
    for name in ALL_NAMES:
        prefix = range(draw(st.integers(0, blocks)))
        odd = draw(st.sets(st.integers(0, max(0, blocks - 1)), max_size=3)) if blocks else set()
        holders[name] = frozenset(set(prefix) ^ odd)
    return Case(
        prompt,
        holders,
        draw(st.tuples(*[st.sampled_from((0, 0, 100, 1000))] * 3)),
        draw(st.tuples(*[st.sampled_from((1e-5, 1e-4, 1e-3))] * 3)),
        draw(st.sampled_from((1e5, 1e7, 1e9, 1e12))),
        draw(st.sampled_from((1.0, 1.5, 2.0, 4.0, 100.0))),
        frozenset(draw(st.sets(st.sampled_from(ALL_NAMES), max_size=2)) - {"d0", "p2"}),
    )


@cache
def taught(speed: float, bandwidth: float):
    """Returns the models of an instance that prefills and transfers at these rates."""
    state = member(make_fleet(("p0", Role.PREFILL)), "p0")
    for tokens in (64, 512, 4096):
        for _ in range(20):
            state.prefill_model.observe(tokens, 0, speed * tokens)
            state.transfer_model.observe(tokens * 1000, tokens * 1000 / bandwidth)
    return state.prefill_model, state.transfer_model


def reach(held: frozenset[int], at: int, end: int) -> int:
    """Returns the end of the run of held blocks that begins at ``at``."""
    while at < end and at in held:
        at += 1
    return at


def algorithm_1(case: Case, fleet) -> dict[str, tuple[float, int, int]]:
    """Returns per prefill instance (TTFT, local blocks, prefix blocks) as in lines 3 to 13."""
    usable = (case.prompt_tokens - 1) // BLOCK
    everyone = [name for name in ALL_NAMES if name not in case.exclude]
    result = {}
    for name in PREFILL_NAMES:
        if name in case.exclude:
            continue
        state = member(fleet, name)
        local = 0
        while local < usable and local in case.holders[name]:
            local += 1
        best_len = local
        while best_len < usable and any(best_len in case.holders[other] for other in everyone if other != name):
            best_len += 1

        def total(prefix: int, state=state, local=local, name=name) -> tuple[float, int]:
            transfer_s, at = 0.0, local
            while at < prefix:  # consecutive spans, each as long as possible
                end = max(reach(case.holders[other], at, prefix) for other in everyone if other != name)
                transfer_s += state.transfer_model.predict_s((end - at) * LAYOUT.block_bytes)
                at = end
            return transfer_s + state.prefill_model.predict_s(case.prompt_tokens, prefix * BLOCK), prefix

        ratio = best_len / local if local else (INF if best_len else 0)
        execution_s, prefix_len = total(local)
        if ratio > case.threshold and total(best_len)[0] < execution_s:
            execution_s, prefix_len = total(best_len)
        queue_s = state.prefill_model.backlog_s(state.load.pending_prefill_tokens)
        result[name] = (queue_s + execution_s, local, prefix_len)
    return result


def fleet_of(case: Case):
    fleet = make_fleet(
        *((name, Role.PREFILL) for name in PREFILL_NAMES), ("d0", Role.DECODE), ("s0", Role.STORE), ("s1", Role.STORE)
    )
    for name in ALL_NAMES:
        hold(fleet, name, sorted(case.holders[name]))
    for name, tokens, speed in zip(PREFILL_NAMES, case.queued_tokens, case.speeds, strict=True):
        state = member(fleet, name)
        fleet.set_load(state, InstanceLoad(pending_prefill_tokens=tokens), 0.0)
        prefill_model, transfer_model = taught(speed, case.bandwidth)
        state.prefill_model.copy_from(prefill_model)
        state.transfer_model.copy_from(transfer_model)
        state.learned()
    return fleet


def literal(case: Case, fleet) -> tuple[float, str, int, str]:
    """Computes lines 3 to 16 and 20 as printed: (TTFT, p, prefix_len, best_instance)."""
    usable = (case.prompt_tokens - 1) // BLOCK
    names = [name for name in PREFILL_NAMES if name not in case.exclude]
    prefix_lens = {}
    for name in names:
        prefix_lens[name] = 0
        while prefix_lens[name] < usable and prefix_lens[name] in case.holders[name]:
            prefix_lens[name] += 1
    best_instance = max(names, key=lambda name: prefix_lens[name])
    best_len = prefix_lens[best_instance]
    ttft, p, length = INF, "", 0
    for name in names:
        state, prefix_len, t_transfer = member(fleet, name), prefix_lens[name], 0.0
        if (best_len / prefix_len if prefix_len else (INF if best_len else 0)) > case.threshold:
            transfer_len = best_len - prefix_len
            prefix_len = best_len
            t_transfer = state.transfer_model.predict_s(transfer_len * LAYOUT.block_bytes)
        t_queue = state.prefill_model.backlog_s(state.load.pending_prefill_tokens)
        t_prefill = state.prefill_model.predict_s(case.prompt_tokens, prefix_len * BLOCK)
        if ttft > t_transfer + t_queue + t_prefill:
            ttft, p, length = t_transfer + t_queue + t_prefill, name, prefix_len
    return ttft, p, length, best_instance


@given(cases())
@settings(max_examples=usually(25, long=300))
def test_the_literal_choice_is_the_printed_one(case):
    fleet = fleet_of(case)
    ttft_s, name, prefix_len, best_instance = literal(case, fleet)
    block_keys = keys(*range(case.prompt_tokens // BLOCK))
    request = PlacementRequest("r", "m", case.prompt_tokens, block_keys, max_tokens=8, exclude=case.exclude)
    decision = Scheduler(fleet, Algorithm1(Algorithm1Settings(case.threshold))).schedule(request, 0.0)
    assert decision.ttft_s == pytest.approx(ttft_s)
    assert (decision.prefill.info.instance_id, decision.reused_blocks) == (name, prefix_len)
    assert {span.source.info.instance_id for span in decision.fetches} <= {best_instance}
    strict = replace(request, ttft_slo_s=ttft_s * 0.999)
    with pytest.raises(Rejected):
        Scheduler(fleet, Algorithm1(Algorithm1Settings(case.threshold))).schedule(strict, 0.0)


@given(cases())
@settings(max_examples=usually(25, long=300))
def test_the_choice_is_algorithm_1s(case):
    fleet = fleet_of(case)
    expected = algorithm_1(case, fleet)
    request = PlacementRequest(
        "r", "m", case.prompt_tokens, keys(*range(case.prompt_tokens // BLOCK)), max_tokens=8, exclude=case.exclude
    )
    decision = Scheduler(fleet, KvCacheCentric(KvCacheCentricSettings(case.threshold))).schedule(request, 0.0)

    ttft_s, local, prefix = expected[decision.prefill.info.instance_id]
    assert decision.ttft_s == pytest.approx(min(ttft for ttft, _, _ in expected.values()))
    assert decision.ttft_s == pytest.approx(ttft_s)
    assert decision.local_blocks == local
    assert decision.reused_blocks == prefix
    # The plan: consecutive spans behind the local blocks, every block from an allowed holder.
    at = local
    for span in decision.fetches:
        source = span.source.info.instance_id
        assert span.first_block == at
        assert span.block_count > 0
        assert source not in case.exclude
        assert source != decision.prefill.info.instance_id
        assert set(range(at, at + span.block_count)) <= case.holders[source]
        at += span.block_count
    assert at == prefix
    # Lines 18 and 19: with a limit just below the best time the same request is rejected.
    fleet.inflight.release("r")
    strict = PlacementRequest(
        "r", "m", case.prompt_tokens, request.block_keys, 8, decision.ttft_s * 0.999, exclude=case.exclude
    )
    with pytest.raises(Rejected):
        Scheduler(fleet, KvCacheCentric(KvCacheCentricSettings(case.threshold))).schedule(strict, 0.0)
    assert fleet.inflight.prefills == fleet.inflight.decodes == 0


ACTIONS = ["place", "release", "computing", "prefilled", "ended", "expire", "leave"]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(ACTIONS))))
@settings(max_examples=usually(20, long=100))
def test_what_is_in_flight_returns_to_exactly_zero(steps):
    fleet = make_fleet(("p0", Role.PREFILL), ("x0", Role.MIXED), ("d0", Role.DECODE), ("s0", Role.STORE))
    hold(fleet, "s0", range(20))
    scheduler = Scheduler(fleet, KvCacheCentric())
    now_s = 0.0
    for number, action in steps:
        now_s += 1.0
        name = f"r{number}"
        if action == "place":
            scheduler.schedule(PlacementRequest(name, "m", 16 * (number % 20) + 1, keys(*range(number % 20)), 7), now_s)
        elif action == "release":
            fleet.inflight.release(name)
        elif action == "expire":
            fleet.inflight.expire(now_s)
        elif action == "leave":
            left = ("p0", "x0", "d0")[number % 3]
            fleet.join(info(left, member(fleet, left).info.role, boot=str(now_s)), now_s)
        else:
            for state in fleet.instances():
                if action == "computing":
                    fleet.inflight.begin_prefill(name, state, now_s)
                elif action == "prefilled":
                    fleet.inflight.end_prefill(name, state, now_s)
                else:
                    fleet.inflight.end_decode(name, state)
        fleet.inflight.check_integrity()
    assert all(state.queued_prefill_us >= 0 for state in fleet.instances())
    fleet.inflight.expire(now_s + 1000.0)
    assert fleet.inflight.prefills == fleet.inflight.decodes == 0
    for state in fleet.instances():
        assert state.queued_prefill_us == state.computing == state.inflight_decodes == 0
        assert state.prefill_queue_s(now_s) == 0.0
        assert state.inflight_decode_blocks == state.inflight_reads == 0
