"""One request at a time through pools, policy, admission and the account, with cases worked by hand."""

import pytest

from pinyon.core.errors import InvalidArgument, NotFound, Rejected, ResourceExhausted, Unavailable
from pinyon.core.layout import KvLayout
from pinyon.placement.fleet import SHARED_SAMPLES, SIBLINGS_MAX
from pinyon.placement.index import Intake
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.plain import LeastLoaded
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from tests.unit.placement.conftest import DECODE, MIXED, PREFILL, STORE, hold, info, keys, make_fleet, member


def ask(name: str = "r", blocks: int = 10, **changes) -> PlacementRequest:
    values = {"prompt_tokens": 16 * blocks + 1, "block_keys": keys(*range(blocks)), "max_tokens": 16, **changes}
    return PlacementRequest(name, values.pop("model", "m"), **values)


def names(decision) -> tuple[str, str]:
    return decision.prefill.info.instance_id, decision.decode.info.instance_id


@pytest.fixture
def fleet():
    return make_fleet(("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE), ("d1", DECODE), ("s0", STORE), ("s1", STORE))


@pytest.fixture
def scheduler(fleet):
    return Scheduler(fleet, KvCacheCentric())


# -- where it is computed


def test_the_holder_of_the_prefix_is_chosen(fleet, scheduler):
    hold(fleet, "p1", range(10))
    decision = scheduler.schedule(ask(), 0.0)
    assert names(decision)[0] == "p1"
    assert (decision.local_blocks, decision.fetches) == (10, ())


def test_the_last_token_is_always_computed(fleet, scheduler):
    hold(fleet, "p0", range(10))
    decision = scheduler.schedule(ask(prompt_tokens=160), 0.0)
    assert decision.local_blocks == 9


def test_a_busy_holder_is_left_and_its_blocks_fetched(fleet, scheduler):
    hold(fleet, "p1", range(300))
    fleet.set_load(member(fleet, "p1"), InstanceLoad(pending_prefill_tokens=20_000), 0.0)
    decision = scheduler.schedule(ask(blocks=300), 0.0)
    assert names(decision)[0] == "p0"
    (span,) = decision.fetches
    assert (span.source.info.instance_id, span.first_block, span.block_count) == ("p1", 0, 300)
    assert decision.transfer_s > 0


def test_nothing_is_fetched_from_a_source_that_failed_its_reader(fleet, scheduler):
    for name in ("s0", "s1"):
        hold(fleet, name, range(300))
    for name in ("p0", "p1"):
        fleet.set_load(member(fleet, name), InstanceLoad(failed_sources=frozenset({"s0:1"})), 0.0)
    (span,) = scheduler.schedule(ask(blocks=300), 0.0).fetches
    assert span.source.info.instance_id == "s1"
    fleet.set_load(member(fleet, "p1"), InstanceLoad(failed_sources=frozenset({"s0:1", "s1:1"})), 0.0)
    fleet.set_load(member(fleet, "p0"), InstanceLoad(failed_sources=frozenset({"s0:1", "s1:1"})), 0.0)
    assert scheduler.schedule(ask("r2", blocks=300), 0.0).fetches == ()
    fleet.set_load(member(fleet, "p1"), InstanceLoad(), 0.0)
    again = scheduler.schedule(ask("r3", blocks=300), 0.0)
    assert names(again)[0] == "p1", "it can read again, which is quicker than computing"
    assert again.fetches


def test_one_that_keeps_to_itself_is_no_source_and_no_reader():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE), ("s0", STORE))
    fleet.join(info("k0", MIXED, keeps_to_itself=True), 0.0)
    scheduler = Scheduler(fleet, KvCacheCentric())
    hold(fleet, "k0", range(300))
    alone = frozenset({"d0", "k0"})
    assert scheduler.schedule(ask(blocks=300, exclude=frozenset({"k0"})), 0.0).fetches == ()
    fleet.set_load(member(fleet, "k0"), InstanceLoad(pending_prefill_tokens=2_000_000), 0.0)
    decision = scheduler.schedule(ask("r1", blocks=300), 0.0)
    assert (names(decision)[0], decision.fetches) == ("p0", ())
    hold(fleet, "s0", range(1000, 1300))
    stored = keys(*range(1000, 1300))
    for name, left, fetched in (("r2", alone - {"d0"}, 300), ("r3", frozenset({"p0"}), 0)):
        fleet.set_load(member(fleet, "k0"), InstanceLoad(), 0.0)
        decision = scheduler.schedule(ask(name, blocks=300, block_keys=stored, exclude=left), 0.0)
        assert sum(span.block_count for span in decision.fetches) == fetched


