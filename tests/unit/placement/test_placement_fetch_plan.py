"""Fetch plans that a worker accepts, however the blocks lie."""

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.core.request import Role
from pinyon.messages.orders import fetch_spans_from_proto
from pinyon.messages.placement import fill_placement
from pinyon.placement.fetch_plan import STORE_LEAD_BLOCKS, FetchPlanner
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.unit.placement.conftest import DECODE, PREFILL, STORE, hold, info, keys, make_fleet, member


def place(blocks: int, **held):
    """Places a prompt whose blocks are held as given, on an instance to which fetching costs nothing."""
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE), *((name, STORE) for name in held))
    for name, numbers in held.items():
        hold(fleet, name, numbers)
    for _ in range(50):
        fleet.learn_transfers(member(fleet, "p0"), [(10**9, 1e-4, None)], 0.0)
    request = PlacementRequest("r", "m", 16 * blocks + 1, keys(*range(blocks)), 1)
    return fleet, Scheduler(fleet, KvCacheCentric()).schedule(request, 0.0)


@pytest.mark.parametrize("spans", [64, 65, FETCH_SPANS_MAX - 1, FETCH_SPANS_MAX, FETCH_SPANS_MAX + 1, 400])
def test_a_prompt_whose_holders_alternate_is_taken_by_the_worker(spans):
    _, decision = place(spans, s0=range(0, spans, 2), s1=range(1, spans, 2))
    assert len(decision.fetches) == min(spans, FETCH_SPANS_MAX)
    message = common_pb2.Placement()
    fill_placement(message, decision)
    taken = fetch_spans_from_proto(message.fetches, spans)
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


def sources_of(readers: list[str], *holders: tuple[str, Role], **addresses: str) -> list[str]:
    """Returns the source from which each reader would fetch a block that all holders have."""
    fleet = make_fleet()
    for name, role in (*((reader, PREFILL) for reader in readers), *holders):
        fleet.join(info(name, role, address=addresses.get(name, f"{name}:1")), 0.0)
    for name, _ in holders:
        hold(fleet, name, range(1))
    (pool,) = fleet.pools("m")
    match = fleet.index.match(keys(0), 1, fleet.inflight.expected)
    plans = [FetchPlanner(pool, match).plan(member(fleet, reader), 0, 1) for reader in readers]
    return [fetch.source.info.instance_id for (fetch,) in plans]


def test_stores_before_peers_and_the_own_host_first():
    stores = ("s0", STORE), ("s1", STORE), ("d0", DECODE)
    found = sources_of(["p0", "p1"], *stores, p0="a:1", s0="b:2", p1="b:1", s1="a:2", d0="a:3")
    assert found == ["s1", "s0"]
    assert sources_of(["p0"], ("d0", DECODE), ("s0", STORE), p0="a:1", d0="a:2") == ["s0"]


def test_workers_help_a_store_that_is_read_much_more():
    fleet = make_fleet(("p0", PREFILL), ("d0", DECODE), ("s0", STORE))
    for name in "s0", "d0":
        hold(fleet, name, range(1))

    def source() -> str:
        (pool,) = fleet.pools("m")
        match = fleet.index.match(keys(0), 1, fleet.inflight.expected)
        (fetch,) = FetchPlanner(pool, match).plan(member(fleet, "p0"), 0, 1)
        return fetch.source.info.instance_id

    store = member(fleet, "s0")
    assert source() == "s0"
    store.inflight_reads = STORE_LEAD_BLOCKS
    assert source() == "s0"
    store.inflight_reads += 1
    assert source() == "d0"
    member(fleet, "d0").inflight_reads = 1
    assert source() == "s0"


def test_readers_of_one_block_spread_over_its_holders():
    """The names do not matter, although a decode instance's sorts before all prefill instances'."""
    readers = [f"p{number}" for number in range(4)]
    fleet = make_fleet(("d0", DECODE), *((reader, PREFILL) for reader in readers))
    for name in ("d0", *readers):
        hold(fleet, name, range(1))
    (pool,) = fleet.pools("m")
    match = fleet.index.match(keys(0), 1, fleet.inflight.expected)
    found = {
        FetchPlanner(pool, match).plan(member(fleet, reader), 0, 1)[0].source.info.instance_id for reader in readers
    }
    assert len(found) > 2


def test_an_address_without_a_host_is_on_no_host():
    holders = ("d0", DECODE), ("s1", STORE), ("s0", STORE)
    assert sources_of(["p0"], *holders, p0="p0", s0="s0") == sources_of(["p0"], *holders, p0="p0") == ["s1"]
