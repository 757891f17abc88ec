"""Cases of pinyon's own placement, worked by hand."""

from __future__ import annotations

import pytest

from pinyon.core.errors import Rejected
from pinyon.core.layout import KvLayout
from pinyon.placement.costs import Costs, CostTerms
from pinyon.placement.fleet import Fleet
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.placement.transfer_cost import TransferCostModel
from pinyon_lab.policies.placement import LabPinyon, LabPinyonSettings
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from tests.unit.placement.conftest import MIXED, STORE, hold, id_of_pair, info, keys, make_fleet, member

NOW_S = 50.0
BY_COST = LabPinyonSettings(pair=False)
GIB_S = 1 << 30


def queues() -> Fleet:
    """Returns a fleet in which a token takes 0.1 ms.

    At ``a`` seven prompts wait that take 4 s each, and nothing is computed. At ``b`` nothing waits, and the prompt
    being computed takes 6 s more."""
    fleet = make_fleet()
    for name in "ab":
        fleet.join(info(name, MIXED, short_first=True, max_context_tokens=0, capacity_blocks=0), 0.0)
        state = member(fleet, name)
        state.prefill_model = KnownPrefillCost((0.0, 1e-4, 0.0))
        state.learned()
        state.prefill_learned_s = NOW_S
    for _ in range(7):
        fleet.loads.count(member(fleet, "a").row, 4_000_000)
    fleet.loads.ends_s[member(fleet, "b").row] = NOW_S + 6.0
    return fleet


def placed(
    fleet: Fleet, policy: LabPinyon, limit_s: float, *, named: bool = True, request_id: str = "r"
) -> PlacementDecision:
    request = PlacementRequest(request_id, "m", 10_000, b"", 8, ttft_slo_s=limit_s, ttft_slo_named=named)
    return Scheduler(fleet, policy).schedule(request, NOW_S)


def test_others_time_decides_among_those_that_are_in_time() -> None:
    """A prompt of a second goes first at ``a``, which costs 1 + 7; at ``b`` it costs 6 + 1, and is late at 5 s."""
    assert placed(queues(), LabPinyon(BY_COST), 0.0).prefill.info.instance_id == "b"
    assert placed(queues(), LabPinyon(BY_COST), 7.5).prefill.info.instance_id == "b"
    for named in (True, False):
        decision = placed(queues(), LabPinyon(BY_COST), 5.0, named=named)
        assert decision.prefill.info.instance_id == "a"
        assert decision.ttft_s == pytest.approx(1.0)
    with pytest.raises(Rejected, match=r"exceeds the request's own limit of 0\.9 s"):
        placed(queues(), LabPinyon(BY_COST), 0.9)


def test_a_pair_has_nothing_that_would_be_late_there() -> None:
    """A later fetch of blocks computed here would take 10 s, so the pair may cost as much more."""
    fleet = queues()
    fleet.join(info("c", MIXED, short_first=True, max_context_tokens=0, capacity_blocks=0), 0.0)
    fleet.loads.ends_s[member(fleet, "c").row] = NOW_S + 60.0
    request_id = id_of_pair(fleet, {1, 2})
    for name in "ab":
        state = member(fleet, name)
        state.transfer_model = TransferCostModel(((10.0, 0.0),) * 4)
        state.transfers_learned()
    for _ in range(2):
        fleet.loads.count(member(fleet, "a").row, 4_000_000, -1)
    for policy, limit_s, chosen in ((LabPinyon(), 7.5, "b"), (LabPinyon(BY_COST), 7.5, "a"), (LabPinyon(), 5.0, "a")):
        assert placed(fleet, policy, limit_s, request_id=request_id).prefill.info.instance_id == chosen
        fleet.inflight.release(request_id)