def test_what_is_placed_on_one_that_keeps_to_itself_has_begun():
    fleet = make_fleet()
    fleet.join(info("k0", MIXED, keeps_to_itself=True), 0.0)
    scheduler, state = Scheduler(fleet, KvCacheCentric()), member(fleet, "k0")
    decision = scheduler.schedule(ask(), 0.0)
    assert (state.queued_prefill_us, state.computing) == (0, 1)
    ends_s = state.loads.ends_s[state.row]
    assert ends_s == pytest.approx(decision.prefill_s, rel=1e-3)
    second = scheduler.schedule(ask("r1"), ends_s + 1.0)
    assert state.loads.ends_s[state.row] == pytest.approx(ends_s + 1.0 + second.prefill_s, rel=1e-3)
    for name in ("r", "r1"):
        assert fleet.inflight.release(name)
    assert (state.computing, state.loads.ends_s[state.row]) == (0, 0.0)
    fleet.inflight.check_integrity()


def test_a_late_request_without_reuse_is_given_no_pair():
    fleet = make_fleet()
    for name, role in (("p0", PREFILL), ("m0", MIXED)):
        fleet.join(info(name, role, server_url=f"http://{name}"), 0.0)
    fleet.set_load(member(fleet, "m0"), InstanceLoad(pending_prefill_tokens=2_000_000), 0.0)
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make("pinyon"))
    default = {"ttft_slo_s": 5.0, "ttft_slo_named": False}
    assert names(scheduler.schedule(ask(blocks=300, **default), 0.0)) == ("p0", "m0")
    with pytest.raises(Rejected):  # what p0 computes could not be reused at m0
        scheduler.schedule(ask("r1", blocks=300, **default, no_reuse=True), 0.0)


def test_what_is_slower_to_fetch_is_computed(fleet, scheduler):
    hold(fleet, "s0", range(10))
    for name in ("p0", "p1"):
        for _ in range(50):
            member(fleet, name).transfer_model.observe(10**6, 10.0)
    decision = scheduler.schedule(ask(), 0.0)
    assert (decision.local_blocks, decision.fetches) == (0, ())


def test_a_remote_prefix_must_be_longer_by_the_threshold(fleet):
    hold(fleet, "p0", range(40))
    hold(fleet, "p1", range(40))
    hold(fleet, "s0", range(80))
    assert Scheduler(fleet, KvCacheCentric(KvCacheCentricSettings(2.0))).schedule(ask(blocks=100), 0.0).fetches == ()
    (span,) = Scheduler(fleet, KvCacheCentric(KvCacheCentricSettings(1.9))).schedule(ask(blocks=100), 0.0).fetches
    assert (span.first_block, span.block_count) == (40, 40)


def test_the_plan_joins_sources_in_block_order_with_few_spans(fleet, scheduler):
    hold(fleet, "s0", range(60))
    hold(fleet, "s1", range(50, 90))
    hold(fleet, "d0", [55, 56, 57])
    decision = scheduler.schedule(ask(blocks=100), 0.0)
    spans = [(span.source.info.instance_id, span.first_block, span.block_count) for span in decision.fetches]
    assert spans == [("s0", 0, 60), ("s1", 60, 30)]


def test_readers_of_a_hot_prefix_spread_over_its_replicas(fleet, scheduler):
    hold(fleet, "s0", range(100))
    hold(fleet, "s1", range(100))
    hold(fleet, "d0", range(100))
    for name in ("p2", "p3"):  # one for each reader
        fleet.join(info(name, PREFILL), 0.0)
    sources = [scheduler.schedule(ask(f"r{i}", 100), 0.0).fetches[0].source.info.instance_id for i in range(4)]
    assert sources == ["s0", "s1", "s0", "s1"]


def test_no_reuse_means_none(fleet, scheduler):
    hold(fleet, "p1", range(10))
    hold(fleet, "s0", range(10))
    decision = scheduler.schedule(ask(no_reuse=True), 0.0)
    assert (decision.local_blocks, decision.fetches) == (0, ())
    assert decision.prefill_s == decision.prefill.prefill_model.predict_s(161, 0)


def test_placements_in_flight_count_as_queue(fleet, scheduler):
    decisions = [scheduler.schedule(ask(f"r{i}", block_keys=keys(i)), 0.0) for i in range(4)]
    assert [names(decision)[0] for decision in decisions] == ["p0", "p1", "p0", "p1"]
    assert decisions[2].queue_s == pytest.approx(decisions[0].prefill_s, abs=1e-6)


def test_who_is_queued_at_a_pipeline_waits_for_its_first_node(scheduler, fleet):
    fleet.leave("p1")
    fleet.join(info("p0", PREFILL, stages=4, chunk_tokens=64), 0.0)
    p0 = member(fleet, "p0")
    p0.prefill_model = KnownPrefillCost((0.0, 1e-3, 0.0))
    p0.learned()
    hold(fleet, "p0", range(4))
    first = scheduler.schedule(PlacementRequest("a", "m", 200, keys(*range(12))), 0.0)
    assert (first.queue_s, first.prefill_s, first.drain_s) == pytest.approx((0.0, 0.136, 3 * 0.064))
    assert (first.ttft_s, first.own_s) == pytest.approx((0.328, 0.328))
    second = scheduler.schedule(PlacementRequest("b", "m", 16), 0.0)
    assert (second.queue_s, second.prefill_s) == pytest.approx((0.136, 0.016))
    assert second.drain_s == pytest.approx(3 * 0.064), "with what is queued before it"
    fleet.inflight.release("a")
    fleet.inflight.release("b")
    moved = scheduler.decide_at(PlacementRequest("b", "m", 16), p0, None, 0.0)
    assert moved.drain_s == pytest.approx(3 * 0.016), "alone"
    with pytest.raises(Rejected, match="where nobody waits"):
        scheduler.schedule(PlacementRequest("c", "m", 100, ttft_slo_s=0.2), 0.0)


