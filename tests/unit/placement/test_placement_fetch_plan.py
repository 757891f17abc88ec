"""Plans are such as a worker takes, however the blocks lie."""

import pytest

from pinyon.core.fetch_span import FETCH_SPANS_MAX
from pinyon.messages.fetch_span import fetch_spans_from_proto
from pinyon.messages.placement import placement_to_proto
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.unit.placement.conftest import DECODE, PREFILL, STORE, hold, keys, make_fleet, member


def place(blocks: int, **held):
    """A prompt whose blocks are held as said, on an instance to which fetching costs nothing."""
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE), *((name, STORE) for name in held))
    for name, numbers in held.items():
        hold(fleet, name, numbers)
    for _ in range(50):
        fleet.learn_transfer(member(fleet, "p0"), 10**9, 1e-6, 0.0)
    request = PlacementRequest("r", "m", 16 * blocks + 1, keys(*range(blocks)), 1)
    return fleet, Scheduler(fleet, KvCacheCentric()).schedule(request, 0.0)


@pytest.mark.parametrize("spans", [64, 65, FETCH_SPANS_MAX - 1, FETCH_SPANS_MAX, FETCH_SPANS_MAX + 1, 400])
def test_a_prompt_whose_holders_alternate_is_taken_by_the_worker(spans):
    _, decision = place(spans, s0=range(0, spans, 2), s1=range(1, spans, 2))
    assert len(decision.fetches) == min(spans, FETCH_SPANS_MAX)
    taken = fetch_spans_from_proto(placement_to_proto(decision).fetches, spans)
    assert [span.source_id for span in taken[:3]] == ["s0", "s1", "s0"]


def test_predicted_times_know_what_is_left_to_compute():
    blocks = FETCH_SPANS_MAX + 100
    fleet, decision = place(blocks, s0=range(0, blocks, 2), s1=range(1, blocks, 2))
    p0 = member(fleet, "p0")
    assert decision.reused_blocks == FETCH_SPANS_MAX
    assert decision.prefill_s == pytest.approx(p0.prefill_model.predict_s(16 * blocks + 1, 16 * FETCH_SPANS_MAX))


def test_many_holders_of_the_same_are_one_span():
    blocks = 400
    _, decision = place(blocks, s0=range(blocks), s1=range(0, blocks, 2), s2=range(0, blocks, 3))
    assert len(decision.fetches) == 1


def test_runs_that_one_source_bridges_cost_no_spans():
    blocks = 500
    _, decision = place(blocks, s0=range(blocks - 2), s1=range(0, blocks, 2), s2=range(blocks - 2, blocks))
    assert [(span.first_block, span.block_count) for span in decision.fetches] == [(0, blocks - 2), (blocks - 2, 2)]