def hosts(network: float, host: float) -> Fleet:
    """Returns three idle instances on three hosts, the last with a store node of a thousand blocks; speeds in GiB/s."""
    fleet = make_fleet()
    layout = KvLayout(28, 4, 128, 16, "float16")
    for name in "abc":
        fleet.join(info(name, MIXED, layout=layout, max_context_tokens=0, capacity_blocks=0), 0.0)
        state = member(fleet, name)
        state.prefill_model = KnownPrefillCost((0.0, 127e-6, 0.0))
        near, far = (2e-4, 1 / (host * GIB_S)), (1e-3, 1 / (network * GIB_S))
        state.transfer_model = TransferCostModel((near, far, near, (1e-3, 1 / (3 * GIB_S))))
        state.learned()
        state.transfers_learned()
    fleet.join(info("store", STORE, address="c:9"), 0.0)
    hold(fleet, "store", range(1, 1001))
    return fleet


@pytest.mark.parametrize("policy", [LabPinyon(BY_COST), LabPinyon()], ids=["cost", "pair"])
@pytest.mark.parametrize(("network", "host"), [(12.5, 100.0), (1.0, 20.0), (0.4, 20.0)])
def test_who_is_on_the_host_of_the_source_fetches_fastest(policy: LabPinyon, network: float, host: float) -> None:
    """The 16,000 tokens of 57,344 bytes take 2 s to compute, and 2.1 s over the slowest network."""
    fleet = hosts(network, host)
    request = PlacementRequest("r", "m", 16_010, keys(*range(1, 1001)), 8)
    decision = Scheduler(fleet, policy).schedule(request, 1.0)
    assert decision.prefill.info.instance_id == "c"
    assert sum(each.block_count for each in decision.fetches) == 1000
    assert decision.transfer_s == pytest.approx(2e-4 + 16_000 * 57_344 / (host * GIB_S))


def test_a_neighbour_that_computes_for_another_model_is_none() -> None:
    """The source is no neighbour of itself either: it holds what it would fetch."""
    fleet = hosts(1.0, 20.0)
    fleet.leave("c")
    fleet.join(info("other", MIXED, model="n", address="c:2"), 0.0)
    (pool,) = fleet.pools("m")
    request = PlacementRequest("r", "m", 16_010, keys(*range(1, 1001)), 8)
    match = fleet.index.match(request.block_keys, 1000)
    costs = Costs(CostTerms(1.0, True, True), request, pool, match, 1.0)
    over_the_network_s = 1e-3 + 16_000 * 57_344 / GIB_S
    assert list(costs.columns.transfer_s)[:2] == pytest.approx([over_the_network_s] * 2)


@pytest.mark.parametrize(
    ("slower", "decoding", "together", "chosen"),
    [
        (1.05, (1, 0, 0), True, "a"),
        (1.05, (3, 0, 0), True, "b"),
        (1.05, (3, 1, 0), True, "b"),
        (1.05, (3, 2, 0), True, "a"),
        (1.30, (9, 0, 0), True, "a"),
        (1.05, (30, 29, 0), True, "a"),
        (1.05, (30, 20, 0), True, "b"),
        (1.05, (3, 0, 60), True, "a"),
        (1.05, (3, 0, 0), False, "a"),
    ],
)
def test_nearly_equal_instances_share_what_decodes_there(
    slower: float, decoding: tuple[int, int, int], together: bool, chosen: str
) -> None:
    """``b`` was measured to be slower than ``a``; ``c`` is far slower."""
    fleet = make_fleet()
    fleet.together = together
    for name, token_s, requests in zip("abc", (1e-4, slower * 1e-4, 1e-3), decoding, strict=True):
        fleet.join(info(name, MIXED, max_context_tokens=0, capacity_blocks=0), 0.0)
        state = member(fleet, name)
        state.prefill_model = KnownPrefillCost((0.0, token_s, 0.0))
        state.learned()
        state.decodes_changed(requests, 0)
        state.prefill_learned_s = NOW_S
    policy = LabPinyon(LabPinyonSettings(pair=False))
    assert placed(fleet, policy, 0.0).prefill.info.instance_id == chosen