def test_fetching_is_no_wait_for_the_engine(fleet, scheduler):
    hold(fleet, "s0", range(300))
    first = scheduler.schedule(ask("first", 300), 0.0)
    assert first.transfer_s > 0
    second = scheduler.schedule(ask("second", block_keys=b"", exclude=frozenset({"p1"})), 0.0)
    assert second.queue_s == pytest.approx(first.prefill_s, abs=1e-6)


def test_the_same_questions_get_the_same_answers():
    def run() -> list[tuple[str, str]]:
        fleet = make_fleet(("x2", MIXED), ("x0", MIXED), ("x1", MIXED), ("s0", STORE))
        hold(fleet, "s0", range(0, 100, 2))
        scheduler = Scheduler(fleet, KvCacheCentric())
        return [names(scheduler.schedule(ask(f"r{i}", i), 0.0)) for i in range(30)]

    assert run() == run()


def test_the_baseline_ignores_caches(fleet):
    scheduler = Scheduler(fleet, LeastLoaded())
    hold(fleet, "p1", range(10))
    fleet.set_load(member(fleet, "p0"), InstanceLoad(pending_prefill_tokens=1), 0.0)
    assert names(scheduler.schedule(ask("a"), 0.0))[0] == "p1"
    decision = scheduler.schedule(ask("b"), 0.0)
    assert names(decision)[0] == "p0"
    assert decision.policy == "least_loaded"


def test_policies_by_name():
    assert [PLACEMENT_POLICIES.make(name).name for name in PLACEMENT_POLICIES.names] == list(PLACEMENT_POLICIES.names)
    with pytest.raises(ValueError, match="known: kvcache_centric, least_loaded"):
        PLACEMENT_POLICIES.make("nonsense")
    with pytest.raises(ValueError, match="at least 1"):
        PLACEMENT_POLICIES.make("kvcache_centric:balancing_threshold=0.5")


def test_an_option_reaches_the_policy(fleet):
    hold(fleet, "p0", range(10))
    hold(fleet, "p1", range(5))
    fleet.set_load(member(fleet, "p0"), InstanceLoad(pending_prefill_tokens=1_000_000), 0.0)
    fetched = []
    for threshold in ("2.0", "1.9"):
        policy = PLACEMENT_POLICIES.make(f"kvcache_centric:balancing_threshold={threshold}")
        fetched.append(len(Scheduler(fleet, policy).schedule(ask(threshold), 0.0).fetches))
        fleet.inflight.release(threshold)
    assert fetched == [0, 1]


# -- where it decodes


def test_the_least_loaded_instance_decodes(fleet, scheduler):
    fleet.set_load(member(fleet, "d0"), InstanceLoad(running_requests=8), 0.0)
    assert names(scheduler.schedule(ask(), 0.0))[1] == "d1"


def test_full_kv_memory_counts_as_load(fleet, scheduler):
    fleet.set_load(member(fleet, "d0"), InstanceLoad(used_blocks=995, running_requests=1), 0.0)
    fleet.set_load(member(fleet, "d1"), InstanceLoad(used_blocks=500, running_requests=6), 0.0)
    assert names(scheduler.schedule(ask(), 0.0))[1] == "d1"


def test_an_instance_where_requests_wait_for_memory_is_full(fleet, scheduler):
    for name in ("d0", "d1"):
        fleet.set_load(member(fleet, name), InstanceLoad(used_blocks=100 if name == "d0" else 500), 0.0)
    assert names(scheduler.schedule(ask("a"), 0.0))[1] == "d0"
    fleet.set_load(member(fleet, "d0"), InstanceLoad(used_blocks=100, room_wait_ms=1.0), 0.0)
    assert names(scheduler.schedule(ask("b"), 0.0))[1] == "d1"


