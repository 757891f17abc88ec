"""A policy for each model, as one setting."""

import pytest

from pinyon.core.request import Role
from pinyon.placement.policies import MODELS_MAX, PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.unit.placement.conftest import info, make_fleet


def policy_of(scheduler: Scheduler, model: str) -> str:
    return scheduler.decide(PlacementRequest("r", model, 9), 0.0).policy


def test_each_model_has_its_own_and_others_the_first():
    fleet = make_fleet()
    for model in ("a", "b", "c"):
        for number in range(2):
            fleet.join(info(f"{model}{number}", Role.MIXED, model=model), 0.0)
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make("min_ttft; a = dualmap:share=1 ;b=preble"))
    assert [policy_of(scheduler, model) for model in "abc"] == ["dualmap", "preble", "min_ttft"]
    decision = scheduler.decide(PlacementRequest("r", "a", 9), 0.0)
    assert scheduler.moves(PlacementRequest("r", "a", 9), decision, fleet.inflight.waiting, 0.0) == []
    scheduler.use(PLACEMENT_POLICIES.make("least_loaded;c=random"))
    assert [policy_of(scheduler, model) for model in "abc"] == ["least_loaded", "least_loaded", "random"]


def test_an_option_for_all_that_have_it():
    choice = "dualmap:share=1;a=min_ttft;b=cache_affinity:seed=3;c=dualmap"
    assert PLACEMENT_POLICIES.with_default(choice, "seed", 7) == (
        "dualmap:share=1,seed=7;a=min_ttft;b=cache_affinity:seed=3;c=dualmap:seed=7"
    )


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        ("min_ttft;", ";MODEL=POLICY"),
        ("min_ttft;a", ";MODEL=POLICY"),
        ("min_ttft;=preble", ";MODEL=POLICY"),
        ("min_ttft;a=preble;a=random", "once for each"),
        ("min_ttft;a=nonsense", "known: "),
        ("min_ttft;a=preble:share=9", "share must be"),
        ("nonsense;a=preble", "known: "),
        ("min_ttft" + "".join(f";m{number}=random" for number in range(MODELS_MAX + 1)), "at most"),
    ],
)
def test_what_is_wrong_is_said(choice, word):
    for use in (PLACEMENT_POLICIES.make, PLACEMENT_POLICIES.checked):
        with pytest.raises(ValueError, match=word):
            use(choice)


def test_who_waits_is_known_where_the_policy_moves_things():
    for choice, known in (("dualmap", True), ("min_ttft", False)):
        fleet = make_fleet(*((f"p{number}", Role.MIXED) for number in range(2)))
        scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(choice))
        requests = [PlacementRequest(f"r{number}", "m", 9) for number in range(6)]
        where = {request.request_id: scheduler.schedule(request, 1.0).prefill for request in requests}
        state = where["r0"]
        there = [request for request in requests if where[request.request_id] is state]
        assert [each.request for each in fleet.inflight.waiting(state)] == (there if known else [])
        fleet.inflight.begin_prefill("r0", state, 2.0)
        assert [each.request for each in fleet.inflight.waiting(state)] == (there[1:] if known else [])
