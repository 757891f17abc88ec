"""Small cases of a simulated instance whose times can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.scaling import ScalingSettings
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule
from pinyon_lab.simulator.report import RequestOutcome, cluster_report
from pinyon_lab.simulator.workload import Arrival
from tests.simulation.leftovers import check_cluster

BLOCK = 16
ENGINE = EngineProfile("s", "", "", 0.0, 1e-3, 0.0, 5e-3, 1e-4, 2e-8)
MACHINE = MachineProfile("s", "", "", "tiny", 1000, 1, 0, 1e6, 1e12, 1e9)
"""A machine with 1,000 bytes of KV per token and 1 MB/s from the host's memory."""


def cluster(*roles: Role, policy: str = "min_ttft", **changes: object) -> SimCluster:
    settings = replace(ClusterSettings(roles, BLOCK, 1 << 14), **changes)  # type: ignore[arg-type]
    return SimCluster(settings, MACHINE, ENGINE, PLACEMENT_POLICIES.make(policy))


def ask(when_s: float, blocks: range, output_tokens: int = 2) -> Arrival:
    return Arrival(when_s, len(blocks) * BLOCK, output_tokens, tuple(blocks), NO_TRAITS)


def predictions(of: SimCluster, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list that gets the predicted TTFT of each attempt."""
    predicted: list[float] = []
    make = of._attempt

    def noted(request, number, job, decision) -> None:
        predicted.append(decision.ttft_s)
        make(request, number, job, decision)

    monkeypatch.setattr(of, "_attempt", noted)
    return predicted


@pytest.mark.parametrize("chunk_tokens", [4096, 64])
def test_what_a_pipeline_takes_for_a_prompt_is_what_is_learned(chunk_tokens: int, monkeypatch) -> None:
    of = cluster(Role.PREFILL, Role.DECODE, pipeline=4, chunk_tokens=chunk_tokens, step_tokens=chunk_tokens)
    predicted = predictions(of, monkeypatch)
    outcomes = of.run([ask(10.0 * number, range(100 * number, 100 * number + 60)) for number in range(12)])
    for each, seconds in list(zip(outcomes, predicted, strict=True))[4:]:
        assert seconds == pytest.approx(each.ttft_s, rel=0.1)
        assert each.prefill_s == pytest.approx(each.ttft_s, rel=0.1)
    whole_s = 60 * BLOCK * 1e-3
    assert outcomes[-1].ttft_s == pytest.approx(
        whole_s if chunk_tokens == 4096 else (15 + 3) / 15 / 4 * whole_s, rel=0.1
    )


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("blocks", [16, 32, 128])
def test_a_pipelines_queue_is_as_long_as_its_first_node_is_busy(stages: int, blocks: int, monkeypatch) -> None:
    """Bursts of prompts of one, two and eight chunks take (chunks + stages - 1) times one chunk on one node."""
    of = cluster(Role.PREFILL, Role.DECODE, pipeline=stages, chunk_tokens=256, step_tokens=256)
    predicted = predictions(of, monkeypatch)
    bursts = [1000.0 * burst + 1e-4 * place for burst in range(4) for place in range(12)]
    outcomes = of.run([ask(when_s, range(n * 1000, n * 1000 + blocks)) for n, when_s in enumerate(bursts)])
    part_s, each_s = 256 * 1e-3 / stages, blocks * BLOCK * 1e-3 / stages
    for place, (seen, seconds) in enumerate(zip(outcomes[-12:], predicted[-12:], strict=True)):
        expected_s = (place + 1) * each_s + (stages - 1) * part_s
        assert seen.ttft_s == pytest.approx(expected_s, rel=0.01)
        assert seconds == pytest.approx(expected_s, rel=0.05)
        assert seen.prefill_s == pytest.approx(each_s + (stages - 1) * part_s, rel=0.01)


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_short_prompts_pass_through_a_pipeline_together(blocks: int, monkeypatch) -> None:
    """A step has up to eight prompts in 256 tokens and takes 64 ms on each node; predictions err by two steps."""
    of = cluster(Role.PREFILL, Role.DECODE, pipeline=4, chunk_tokens=256, step_tokens=256)
    predicted = predictions(of, monkeypatch)
    bursts = [1000.0 * burst + 1e-4 * place for burst in range(4) for place in range(40)]
    outcomes = of.run([ask(when_s, range(n * 1000, n * 1000 + blocks)) for n, when_s in enumerate(bursts)])
    for seen, seconds in zip(outcomes[-20:], predicted[-20:], strict=True):
        assert seconds == pytest.approx(seen.ttft_s, abs=0.128)


def test_nobody_waits_for_what_has_left_the_first_node() -> None:
    """The prompts have 256 tokens and cross four nodes, 64 ms each."""
    of = cluster(Role.PREFILL, Role.DECODE, pipeline=4, chunk_tokens=256, step_tokens=256)
    state, queues_s = of.members.engines["prefill-0000"].state, list[float]()
    for number in range(5, 30):
        of.time.at(10.0 * number + 0.07, lambda: queues_s.append(state.prefill_queue_s(of.time.now_s)))
    outcomes = of.run([ask(10.0 * number, range(100 * number, 100 * number + 16)) for number in range(30)])
    assert outcomes[-1].ttft_s == pytest.approx(0.256, rel=0.01)
    assert queues_s == [0.0] * 25


@pytest.mark.parametrize("stages", [1, 2])
def test_a_group_of_nodes_holds_what_all_of_them_have_room_for(stages: int) -> None:
    """The prompts are two of 12 blocks, of which one node has room for 18, and the first prompt again."""
    of = cluster(Role.PREFILL, Role.DECODE, pipeline=stages, hbm_tokens=18 * BLOCK, pool_tokens=50 * BLOCK)
    outcomes = of.run([ask(0.0, range(12)), ask(10.0, range(100, 112)), ask(20.0, range(12))])
    assert (outcomes[2].hit_tokens == 11 * BLOCK) == (stages > 1)
    prefill, decode = of.members.engines["prefill-0000"], of.members.engines["decode-0001"]
    assert (prefill.state.info.capacity_blocks, decode.state.info.capacity_blocks) == (stages * 18, 18)
    of.run([ask(of.time.now_s, range(1000 * number, 1000 * number + 10)) for number in range(1, 20)])
    assert len(of.members.stores["store-prefill-0000"].cache.resident) == stages * 50


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("on_ssd", [False, True])
def test_each_node_of_a_group_reads_its_part_of_the_pool(stages: int, on_ssd: bool) -> None:
    """The group reads 0.96 MB at 1 MB/s from each host's memory, or first at 0.5 MB/s from its SSDs."""
    settings = ClusterSettings((Role.PREFILL, Role.DECODE), BLOCK, 64 * BLOCK, pipeline=stages)
    settings = replace(settings, pool_tokens=1 << 16, pool_on_ssd=on_ssd)
    slow, machine = replace(ENGINE, prefill_token_s=0.1), replace(MACHINE, ssd_bytes_s=5e5)
    of = SimCluster(settings, machine, slow, PLACEMENT_POLICIES.make("kvcache_centric"))
    others = [ask(1000.0 * number, range(1000 * number, 1000 * number + 61)) for number in range(1, 7)]
    seen = of.run([ask(0.0, range(61)), *others, ask(10_000.0, range(61))])[-1]
    assert (seen.hit_tokens, seen.fetched_tokens) == (0, 60 * BLOCK)
    read_s = seen.fetched_tokens * 1000 / stages * (1e-6 + 2e-6 * on_ssd)
    assert seen.ttft_s == pytest.approx(read_s + BLOCK * 0.1, rel=0.01)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_group_of_nodes_swaps_with_all_of_them(stages: int) -> None:
    """HBM has no room for 40 blocks of 16,000 B: they return from the tier below at 1 MB/s for each node."""
    of = cluster(Role.PREFILL, Role.DECODE, pipeline=stages, hbm_tokens=48 * BLOCK, dram_tokens=1 << 12)
    prompts = [ask(100.0 * number, range(1000 * number, 1000 * number + 41)) for number in range(6)]
    seen = of.run([*prompts, ask(1000.0, range(41))])[-1]
    assert seen.hit_tokens == 40 * BLOCK
    assert seen.ttft_s >= 40 * 16_000 / 1e6 / stages + BLOCK * 1e-3
    assert seen.ttft_s <= 2 * 41 * 16_000 / 1e6 / stages + BLOCK * 1e-3, "as much goes down"


def test_reads_from_the_hosts_memory_share_its_bandwidth() -> None:
    """Eight prompts have 60 pooled blocks each, 0.96 MB."""
    of = cluster(Role.MIXED, policy="kvcache_centric", hbm_tokens=64 * 10 * BLOCK, pool_tokens=1 << 16)
    prompts = [range(1000 * number, 1000 * number + 61) for number in range(8)]
    first = [ask(10.0 * number, blocks) for number, blocks in enumerate(prompts)]
    other = [ask(100.0 + 10.0 * number, range(9000 + 100 * number, 9061 + 100 * number)) for number in range(12)]
    outcomes = of.run([*first, *other, *(ask(1000.0, blocks) for blocks in prompts)])
    fetched = [each for each in outcomes[-8:] if each.fetched_tokens]
    assert len(fetched) >= 4
    took_s = max(each.ttft_s for each in fetched)
    assert took_s >= sum(each.fetched_tokens for each in fetched) * MACHINE.kv_token_bytes / MACHINE.dram_bytes_s


@pytest.mark.parametrize("chunk_tokens", [64, 4096])
def test_a_prompt_uses_its_blocks_once_however_it_is_cut(chunk_tokens: int) -> None:
    of = cluster(
        Role.MIXED,
        hbm_tokens=64 * BLOCK,
        pool_tokens=44 * BLOCK,
        pool_eviction="lfu",
        step_tokens=chunk_tokens,
        chunk_tokens=chunk_tokens,
    )
    hot = [ask(10.0 * number, range(1000, 1005)) for number in range(6)]
    of.run([*hot, ask(100.0, range(40)), ask(200.0, range(2000, 2005))])
    (store,) = of.members.stores.values()
    held = store.cache.resident
    assert set(range(1000, 1005)) <= held, "used six times"
    assert set(range(2000, 2005)) <= held, "as often as those before it, and later"


@pytest.mark.parametrize("seed", range(4))
def test_no_more_is_reused_than_there_is_where_requests_give_way(seed: int) -> None:
    of = cluster(Role.MIXED, Role.MIXED, policy="kvcache_centric", hbm_tokens=14 * BLOCK, pool_tokens=1 << 14)
    blocks = [range(100 * (number % 5), 100 * (number % 5) + 5) for number in range(24)]
    outcomes = of.run([ask(0.02 * number, each, 30 + 90 * ((number + seed) % 2)) for number, each in enumerate(blocks)])
    check_cluster(of)
    assert all(each.hit_tokens + each.fetched_tokens <= each.tokens for each in outcomes if each.attempts == 1)


def test_who_goes_waits_for_what_was_placed_there() -> None:
    scaling = ScalingSettings(1, 2, hold_s=0.0, settle_s=0.1, between_s=1.0, idle_window_s=2.0)
    of = cluster(
        Role.PREFILL, Role.PREFILL, Role.DECODE, policy="random", hbm_tokens=12 * BLOCK, scaling=scaling, boot_s=1.0
    )
    requests = [ask(0.1 * number, range(100 * number, 100 * number + 5), 100) for number in range(12)]
    outcomes = of.run(requests)
    check_cluster(of)
    assert of.elasticity is not None
    assert len(of.elasticity.sizes) > 1
    assert {(each.attempts, each.end) for each in outcomes} == {(1, "finished")}


def test_many_who_wait_may_be_refused_at_once() -> None:
    of = cluster(Role.MIXED, front_slots=1, ttft_slo_s=0.5)
    long = [ask(0.1, range(100 * number, 100 * number + 60)) for number in range(1, 1500)]
    outcomes = of.run([ask(0.0, range(1), 200), *long])
    assert sum(each.end == "rejected" for each in outcomes) > 1400


@pytest.mark.parametrize("roles", [(Role.PREFILL,) * 4 + (Role.DECODE,), (Role.MIXED,)])
@pytest.mark.parametrize("policy", ["algorithm1", "kvcache_centric", "min_ttft"])
def test_who_would_slow_down_the_tokens_of_all_is_refused(roles: tuple[Role, ...], policy: str) -> None:
    """Requests, when n are decoded, have a token every 5 + n ms, plus time for contexts: 20 ms allow 14 requests."""
    engine = replace(ENGINE, decode_request_s=1e-3)
    first = [ask(10.0 * number, range(100 * number, 100 * number + 1), 50) for number in range(1, 5)]
    many = [ask(100.0 + 0.05 * number, range(10_000 + number, 10_001 + number), 600) for number in range(60)]
    outcomes = []
    for limit_s in (0.0, 20e-3):
        settings = ClusterSettings(roles, BLOCK, 1 << 14, tbt_slo_s=limit_s)
        played = SimCluster(settings, MACHINE, engine, PLACEMENT_POLICIES.make(policy))
        outcomes.append(played.run([*first, *many])[-60:])
    free, limited = outcomes
    assert {each.end for each in free} == {"finished"}
    assert sum(each.tbt_s > 30e-3 for each in free) > 30
    served = [each for each in limited if each.end == "finished"]
    assert {each.end for each in limited} == {"finished", "rejected"}
    assert 12 <= len(served) <= 15
    if Role.MIXED not in roles:
        assert max(each.tbt_s for each in served) <= 20.5e-3


def test_where_nobody_has_a_first_token() -> None:
    refused = RequestOutcome(0.0, "", "", -1.0, 0.0, 0.0, 10, 0, 0, 0, -1.0, 0, "rejected")
    result = cluster_report([refused] * 3, 5.0, 0.1, 1)
    assert (result["counted"], result["attainment"]) == (2, 0.0)


def test_tokens_per_second_count_from_the_first_one_sent() -> None:
    """A turn that waits for the turn before it is sent after later rows."""
    served = [
        RequestOutcome(when_s, "p", "d", 0.1, 0.01, 1.0, 10, 100, 0, 0, 0.1, 1, "finished") for when_s in (99, 1, 50)
    ]
    assert cluster_report(served, 5.0, 0.1, 0)["output_tokens_per_s"] == pytest.approx(300 / 99)


def test_prompts_of_one_step_share_its_time() -> None:
    """The times of waiting prompts add up to the queue's time (Mooncake §4.1): 40 prompts, eight in each step."""
    of = cluster(Role.MIXED)
    outcomes = of.run([ask(0.0, range(100 * number, 100 * number + 16), 1) for number in range(40)])
    in_all_s = 40 * 16 * BLOCK * 1e-3
    assert sum(each.prefill_s for each in outcomes) == pytest.approx(in_all_s)
    assert max(each.ttft_s for each in outcomes) == pytest.approx(in_all_s)
    state = of.members.engines["mixed-0000"].state
    assert state.prefill_model.predict_s(16 * BLOCK, 0) == pytest.approx(in_all_s / 40, rel=0.2)


@pytest.mark.parametrize(
    ("whole_tokens", "together"), [(1, 1), (2 * 16 * BLOCK - 1, 1), (2 * 16 * BLOCK, 2), (1 << 20, 4)]
)
def test_whole_prompts_are_computed_together_as_far_as_they_fit(whole_tokens: int, together: int) -> None:
    of = cluster(Role.MIXED, step_rule=StepRule.PREFILL_FIRST, whole_tokens=whole_tokens, active_prefills=4)
    first = ask(0.0, range(1000, 1001), 1)  # four arrive while this one is computed
    outcomes = of.run([first, *(ask(1e-3, range(100 * number, 100 * number + 16), 1) for number in range(4))])
    step_s = together * 16 * BLOCK * 1e-3
    expected = [(1 + number // together) * step_s + BLOCK * 1e-3 - 1e-3 for number in range(4)]
    assert [each.ttft_s for each in outcomes[1:]] == pytest.approx(expected)


def test_who_moves_has_waited_since_it_was_placed_first() -> None:
    of = cluster(*(Role.MIXED,) * 4, policy="dualmap:slo_s=2,choice=cache_affinity", active_prefills=1)
    waited: list[tuple[float, float]] = []
    move = of._move

    def noted(order) -> None:
        attempt = of._attempts.movable.get(order.request.request_id)
        move(order)
        if attempt is not None:
            mine = f"{attempt.request.number}~"
            here = (
                each for each in of.fleet.inflight.waiting(order.target) if each.request.request_id.startswith(mine)
            )
            waited.extend((each.placed_s, attempt.request.arrived_s) for each in here)

    of._move = noted  # type: ignore[method-assign]
    rng = Random(12)  # one of the four has more work than the others, so some move
    of.run([ask(0.02 * number, range(100 * number, 100 * number + rng.randint(1, 40)), 1) for number in range(600)])
    assert of.counts["moved"]
    assert len(waited) > 1
    assert all(placed_s == arrived_s for placed_s, arrived_s in waited)