def test_the_ttft_has_the_wait_for_memory_of_each_instance_once(fleet, scheduler):
    without = scheduler.schedule(ask("a"), 0.0)
    fleet.inflight.release("a")
    for name in ("d0", "d1"):
        fleet.set_load(member(fleet, name), InstanceLoad(room_wait_ms=3000.0), 0.0)
    for name in ("p0", "p1"):
        fleet.set_load(member(fleet, name), InstanceLoad(room_wait_ms=500.0), 0.0)
    decision = scheduler.schedule(ask("b"), 0.0)
    assert decision.ttft_s == pytest.approx(without.ttft_s + 3.5)
    fleet.inflight.release("b")
    with pytest.raises(Rejected) as caught:
        scheduler.schedule(ask("c", ttft_slo_s=3.0), 0.0)
    assert caught.value.retry_after_s == pytest.approx(decision.ttft_s - 3.0)
    mixed = make_fleet(("m0", MIXED))
    mixed.set_load(member(mixed, "m0"), InstanceLoad(room_wait_ms=3000.0), 0.0)
    assert Scheduler(mixed, KvCacheCentric()).schedule(ask(), 0.0).room_s == 3.0


def test_answers_are_expected_to_be_no_longer_than_the_mean(fleet, scheduler):
    few = scheduler.schedule(ask("a", max_tokens=16), 0.0).decode
    before = few.inflight_decode_blocks
    assert before == -(-(161 + 16) // 16)
    fleet.inflight.release("a")
    many = scheduler.schedule(ask("b", max_tokens=15_000), 0.0).decode
    assert many.inflight_decode_blocks == -(-(161 + 256) // 16)


def test_on_near_ties_the_holder_of_the_prefix_decodes(fleet, scheduler):
    hold(fleet, "d1", range(10))
    fleet.set_load(member(fleet, "d1"), InstanceLoad(running_requests=2), 0.0)
    assert names(scheduler.schedule(ask("a"), 0.0))[1] == "d1"
    fleet.set_load(member(fleet, "d1"), InstanceLoad(running_requests=5), 0.0)
    assert names(scheduler.schedule(ask("b"), 0.0))[1] == "d0"


def test_a_mixed_instance_keeps_its_prefills_unless_it_is_busy():
    fleet = make_fleet(("x0", MIXED), ("x1", MIXED))
    scheduler = Scheduler(fleet, KvCacheCentric())
    hold(fleet, "x1", range(10))
    assert names(scheduler.schedule(ask("a"), 0.0)) == ("x1", "x1")
    fleet.inflight.release("a")
    fleet.set_load(member(fleet, "x1"), InstanceLoad(running_requests=12), 0.0)
    assert names(scheduler.schedule(ask("b"), 0.0)) == ("x1", "x0")


def test_when_all_are_full_the_least_overcommitted_one_takes_it(fleet, scheduler):
    fleet.set_load(member(fleet, "d0"), InstanceLoad(running_requests=16, pending_requests=9), 0.0)
    fleet.set_load(member(fleet, "d1"), InstanceLoad(running_requests=16, pending_requests=3), 0.0)
    assert names(scheduler.schedule(ask(), 0.0))[1] == "d1"


# -- who may take it


def test_excluded_instances_are_neither_executors_nor_sources(fleet, scheduler):
    hold(fleet, "p0", range(100))
    hold(fleet, "s0", range(100))
    decision = scheduler.schedule(ask(blocks=100, exclude=frozenset({"p0", "d0", "s0"})), 0.0)
    assert names(decision) == ("p1", "d1")
    assert decision.fetches == ()
    with pytest.raises(Unavailable, match="excluded"):
        scheduler.schedule(ask(exclude=frozenset({"p0", "p1"})), 0.0)


@pytest.mark.parametrize("how", ["draining", "disconnected"])
def test_instances_that_leave_take_nothing_new(fleet, scheduler, how):
    hold(fleet, "p0", range(100))
    version = fleet.version
    if how == "draining":
        fleet.set_load(member(fleet, "p0"), InstanceLoad(draining=True), 0.0)
    else:
        fleet.set_connected(member(fleet, "p0"), False)
    assert fleet.version > version
    decision = scheduler.schedule(ask(blocks=100), 0.0)
    assert names(decision)[0] == "p1"
    assert decision.fetches == ()


def test_load_reports_do_not_change_the_version(fleet):
    version = fleet.version
    fleet.set_load(member(fleet, "p0"), InstanceLoad(running_requests=3), 0.0)
    assert fleet.version == version


def test_unknown_models_and_missing_instances(fleet, scheduler):
    with pytest.raises(NotFound) as unknown:
        scheduler.schedule(ask(model="other"), 0.0)
    assert unknown.value.field == "model"
    empty = Scheduler(make_fleet(("s0", STORE)), KvCacheCentric())
    with pytest.raises(Unavailable, match="no instance"):
        empty.schedule(ask(), 0.0)
    halved = Scheduler(make_fleet(("p0", PREFILL)), KvCacheCentric())
    with pytest.raises(Unavailable, match="prefill and decode"):
        halved.schedule(ask(), 0.0)


def test_kv_moves_only_between_equal_weights_and_layouts(fleet, scheduler):
    fleet.join(info("q0", PREFILL, model_fingerprint="newer"), 0.0)
    fleet.join(info("p9", PREFILL, layout=KvLayout(2, 2, 16, 32)), 0.0)
    for i in range(6):
        assert names(scheduler.schedule(ask(f"r{i}"), 0.0))[0] in ("p0", "p1")


def test_more_keys_than_full_blocks_are_refused(scheduler):
    with pytest.raises(InvalidArgument) as error:
        scheduler.schedule(ask(prompt_tokens=159), 0.0)
    assert error.value.field == "block_keys"


def test_a_request_that_fits_nowhere_names_its_too_large_field():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE))
    fleet.join(info("d1", DECODE, capacity_blocks=20), 0.0)
    scheduler = Scheduler(fleet, KvCacheCentric())
    with pytest.raises(InvalidArgument) as error:
        scheduler.schedule(ask(prompt_tokens=8192), 0.0)
    assert error.value.field == "prompt_tokens"
    assert names(scheduler.schedule(ask(max_tokens=5000), 0.0))[1] == "d0", "the small one is passed over"
    fleet.leave("d0")
    with pytest.raises(InvalidArgument) as error:
        scheduler.schedule(ask(max_tokens=5000), 0.0)
    assert error.value.field == "max_tokens"


