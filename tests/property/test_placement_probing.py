"""An idle instance soon takes a request again, whatever was measured, and its new measurement soon counts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.errors import Rejected
from pinyon.core.request import Role
from pinyon.placement.admission import PROBE_AFTER_S
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.long import usually
from tests.unit.placement.conftest import make_fleet, member

SECONDS = st.sampled_from((0.0, 1e-6, 0.01, 1.0, 30.0, 3600.0)) | st.floats(0, 3600)
HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(0, 100_000), st.integers(0, 100_000), SECONDS),
        st.tuples(st.just("transfer"), st.integers(0, 10**12), st.just(0), SECONDS),
        st.tuples(st.just("decode"), st.integers(0, 500), st.just(0), SECONDS),
        st.tuples(st.just("ask"), st.integers(1, 8000), st.just(0), SECONDS),
    ),
    max_size=30,
)


def live(fleet, scheduler, history) -> float:
    """Plays the history on ``x0``, one event a second; returns the time of its end, with nothing in flight."""
    state = member(fleet, "x0")
    now_s = 0.0
    for what, size, prefix, seconds in history:
        now_s += 1.0
        if what == "prefill":
            fleet.learn_prefills(state, [(size, prefix, seconds)], now_s)
        elif what == "transfer":
            fleet.learn_transfers(state, [(size, seconds, None)], now_s)
        elif what == "decode":
            fleet.set_load(state, InstanceLoad(running_requests=size, mean_tbt_ms=seconds * 1e3), now_s)
        else:
            try:
                scheduler.schedule(PlacementRequest("before", "m", size, ttft_slo_s=seconds), now_s)
            except Rejected:
                continue
            fleet.inflight.release("before")
    fleet.set_load(state, InstanceLoad(), now_s)
    return now_s


@given(HISTORY, st.integers(1, 8000), st.floats(1e-6, 60.0), st.floats(0.0, 1.0))
@settings(max_examples=usually(25, long=150), deadline=None)
def test_an_idle_instance_takes_a_request_within_a_bounded_time(history, tokens, ttft_slo_s, tbt_slo_s):
    fleet = make_fleet(("x0", Role.MIXED))
    scheduler = Scheduler(fleet, KvCacheCentric())
    now_s = live(fleet, scheduler, history)
    for number in range(3):  # again, although its measurement never arrives
        now_s += PROBE_AFTER_S
        decision = scheduler.schedule(PlacementRequest(f"r{number}", "m", tokens, b"", 1, ttft_slo_s, tbt_slo_s), now_s)
        assert decision.prefill is decision.decode is member(fleet, "x0")
        fleet.inflight.release(f"r{number}")


@given(st.integers(1, 300), st.floats(20.0, 1000.0))
@settings(max_examples=40, deadline=None)
def test_a_slow_spell_is_over_when_a_few_probes_were_fast(samples, slower):
    tokens, fast_s = 1000, 0.1
    fleet = make_fleet(("x0", Role.MIXED))
    scheduler = Scheduler(fleet, KvCacheCentric())
    state = member(fleet, "x0")
    for number in range(samples):
        fleet.learn_prefills(state, [(tokens, 0, slower * fast_s)], float(number))
    now_s, answered = float(samples), 0
    while answered < 50 and now_s < samples + 120.0:  # a client that asks all the time
        now_s += 0.5
        try:
            scheduler.schedule(PlacementRequest("r", "m", tokens, ttft_slo_s=4 * fast_s), now_s)
        except Rejected:
            continue
        fleet.inflight.release("r")
        fleet.learn_prefills(state, [(tokens, 0, fast_s)], now_s)
        answered += 1
    assert answered == 50
