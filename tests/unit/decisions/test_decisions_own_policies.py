"""User-defined policies in the rooms where policies decide, derived from classes that allow it."""

from __future__ import annotations

import json
import math

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchRequest
from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Journal
from pinyon.core.policies import MODULES, Registry
from pinyon.core.request import Role
from pinyon.decisions import JOURNAL_TYPES, InstanceConfig, InstanceDecisions, journal_header, replay_journal
from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.target import Routed
from tests.own_policies import MODULE
from tests.unit.placement.conftest import make_fleet

CHOICES = {
    "eviction": f"{MODULE}:Newest",
    "batching": f"{MODULE}:Few:at_once=2",
    "service_order": f"{MODULE}:LastComes",
}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULES, MODULE)


def test_a_placement_policy() -> None:
    fleet = make_fleet(*((f"i{number}", Role.MIXED) for number in range(3)))
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(f"{MODULE}:AtEnd:end=last,distance=1"))
    decision = scheduler.decide(PlacementRequest("r", "m", 9), 0.0)
    assert (decision.prefill.info.instance_id, decision.policy) == ("i1", "at_end")
    scheduler.use(PLACEMENT_POLICIES.make(f"min_ttft;m={MODULE}:AtEnd:end=last"))
    assert scheduler.decide(PlacementRequest("r", "m", 9), 0.0).prefill.info.instance_id == "i2"
    assert PLACEMENT_POLICIES.with_default(f"{MODULE}:AtEnd;m=dualmap", "distance", 2) == (
        f"{MODULE}:AtEnd:distance=2;m=dualmap"
    )


def test_an_eviction_policy() -> None:
    policy = EVICTION_POLICIES.make(f"{MODULE}:Newest")
    policy.stored([1, 2, 3], 0.0, NO_TRAITS, [0, 1, 2])
    policy.pinned([2], 0.0)
    assert policy.victims(1, 1.0) == [3]
    assert (len(policy), 1 in policy, 2 in policy) == (1, True, False)


def test_a_service_order() -> None:
    order = SERVICE_ORDERS.make(f"{MODULE}:LastComes")
    for name in "abc":
        order.add(name, 0.0, 1.0, math.inf)
    assert list(order.turns(0.0)) == ["c", "b", "a"]
    order.take("c", 0.0)
    assert list(order) == ["a", "b"]


def test_routing_and_pushing() -> None:
    layer = Layer(PUSHING_RULES.make(f"{MODULE}:OneEach"), ROUTING_POLICIES.make(f"{MODULE}:ByLastName"))
    for name in "abc":
        layer.join(name)
    request = Routed(b"")
    for expected in "cba":
        target = layer.choose(request, 0.0)
        assert target is not None
        assert target.name == expected
        layer.sent(request, expected)
    assert layer.choose(request, 0.0) is None


def journal_of(config: InstanceConfig) -> list[str]:
    lines: list[str] = []
    header = journal_header(config, service="worker")
    journal = Journal(lambda line: lines.append(line + "\n"), lambda: 0.0, Codec(JOURNAL_TYPES), header)
    decisions = InstanceDecisions(config, journal)
    for number in range(3):
        decisions.admission.enqueue(BatchRequest(number, 20, 2))
    admitted = decisions.admission.admit(1.0)
    assert len(admitted) == 2, "the batching policy has two slots"
    for place, number in enumerate((1, 2)):
        decisions.steps.add_decode(number, 5, 1, [place])
    return lines


def test_a_worker_of_ones_own_policies_decides_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InstanceConfig(8, 16, 4, 64, 32, 2, 8, **CHOICES)
    lines = journal_of(config)
    assert replay_journal(lines).different == 0
    monkeypatch.delenv(MODULES)
    with pytest.raises(InvalidArgument, match=rf"{MODULE} may not be imported here: start the process with {MODULES}"):
        replay_journal(lines)


def test_a_journal_imports_nothing_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = journal_of(InstanceConfig(8, 16, 4, 64, 32, 2, 8, **CHOICES))
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    with pytest.raises(InvalidArgument, match="antigravity may not be imported here"):
        replay_journal([line.replace(MODULE, "antigravity") for line in lines])
    header = json.dumps(
        {"pinyon_journal": 2, **journal_header(InstanceConfig(8, 16, 4, 64, 32, 2, 8), service="worker")}
    )
    switch = '{"t":0.1,"m":"eviction","c":"switch","a":["antigravity:Newest",1.0],"r":null}'
    told = replay_journal([f"{header}\n", f"{switch}\n"])
    assert told.differences == ["line 2: eviction.switch: was {'r': None}, is {'e': 'ValueError'}"]
    assert imported == []


@pytest.mark.parametrize(
    ("registry", "base"),
    [
        (PLACEMENT_POLICIES, "pinyon.placement.interface.PlacementPolicy"),
        (EVICTION_POLICIES, "pinyon.eviction.interface.EvictionPolicy"),
        (BATCHING_POLICIES, "pinyon.batching.interface.Batching"),
        (SERVICE_ORDERS, "pinyon.batching.interface.ServiceOrder"),
        (ROUTING_POLICIES, "pinyon.routing.interface.TargetPolicy"),
        (PUSHING_RULES, "pinyon.routing.interface.PushingRule"),
    ],
)
def test_an_error_names_what_is_lacking_and_the_base_class(registry: Registry[object], base: str) -> None:
    with pytest.raises(ValueError, match=f"the class has no .* implements {base}, and may derive from it"):
        registry.checked(f"{MODULE}:End")