# -- admission


def test_a_rejection_names_the_time_until_the_queue_is_short(fleet, scheduler):
    for name in ("p0", "p1"):
        fleet.set_load(member(fleet, name), InstanceLoad(pending_prefill_tokens=100_000), 0.0)  # 10 s by the prior
    with pytest.raises(Rejected) as rejected:
        scheduler.schedule(ask(ttft_slo_s=4.0), 0.0)
    assert rejected.value.retry_after_s == pytest.approx(6.0, abs=0.1)
    assert fleet.inflight.prefills == 0
    assert scheduler.schedule(ask(ttft_slo_s=11.0), 0.0).ttft_s < 11.0
    assert scheduler.schedule(ask(ttft_slo_s=0.0), 0.0)


def test_no_retry_hint_when_even_an_idle_instance_is_too_slow(scheduler):
    with pytest.raises(
        Rejected, match=r"limit of 0.001 s.*trying again does not help; name a longer limit .*x-pinyon-ttft-slo-ms"
    ) as refused:
        scheduler.schedule(ask(ttft_slo_s=1e-3), 0.0)
    assert refused.value.retry_after_s is None


def test_the_default_limit_refuses_for_the_wait_not_the_length(fleet, scheduler):
    def long(name: str):
        return ask(name, blocks=450, block_keys=b"", ttft_slo_s=0.5, ttft_slo_named=False)

    alone = scheduler.schedule(long("a"), 0.0)
    assert alone.ttft_s == alone.own_s > 0.5
    fleet.inflight.release("a")
    for share, placed in ((0.2, True), (0.5, False)):
        tokens = int(share * alone.own_s * 10_000)  # by the prior
        for name in ("p0", "p1"):
            fleet.set_load(member(fleet, name), InstanceLoad(pending_prefill_tokens=tokens), 0.0)
        if placed:
            assert scheduler.schedule(long("b"), 0.0).queue_s > 0
            fleet.inflight.release("b")
            continue
        with pytest.raises(Rejected, match="--ttft-slo-ms") as rejected:
            scheduler.schedule(long("b"), 0.0)
        assert rejected.value.retry_after_s == pytest.approx(0.25 * alone.own_s, rel=0.1)


def test_the_default_limit_is_the_limit_for_all_who_are_quicker(fleet, scheduler):
    short = ask(ttft_slo_s=1.0, ttft_slo_named=False)
    assert scheduler.schedule(short, 0.0).ttft_s < 0.1
    fleet.inflight.release("r")
    for name in ("p0", "p1"):
        fleet.set_load(member(fleet, name), InstanceLoad(pending_prefill_tokens=9_800), 0.0)
    with pytest.raises(Rejected):
        scheduler.schedule(ask(ttft_slo_s=0.9, ttft_slo_named=False), 0.0)


def test_rejection_by_time_between_tokens(fleet, scheduler):
    for name in ("d0", "d1"):
        for _ in range(50):
            fleet.set_load(member(fleet, name), InstanceLoad(running_requests=10, mean_tbt_ms=200.0), 0.0)
    with pytest.raises(Rejected, match="between tokens") as rejected:
        scheduler.schedule(ask(tbt_slo_s=0.1), 0.0)
    assert rejected.value.retry_after_s
    assert scheduler.schedule(ask(tbt_slo_s=0.4), 0.0).tbt_s == pytest.approx(0.2, rel=0.2)


# -- while instances may be unknown


def test_an_error_unknown_instances_may_undo_says_try_again(fleet, scheduler):
    fleet.set_load(member(fleet, "p0"), InstanceLoad(pending_prefill_tokens=100_000), 0.0)
    refused = (ask(model="other"), ask(ttft_slo_s=1e-3), ask(prompt_tokens=8192), ask(prompt_tokens=159))
    version = fleet.version
    fleet.settle(True)
    assert fleet.version > version
    for request in refused:
        with pytest.raises(Unavailable) as error:
            scheduler.schedule(request, 0.0)
        assert error.value.retry_after_s
    assert scheduler.schedule(ask(), 0.0), "with what is known, it goes on"
    fleet.settle(False)
    for request in refused:
        with pytest.raises((NotFound, InvalidArgument, Rejected)):
            scheduler.schedule(request, 0.0)


