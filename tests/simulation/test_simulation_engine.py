"""The simulated engine against a plain engine that shares no module with it, and against arithmetic."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS, Traits
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator import engine as engine_module
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings, SchedulingCost, StepRule
from pinyon_lab.simulator.report import RequestOutcome, longest_tenth
from pinyon_lab.simulator.workload import Arrival
from tests.long import usually
from tests.simulation.leftovers import check_cluster
from tests.simulation.plain_instance import serve
from tests.simulation.worlds import World, random_plan

BLOCK = 16
ENGINE = EngineProfile("s", "", "", 1e-3, 2e-5, 3e-10, 5e-3, 1e-4, 2e-8)
MACHINE = MachineProfile("s", "", "", "tiny", 1000, 1, 0, 1e9, 1e7, 1e9)
ONE = ClusterSettings(
    (Role.MIXED,), BLOCK, 1 << 20,
    max_batch=12, step_tokens=96, chunk_tokens=64, active_prefills=1, batching="fcfs", service_order="fifo",
)  # fmt: skip


def cluster(settings: ClusterSettings, engine: EngineProfile = ENGINE, policy: str = "least_loaded") -> SimCluster:
    return SimCluster(settings, MACHINE, engine, PLACEMENT_POLICIES.make(policy))


def traffic(seed: int, count: int, per_s: float) -> list[Arrival]:
    rng = random.Random(seed)
    prefixes = [[rng.getrandbits(60) for _ in range(rng.randint(1, 8))] for _ in range(10)]
    now_s, arrivals = 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(per_s)
        blocks = [*rng.choice(prefixes), *(rng.getrandbits(60) for _ in range(rng.randint(0, 8)))]
        tokens = len(blocks) * BLOCK - rng.randint(0, BLOCK - 1)
        arrivals.append(Arrival(now_s, tokens, rng.choice([0, 1, 2, 30, 100]), tuple(blocks), NO_TRAITS))
    return arrivals


def alone(tokens: int, output: int = 1, time_s: float = 0.0, first_block: int = 0) -> Arrival:
    blocks = tuple(range(first_block, first_block - (-tokens // BLOCK)))
    return Arrival(time_s, tokens, output, blocks, NO_TRAITS)


@pytest.mark.parametrize("rule", list(StepRule))
@pytest.mark.parametrize(("per_s", "batch"), [(2.0, 12), (8.0, 12), (40.0, 64)])
def test_one_instance_is_the_plain_one_row_by_row(rule: StepRule, per_s: float, batch: int) -> None:
    """Both agree while at most two batches are admitted: beyond, prompts wait for a slot as well."""
    arrivals = traffic(int(per_s), 300, per_s)
    mine = cluster(replace(ONE, step_rule=rule, max_batch=batch)).run(arrivals)
    theirs = serve(arrivals, ENGINE, BLOCK, 64, 96, batch, rule is StepRule.PREFILL_FIRST)
    assert [each.hit_tokens for each in mine] == [each.hit_tokens for each in theirs]
    assert [each.ttft_s for each in mine] == pytest.approx([each.ttft_s for each in theirs], abs=1e-9)
    assert [each.e2e_s for each in mine] == pytest.approx([each.e2e_s for each in theirs], abs=1e-9)
    tbts = [longest_tenth([(gap, 1) for gap in each.gaps_s]) for each in theirs]
    assert [each.tbt_s for each in mine] == pytest.approx(tbts, rel=0.01)  # a leap reports one mean


@pytest.mark.parametrize("scheduling", [SchedulingCost(), SchedulingCost(1e-3, 2e-4)])
def test_leaps_change_nothing(monkeypatch: pytest.MonkeyPatch, scheduling: SchedulingCost) -> None:
    """The test has one instance: with more, a leap reports its load later, and placements differ."""

    def outcomes(seed: int) -> list[RequestOutcome]:
        plan = random_plan(seed)
        settings = replace(
            plan.settings,
            roles=(Role.MIXED,),
            hbm_tokens=96 * BLOCK,
            ttft_slo_s=0.0,
            tbt_slo_s=0.0,
            scheduling=scheduling,
            step_tbt_s=(0.0, 0.005)[seed % 2],
        )
        world = World(replace(plan, settings=settings, policy="least_loaded", deaths=0, failed_steps=0.0), seed)
        world.run()
        return world.outcomes

    leaping = {seed: outcomes(seed) for seed in range(usually(14, long=60))}
    monkeypatch.setattr(engine_module, "LEAP_S", 0.0)
    monkeypatch.setattr(engine_module, "WAITING_LEAP_S", 0.0)
    for seed, mine in leaping.items():
        theirs = outcomes(seed)
        assert [each.end for each in mine] == [each.end for each in theirs], seed
        assert [each.e2e_s for each in mine] == pytest.approx([each.e2e_s for each in theirs], abs=1e-6), seed


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_chunks_pass_through_a_pipeline(stages: int) -> None:
    """Equal chunks take (chunks + stages - 1) / stages times one (Mooncake §3.3); first nodes are free sooner."""
    linear = replace(ENGINE, step_s=0.0, prefill_pair_s=0.0)
    settings = replace(ONE, roles=(Role.PREFILL, Role.DECODE), pipeline=stages, step_tokens=64)
    fast = replace(MACHINE, nic_bytes_s=1e15)
    played = SimCluster(settings, fast, linear, PLACEMENT_POLICIES.make("least_loaded"))
    first, second = played.run([alone(640), alone(640, first_block=1000)])
    part_s = 64 * 2e-5 / stages
    assert first.ttft_s == pytest.approx((10 + stages - 1) * part_s, rel=1e-6)
    assert second.ttft_s >= (20 + stages - 1) * part_s * (1 - 1e-6)
    check_cluster(played)


def test_a_short_chunk_does_not_overtake_a_long_one() -> None:
    """The two nodes take 0.64 ms each for 64 tokens, and 16 tokens behind them wait for the second node."""
    linear = replace(ENGINE, step_s=0.0, prefill_pair_s=0.0)
    settings = replace(ONE, roles=(Role.PREFILL, Role.DECODE), pipeline=2, step_tokens=64, active_prefills=2)
    fast = replace(MACHINE, nic_bytes_s=1e15)
    played = SimCluster(settings, fast, linear, PLACEMENT_POLICIES.make("least_loaded"))
    first, second = played.run([alone(64), alone(16, first_block=1000)])
    assert first.ttft_s == pytest.approx(1.28e-3, rel=1e-6)
    assert second.ttft_s == pytest.approx(1.44e-3, rel=1e-6)


def test_kv_goes_to_the_decode_instance_while_it_is_computed() -> None:
    """The transfer of 640 tokens of 1,000 B at 10 MB/s takes 64 ms and overlaps the computation, a tenth as long."""
    settings = replace(ONE, roles=(Role.PREFILL, Role.DECODE), step_tokens=64)
    linear = replace(ENGINE, step_s=0.0, prefill_pair_s=0.0)
    played = cluster(settings, linear)
    only = played.run([alone(640, 3)])[0]
    assert only.ttft_s == pytest.approx(640 * 1000 / 1e7, rel=1e-6)
    assert (only.prefill, only.decode) == ("prefill-0000", "decode-0001")
    assert only.output_tokens == 3
    assert played.moves.links.sent_bytes == 640 * 1000


def test_a_prefix_is_fetched_where_that_is_sooner() -> None:
    slow = replace(ENGINE, prefill_token_s=1e-3)
    settings = replace(ONE, roles=(Role.MIXED, Role.MIXED), step_tokens=1 << 20, chunk_tokens=1 << 20)
    played = cluster(settings, slow, "kvcache_centric")
    learn = [alone(320, 1, 10.0 * number, 1000 * number) for number in range(1, 6)]
    shared = [alone(640, 200, 100.0), *(alone(640, 1, 100.7 + 1e-6 * each) for each in range(3))]
    outcomes = played.run([*learn, *shared])
    assert played.moves.fetches
    assert {each.fetched_tokens for each in outcomes[-3:]} >= {624}
    check_cluster(played)


def test_what_hbm_has_no_room_for_comes_back_from_dram() -> None:
    """The read of 39 of 40 blocks of 16,000 B at 1 MB/s takes as long as asserted; the last block is computed."""
    settings = replace(ONE, hbm_tokens=48 * BLOCK, dram_tokens=1 << 12, step_tokens=1 << 20, chunk_tokens=1 << 20)
    slow = replace(MACHINE, dram_bytes_s=1e6)
    played = SimCluster(settings, slow, ENGINE, PLACEMENT_POLICIES.make("least_loaded"))
    arrivals = [alone(640), alone(640, 1, 100.0, 1000), alone(640, 1, 200.0)]
    outcomes = played.run(arrivals)
    assert [each.hit_tokens for each in outcomes] == [0, 0, 624]
    computed_s = ENGINE.seconds([(624, 640)], 0, 0)
    assert outcomes[2].ttft_s >= computed_s + 39 * 16_000 / 1e6
    check_cluster(played)


def test_a_pool_keeps_what_an_instance_has_lost() -> None:
    settings = replace(ONE, hbm_tokens=48 * BLOCK, pool_tokens=1 << 12, step_tokens=1 << 20, chunk_tokens=1 << 20)
    slow = replace(ENGINE, prefill_token_s=1e-3)
    played = cluster(settings, slow, "kvcache_centric")
    outcomes = played.run([alone(640), alone(640, 1, 100.0, 1000), alone(640, 1, 200.0)])
    assert [each.hit_tokens for each in outcomes] == [0, 0, 128], "8 blocks were left"
    assert [each.fetched_tokens for each in outcomes] == [0, 0, 496]
    check_cluster(played)


def test_a_request_is_sent_after_the_one_it_follows_has_ended() -> None:
    turns = [alone(160, 50), alone(320, 50, 0.01)._replace(follows=0), alone(480, 1, 50.0)._replace(follows=1)]
    first, second, third = cluster(ONE).run(turns)
    assert second.arrived_s == pytest.approx(first.e2e_s)
    assert third.arrived_s == 50.0


@pytest.mark.parametrize("tokens", [160, 165])
def test_the_next_turn_finds_what_was_generated(tokens: int) -> None:
    """The last generated token is never computed: 160 + 49 tokens fill 13 blocks."""
    played = cluster(ONE)
    turns = [alone(tokens, 50), alone(320, 1, 50.0)._replace(follows=0), alone(320, 1, 99.0, 1000)._replace(follows=0)]
    assert [each.hit_tokens for each in played.run(turns)] == [0, 13 * BLOCK, 0]
    (engine,) = played.members.engines.values()
    assert engine.pool.cached == 40
    alone_ = cluster(ONE)
    turns[1] = turns[1]._replace(follows=-1)
    assert [each.hit_tokens for each in alone_.run(turns)] == [0, 160, 0], "nobody knows whose blocks those are"
    (engine,) = alone_.members.engines.values()
    assert engine.pool.cached == 43, "but they take room"
    nothing = cluster(replace(ONE, prefix_cache=False))
    assert [each.hit_tokens for each in nothing.run(turns)] == [0, 0, 0]
    (engine,) = nothing.members.engines.values()
    assert engine.pool.cached == 0


def test_the_way_through_the_services_counts() -> None:
    outcomes = cluster(replace(ONE, path_s=0.25)).run([alone(160, 5), alone(160, 5, 3.0, 1000)])
    there = cluster(ONE).run([alone(160, 5)])[0]
    for each in outcomes:
        assert (each.ttft_s, each.e2e_s) == pytest.approx((there.ttft_s + 0.25, there.e2e_s + 0.25))


def test_a_closed_loop_has_so_many_in_flight() -> None:
    arrivals = [alone(64, 20, 0.0, 1000 * number) for number in range(30)]
    outcomes = cluster(ONE).run(arrivals, clients=3)
    edges = sorted(
        [(each.arrived_s, 1) for each in outcomes] + [(each.arrived_s + each.e2e_s, -1) for each in outcomes]
    )
    inside, most = 0, 0
    for _, change in edges:
        inside += change
        most = max(most, inside)
    assert most == 3
    assert sum(each.arrived_s == 0 for each in outcomes) == 3


def test_what_never_fits_is_said_at_once() -> None:
    small = replace(ONE, hbm_tokens=10 * BLOCK)
    outcomes = cluster(small).run([alone(11 * BLOCK), alone(5 * BLOCK)])
    assert [each.end for each in outcomes] == ["too long", "finished"]


def test_an_instance_says_how_long_one_waits_for_memory() -> None:
    """Two of three requests fit: the third waits for the end of the first."""
    played = cluster(replace(ONE, hbm_tokens=60 * BLOCK))
    seen: list[float] = []
    (engine,) = played.members.engines.values()
    for at_s in (0.2, 0.3):
        played.time.at(at_s, lambda: seen.append(engine.state.load.room_wait_ms))
    outcomes = played.run([alone(400, 60, 0.01 * number, 1000 * number) for number in range(3)])
    assert all(each.end == "finished" for each in outcomes)
    assert 0 < seen[0] < seen[1] <= 400
    assert engine.state.load.room_wait_ms == 0


def test_eviction_is_told_of_requests_wherever_they_use_blocks() -> None:
    played = cluster(replace(ONE, eviction="workload_aware"))
    first, second = Traits("chat/2", "somebody"), Traits("chat/3", "somebody")
    arrivals = [alone(160)._replace(traits=first), alone(160, 1, 10.0)._replace(traits=second)]
    assert [each.hit_tokens for each in played.run(arrivals)] == [0, 144]
    (engine,) = played.members.engines.values()
    held = engine.pool.keys()
    assert [engine.pool._known_of(key).traits for key in held].count(second) == 9, "all that was used again"


@pytest.mark.parametrize(("kernel", "batching"), [("grouped", "feather"), ("whole", "feather"), ("grouped", "fcfs")])
def test_an_instance_says_what_its_batch_shares(kernel: str, batching: str) -> None:
    settings = replace(ONE, batching=batching, attention_kernel=kernel, max_batch=32)
    mine = cluster(settings, replace(ENGINE, decode_shared_share=0.0))
    one = [alone(20 * BLOCK, 300, 0.1 * number)._replace(blocks=(*range(16), *range(100 * number, 100 * number + 4)))
           for number in range(1, 4)]  # fmt: skip
    two = [alone(12 * BLOCK + 1, 300, 0.05 * number, 9000) for number in range(1, 3)]
    said = []
    state = mine.members.engines["mixed-0000"].state
    mine.time.at(1.0, lambda: said.append(state.load))
    outcomes = mine.run(sorted([*one, *two]))
    (load,) = said
    assert {each.end for each in outcomes} == {"finished"}
    assert load.level_blocks == (4 if kernel == "grouped" else 0)
    assert [each[1:] for each in load.shared] == ([(16, 3), (12, 2)] if load.level_blocks else [])
    assert not state.load.shared
    assert mine.fleet.loads.prefixes.empty


def test_a_kernel_by_groups_reads_once_what_some_share() -> None:
    arrivals = [alone(8 * BLOCK + 1, 1001, 0.0, first) for first in (0, 0, 9000, 9000)]
    ends = {}
    for kernel in ("whole", "grouped"):
        run = cluster(replace(ONE, batching="feather:stop=never", attention_kernel=kernel, step_tokens=1 << 10),
                      replace(ENGINE, decode_kv_token_s=1e-5, decode_shared_share=0.0))  # fmt: skip
        ends[kernel] = max(each.e2e_s for each in run.run(arrivals))
    assert ends["whole"] - ends["grouped"] == pytest.approx(1000 * 1e-5 * 2 * 8 * BLOCK, rel=0.05)


def test_what_begins_alike_is_decoded_by_the_same_instance() -> None:
    rng = random.Random(5)
    arrivals = []
    for number in range(240):
        group, own = rng.randrange(8), 1 << 30 | number << 8
        blocks = (*range(group * 1000, group * 1000 + 128), *range(own, own + 4))
        arrivals.append(Arrival(number * 0.04, 132 * BLOCK, 100, blocks, NO_TRAITS))
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE, Role.DECODE)
    engine = replace(ENGINE, decode_kv_token_s=1e-6, decode_shared_share=0.0)
    kept = {}
    for sharing in (False, True):
        settings = replace(ONE, roles=roles, batching="feather:stop=never", attention_kernel="grouped",
                           max_batch=64, decode_sharing=sharing)  # fmt: skip
        run = cluster(settings, engine)
        run.run(arrivals)
        check_cluster(run)
        assert run.fleet.loads.prefixes.empty
        sums = [each.decode_sums for name, each in run.members.engines.items() if name.startswith("decode")]
        kept[sharing] = sum(each.kv_tokens for each in sums) / sum(each.tokens for each in sums)
    assert kept[True] < 0.92 * kept[False], kept


def test_prompts_alone_do_not_make_decoding_look_slow() -> None:
    """Some prompts are computed before any decoding; a long prompt that joins later is still cut to the limit."""
    settings = replace(ONE, step_tokens=2048, chunk_tokens=2048, max_batch=64, step_tbt_s=0.02)
    played = cluster(settings, replace(ENGINE, decode_kv_token_s=0.0))
    arrivals = [alone(8000, 1, 0.5 * number, 100_000 * (number + 1)) for number in range(6)]
    arrivals += [alone(BLOCK, 400, 5.0, 7_000_000 + 10 * number) for number in range(8)]
    played.run([*arrivals, alone(8000, 1, 6.0, 9_000_000)])
    (engine,) = played.members.engines.values()
    assert engine.steps.cut_steps > 10
