"""Trials of estimates that keep work away; cases worked by hand."""

import pytest

from pinyon.core.errors import Rejected
from pinyon.placement.admission import PROBE_AFTER_S, TRANSFER_PROBE_AFTER_S
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.unit.placement.conftest import DECODE, PREFILL, STORE, hold, info, keys, make_fleet, member


def ask(name: str = "r", **changes) -> PlacementRequest:
    return PlacementRequest(name, "m", **{"prompt_tokens": 1000, "max_tokens": 8, **changes})


@pytest.fixture
def fleet():
    return make_fleet(("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE), ("d1", DECODE))


@pytest.fixture
def scheduler(fleet):
    return Scheduler(fleet, KvCacheCentric())


def slow_prefills(fleet, now_s: float = 0.0) -> None:
    for name in ("p0", "p1"):
        fleet.learn_prefills(member(fleet, name), [(1000, 0, 50.0)], now_s)


def slow_fetches(fleet) -> None:
    """Makes fetches of the blocks that a store node holds slow."""
    fleet.join(info("s0", STORE), 0.0)
    hold(fleet, "s0", range(60))
    for name in ("p0", "p1"):
        for _ in range(50):
            fleet.learn_transfers(member(fleet, name), [(10**6, 10.0, None)], 0.0)


def test_one_request_for_each_idle_instance_and_no_more(fleet, scheduler):
    slow_prefills(fleet)
    slo = {"ttft_slo_s": 5.0}
    with pytest.raises(Rejected):
        scheduler.schedule(ask("early", **slo), PROBE_AFTER_S - 0.1)
    probes = [scheduler.schedule(ask(f"r{i}", **slo), PROBE_AFTER_S).prefill.info.instance_id for i in range(2)]
    assert sorted(probes) == ["p0", "p1"]
    with pytest.raises(Rejected):
        scheduler.schedule(ask("third", **slo), PROBE_AFTER_S)
    for name in ("r0", "r1"):
        fleet.inflight.release(name)
    with pytest.raises(Rejected):
        scheduler.schedule(ask("soon", **slo), PROBE_AFTER_S + 1)


def test_an_instance_with_a_queue_is_not_probed(fleet, scheduler):
    slow_prefills(fleet)
    fleet.set_load(member(fleet, "p0"), InstanceLoad(pending_prefill_tokens=1), 0.0)
    scheduler.schedule(ask("unlimited", ttft_slo_s=0.0, exclude=frozenset({"p0"})), 0.0)
    with pytest.raises(Rejected):
        scheduler.schedule(ask(ttft_slo_s=5.0), 1000.0)


def test_an_instance_that_is_measured_all_the_time_is_believed(fleet, scheduler):
    for second in range(100):
        slow_prefills(fleet, float(second))
        with pytest.raises(Rejected):
            scheduler.schedule(ask(ttft_slo_s=5.0), second + 0.5)


def test_a_newcomer_whose_prior_says_no_is_probed_too(fleet, scheduler):
    fleet.join(info("p9", PREFILL), 100.0)
    with pytest.raises(Rejected):
        scheduler.schedule(ask(ttft_slo_s=1e-3, exclude=frozenset({"p0", "p1"})), 101.0)
    decision = scheduler.schedule(ask(ttft_slo_s=1e-3, exclude=frozenset({"p0", "p1"})), 100.0 + PROBE_AFTER_S)
    assert decision.prefill.info.instance_id == "p9"


def test_a_slow_decode_instance_is_probed_when_it_is_idle(fleet, scheduler):
    for name in ("d0", "d1"):
        for _ in range(50):
            fleet.set_load(member(fleet, name), InstanceLoad(running_requests=10, mean_tbt_ms=900.0), 0.0)
    fleet.set_load(member(fleet, "d1"), InstanceLoad(), 0.0)
    with pytest.raises(Rejected, match="between tokens"):
        scheduler.schedule(ask(tbt_slo_s=0.1), 1.0)
    assert scheduler.schedule(ask(tbt_slo_s=0.1), PROBE_AFTER_S).decode.info.instance_id == "d1"
    with pytest.raises(Rejected, match="between tokens"):
        scheduler.schedule(ask("next", tbt_slo_s=0.1), PROBE_AFTER_S)


def test_a_slow_decode_instance_does_not_block_a_quick_one(fleet, scheduler):
    for _ in range(50):
        fleet.set_load(member(fleet, "d0"), InstanceLoad(running_requests=1, mean_tbt_ms=900.0), 0.0)
        fleet.set_load(member(fleet, "d1"), InstanceLoad(running_requests=60, mean_tbt_ms=50.0), 0.0)
    fleet.set_load(member(fleet, "d0"), InstanceLoad(), 0.0)
    assert scheduler.schedule(ask(), 1.0).decode.info.instance_id == "d0", "the emptiest"
    fleet.inflight.release("r")
    for number in range(3):
        assert scheduler.schedule(ask(f"r{number}", tbt_slo_s=0.1), 1.0).decode.info.instance_id == "d1"
    probes = [
        scheduler.schedule(ask(f"s{number}", tbt_slo_s=0.1), PROBE_AFTER_S).decode.info.instance_id
        for number in range(3)
    ]
    assert probes == ["d0", "d1", "d1"], "it is measured again, by one request"


def test_a_probe_for_one_time_must_meet_the_other(fleet, scheduler):
    slow_prefills(fleet)
    for name in ("d0", "d1"):
        for _ in range(50):
            fleet.set_load(member(fleet, name), InstanceLoad(running_requests=10, mean_tbt_ms=900.0), 1000.0)
    with pytest.raises(Rejected):
        scheduler.schedule(ask(ttft_slo_s=5.0, tbt_slo_s=0.1), 1000.0)


def test_a_fetch_believed_slow_is_tried_again(fleet, scheduler):
    slow_fetches(fleet)

    def fetches(now_s: float, **changes) -> int:
        decision = scheduler.schedule(ask(block_keys=keys(*range(60)), **changes), now_s)
        fleet.inflight.release("r")
        return len(decision.fetches)

    assert fetches(TRANSFER_PROBE_AFTER_S) == 0
    due = next(minutes for minutes in range(30) if fetches(60.0 * minutes))
    assert 2 < due < 20
    assert [fetches(60.0 * due) for _ in range(4)] == [0, 0, 0, 0], "by one request"
    assert fetches(120.0 * due, ttft_slo_s=1.0) == 0, "not at the cost of an SLO"
    tried = next(minutes for minutes in range(due, 60) if fetches(60.0 * minutes, ttft_slo_s=30.0))
    assert tried == 2 * due, "though nothing was learned from the first"
    fleet.learn_transfers(member(fleet, "p0"), [(10**6, 10.0, None)], 60.0 * tried)
    fleet.learn_transfers(member(fleet, "p1"), [(10**6, 10.0, None)], 60.0 * tried)
    assert fetches(60.0 * tried) == 0, "it is still slow"


def test_an_instance_in_doubt_is_no_slower_than_by_computing(fleet, scheduler):
    """The fetches that are tried there now and then do not keep requests away."""
    slow_fetches(fleet)
    first = scheduler.schedule(ask("first", block_keys=keys(*range(60))), 1e4)
    assert first.doubts_transfer
    fleet.set_load(member(fleet, "p0"), InstanceLoad(pending_prefill_tokens=1000), 1e4)
    alike = scheduler.schedule(ask("alike", block_keys=keys(*range(100, 160))), 1e4)
    assert alike.prefill.info.instance_id == "p1"
    fleet.inflight.release("alike")
    other = scheduler.schedule(ask("other", block_keys=keys(*range(60)), exclude=frozenset({"p0"})), 1e4)
    assert (other.doubts_transfer, other.prefill.info.instance_id) == (True, "p1")