# -- what is in flight


def test_a_placement_counts_until_its_own_instance_ends_it(fleet, scheduler):
    hold(fleet, "s0", range(100))
    scheduler.schedule(ask(blocks=100), 0.0)
    p0, p1, d0, s0 = (member(fleet, name) for name in ("p0", "p1", "d0", "s0"))
    assert p0.queued_prefill_us > 0
    assert (d0.inflight_decodes, d0.inflight_decode_blocks) == (1, 102)
    assert s0.inflight_reads == 100
    fleet.inflight.end_prefill("r", p1, 0.0)
    assert p0.queued_prefill_us > 0, "another instance's word does not count"
    fleet.inflight.end_prefill("r", p0, 0.0)
    assert p0.queued_prefill_us == s0.inflight_reads == 0
    fleet.inflight.end_decode("r", p0)
    assert d0.inflight_decodes == 1
    fleet.inflight.end_decode("r", d0)
    assert d0.inflight_decodes == d0.inflight_decode_blocks == 0


def test_the_end_of_the_decode_ends_a_prefill_that_never_began(fleet, scheduler):
    decision = scheduler.schedule(ask(), 0.0)
    fleet.inflight.end_decode("r", decision.decode)
    assert fleet.inflight.prefills == fleet.inflight.decodes == 0


def test_placing_a_request_again_replaces_its_first_placement(fleet, scheduler):
    first = scheduler.schedule(ask(), 0.0)
    again = scheduler.schedule(ask(exclude=frozenset({names(first)[0]})), 1.0)
    assert names(again)[0] != names(first)[0]
    assert first.prefill.queued_prefill_us == 0
    fleet.inflight.end_prefill("r", first.prefill, 0.0)
    assert fleet.inflight.prefills == 1


def test_age_ends_what_nobody_reports(fleet, scheduler):
    for request_id, now_s in (("old", 0.0), ("young", 30.0)):
        fleet.inflight.begin_decode(request_id, scheduler.schedule(ask(request_id), now_s).decode)
    assert fleet.inflight.expire(59.9) == 0
    assert fleet.inflight.expire(60.0) == 1
    assert (fleet.inflight.prefills, fleet.inflight.decodes) == (1, 2)
    fleet.inflight.expire(600.0)
    assert (fleet.inflight.prefills, fleet.inflight.decodes, fleet.inflight.expired) == (0, 1, 3)


def test_what_no_decode_instance_claims_is_forgotten_soon(fleet, scheduler):
    decode, refused, elsewhere = (
        scheduler.schedule(ask(name), 0.0).decode for name in ("claimed", "refused", "elsewhere")
    )
    fleet.inflight.begin_decode("claimed", decode)
    fleet.inflight.begin_decode("elsewhere", member(fleet, "p0"))
    fleet.inflight.begin_decode("unknown", elsewhere)
    assert fleet.inflight.expire(9.9) == 0
    assert fleet.inflight.expire(10.0) == 4
    assert (fleet.inflight.prefills, fleet.inflight.decodes) == (1, 1)
    fleet.inflight.end_decode("claimed", decode)
    fleet.inflight.end_decode("refused", refused)
    assert (fleet.inflight.prefills, fleet.inflight.decodes) == (0, 0)
    assert decode.inflight_decodes == refused.inflight_decodes == elsewhere.inflight_decode_blocks == 0


def test_a_placement_unclaimed_after_a_new_session_is_forgotten(fleet, scheduler):
    """The reports of some ends were lost with the previous session: nothing else would tell for minutes."""
    fleet.leave("d1")
    d0 = member(fleet, "d0")
    for name in ("runs", "ended", "to come"):
        scheduler.schedule(ask(name), 0.0)
    for name in ("runs", "ended"):
        fleet.inflight.begin_decode(name, d0)
    fleet.inflight.unclaim(d0, 5.0)
    fleet.inflight.begin_decode("runs", d0)
    fleet.inflight.check_integrity()
    assert fleet.inflight.expire(9.9) == 0
    assert fleet.inflight.expire(10.0) == 2, "a new session gives no more time to what never came"
    assert fleet.inflight.expire(14.9) == 0
    assert fleet.inflight.expire(15.0) == 2
    assert (fleet.inflight.prefills, fleet.inflight.decodes, d0.inflight_decodes) == (1, 1, 1)
    fleet.inflight.end_decode("runs", d0)
    assert (fleet.inflight.prefills, d0.inflight_decodes, d0.inflight_decode_blocks) == (0, 0, 0)
    fleet.inflight.check_integrity()


def test_the_account_is_bounded():
    fleet = make_fleet(("x0", MIXED), inflight_max=2)
    scheduler = Scheduler(fleet, KvCacheCentric())
    scheduler.schedule(ask("a"), 0.0)
    scheduler.schedule(ask("b"), 0.0)
    with pytest.raises(ResourceExhausted) as error:
        scheduler.schedule(ask("c"), 1.0)
    assert error.value.retry_after_s
    assert scheduler.schedule(ask("c"), 600.0), "what is too old makes room"


def test_an_instance_that_leaves_takes_its_share_along(fleet, scheduler):
    decision = scheduler.schedule(ask(), 0.0)
    fleet.leave(names(decision)[0])
    assert (fleet.inflight.prefills, fleet.inflight.decodes) == (0, 1)
    fleet.leave(names(decision)[1])
    assert fleet.inflight.decodes == 0


@pytest.mark.parametrize("lost", ["before", "after", "never begun"])
def test_a_prompt_does_not_outlive_its_lost_decode_instance(fleet, scheduler, lost):
    """The report of the prompt's end was lost with a session of its instance, and no other peer could report it."""
    decision = scheduler.schedule(ask(), 0.0)
    prefill, decode = decision.prefill, decision.decode
    assert prefill is not decode
    fleet.inflight.begin_decode("r", decode)
    if lost != "never begun":
        fleet.inflight.begin_prefill("r", prefill, 1.0)
    if lost == "before":
        fleet.inflight.unclaim(prefill, 2.0)
    fleet.leave(decode.info.instance_id)
    if lost == "after":
        fleet.inflight.unclaim(prefill, 2.0)
    fleet.inflight.check_integrity()
    assert fleet.inflight.expire(20.0) == 0, "nothing is left to be forgotten"
    assert (fleet.inflight.prefills, fleet.inflight.decodes) == (0, 0)
    assert (prefill.queued_prefill_us, prefill.computing, prefill.inflight_reads) == (0, 0, 0)
    fleet.inflight.end_prefill("r", prefill, 3.0)  # the report may still come, without effect


def test_a_prompt_does_not_outlive_a_decode_that_got_too_old():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE))
    fleet.inflight = InFlightTable(10, 10.0, prefill_s=600.0, decode_s=60.0)
    Scheduler(fleet, KvCacheCentric()).schedule(ask(), 0.0)
    fleet.inflight.begin_decode("r", member(fleet, "d0"))
    assert fleet.inflight.expire(60.0) == 2
    fleet.inflight.check_integrity()


def test_a_pair_of_servers_is_to_be_claimed_from_its_prompt_on():
    fleet = make_fleet(("p0", PREFILL))
    for name in ("d0", "d1"):
        fleet.join(info(name, DECODE, server_url="http://127.0.0.1:1"), 0.0)
    pair = PlacementDecision(member(fleet, "p0"), member(fleet, "d0"))
    fleet.inflight.add("r", pair, 10, 0.0)
    assert not fleet.inflight.expire(50.0)
    fleet.inflight.end_prefill("r", member(fleet, "p0"), 50.0)
    assert not fleet.inflight.expire(59.0)
    assert fleet.inflight.expire(60.0) == 1
    fleet.inflight.add("r", pair, 10, 60.0)
    fleet.inflight.begin_decode("r", pair.decode)
    fleet.inflight.end_prefill("r", pair.prefill, 61.0)
    assert not fleet.inflight.expire(100.0), "the report of the prompt came last"
    fleet.inflight.check_integrity()


def test_a_prompt_computed_at_decode_is_over_at_prefill():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE))
    Scheduler(fleet, KvCacheCentric()).schedule(ask(), 0.0)
    fleet.inflight.begin_prefill("r", member(fleet, "d0"), 1.0)
    assert (fleet.inflight.prefills, fleet.inflight.decodes) == (0, 1)
    fleet.inflight.check_integrity()


# -- membership of the fleet


def test_a_new_boot_replaces_the_old_one(fleet):
    hold(fleet, "p0", range(10))
    old = member(fleet, "p0")
    new = fleet.join(info("p0", PREFILL, boot="2"), 0.0)
    assert fleet.get("p0") is new is not old
    assert fleet.index.match(keys(0)).blocks == 0
    assert fleet.index.apply_delta(new, 1, keys(1), b"") is Intake.GAP
    assert not old.connected


def test_bits_are_used_again_and_instances_limited():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE), instances_max=2)
    with pytest.raises(ResourceExhausted):
        fleet.join(info("d1", DECODE), 0.0)
    bit = member(fleet, "p0").bit
    fleet.leave("p0")
    assert fleet.join(info("p9", PREFILL), 0.0).bit == bit
    assert [state.info.instance_id for state in fleet.instances()] == ["d0", "p9"]


def test_a_newcomer_inherits_its_siblings_cost_models(fleet):
    for _ in range(20):
        member(fleet, "p0").prefill_model.observe(1000, 0, 5.0)
    newcomer = fleet.join(info("p2", PREFILL), 0.0)
    assert newcomer.prefill_model.predict_s(1000, 0) == pytest.approx(5.0, rel=0.05)
    stranger = fleet.join(info("p3", PREFILL, model_fingerprint="other"), 0.0)
    assert stranger.prefill_model.samples == 0


def test_siblings_that_are_hardly_measured_learn_together():
    fleet = make_fleet(("p0", PREFILL), ("p1", PREFILL), ("gone", PREFILL), ("d0", DECODE))
    stranger = fleet.join(info("p2", PREFILL, model_fingerprint="other"), 0.0)
    one, other, gone = (member(fleet, each) for each in ("p0", "p1", "gone"))
    fleet.leave("gone")
    for _ in range(SHARED_SAMPLES):
        fleet.learn_prefills(one, [(1000, 0, 5.0), (0, 1000, 1.0)], 0.0)
    assert other.prefill_model.predict_s(1000, 0) == one.prefill_model.predict_s(1000, 0) == pytest.approx(5, rel=0.1)
    assert (other.prefill_model.samples, other.prefill_learned_s) == (SHARED_SAMPLES, 0.0)
    assert stranger.prefill_model.samples == gone.prefill_model.samples == 0
    for _ in range(SHARED_SAMPLES):
        fleet.learn_prefills(other, [(1000, 0, 1.0)], 1.0)
    assert other.prefill_model.predict_s(1000, 0) == pytest.approx(1, rel=0.1)
    assert one.prefill_model.predict_s(1000, 0) == pytest.approx(5, rel=0.1)
    late = fleet.join(info("p3", PREFILL), 2.0)
    fleet.learn_prefills(late, [(1000, 0, 5.0)], 2.0)
    assert other.prefill_model.predict_s(1000, 0) == pytest.approx(1, rel=0.1), "it has samples of its own"


def test_a_large_report_leaves_room_for_own_measurements():
    prefills = ((f"p{number}", PREFILL) for number in range(SIBLINGS_MAX + 2))
    fleet = make_fleet(("d0", DECODE), *prefills, instances_max=100)
    fleet.learn_prefills(member(fleet, "p0"), [(1000, 0, 5.0)] * 256, 0.0)
    samples = [member(fleet, f"p{number}").prefill_model.samples for number in range(SIBLINGS_MAX + 2)]
    assert sorted(samples) == [0, 0, *[SHARED_SAMPLES] * (SIBLINGS_MAX - 1), 256]
    assert member(fleet, "d0").prefill_model.samples == 0
    fleet.learn_prefills(member(fleet, "p0"), [(1000, 0, 5.0)], 0.0)
    assert min(member(fleet, f"p{number}").prefill_model.samples for number in range(SIBLINGS_MAX + 2)) == 1


def test_a_request_only_an_excluded_one_can_take_is_unavailable():
    """The excluded instance was full, or failed: a retry helps."""
    fleet = make_fleet()
    fleet.join(info("big", MIXED, max_context_tokens=8192), 0.0)
    fleet.join(info("small", MIXED, max_context_tokens=1024), 0.0)
    scheduler = Scheduler(fleet, KvCacheCentric())
    long = {"prompt_tokens": 4000, "block_keys": b""}
    assert names(scheduler.schedule(ask("first", **long), 0.0)) == ("big", "big")
    with pytest.raises(Unavailable, match="excluded"):
        scheduler.schedule(ask("again", exclude=frozenset({"big"}), **long), 0.0)
    with pytest.raises(InvalidArgument, match="longer"):
        scheduler.schedule(ask("never", prompt_tokens=9000, block_keys=b"", exclude=frozenset({"big"})), 0.0)


def test_what_is_done_of_a_prompt_is_no_queue_any_more():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE))
    scheduler = Scheduler(fleet, KvCacheCentric())
    p0 = member(fleet, "p0")
    own_s = [scheduler.schedule(ask(f"r{number}"), 0.0).prefill_s for number in range(2)]
    assert p0.prefill_queue_s(0.0) == pytest.approx(sum(own_s), abs=1e-5)
    fleet.inflight.begin_prefill("r0", p0, 1.0)
    half_s = 1.0 + own_s[0] / 2
    assert p0.prefill_queue_s(half_s) == pytest.approx(own_s[0] / 2 + own_s[1], abs=1e-5)
    assert p0.prefill_queue_s(99.0) == pytest.approx(own_s[1], abs=1e-5), "late, and any moment done"
    fleet.inflight.begin_prefill("r0", p0, 99.0)
    assert p0.prefill_queue_s(99.0) == pytest.approx(own_s[1], abs=1e-5), "told twice"
    assert not p0.prefill_idle
    fleet.inflight.end_prefill("r0", p0, 99.0)
    fleet.inflight.end_prefill("r1", p0, 99.0)
    assert p0.prefill_queue_s(99.0) == 0.0
    assert p0.prefill_idle
