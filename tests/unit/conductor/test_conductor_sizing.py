"""The number of instances that a conductor asks for."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.request import Role
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.scaling import ScalingSettings
from pinyon.placement.scheduler import Scheduler
from pinyon.runtime.telemetry import Telemetry
from pinyon_lab.simulator.prefill_reference import KnownPrefillCost
from services.conductor.membership import Membership
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer
from services.conductor.sizing import GONE_S, Sizing
from tests.unit.placement.conftest import info, make_fleet


class World:
    def __init__(self, *instances: tuple[str, Role], inflight_max: int = 100, ttft_slo_s: float = 2.0) -> None:
        self.fleet = make_fleet(*instances, inflight_max=inflight_max)
        self.now_s, self.registry = 0.0, CollectorRegistry()
        metrics = ConductorMetrics(self.registry, self.fleet, Membership(self.fleet, self.clock, 3.0, 0.0))
        settings = ScalingSettings(1, 4, slo_s=2.0, hold_s=0.0)
        self.sizing = Sizing(self.fleet, settings, metrics.instances_wanted, self.clock)
        scheduler = Scheduler(self.fleet, PLACEMENT_POLICIES.make("least_loaded"))
        self.placer = Placer(
            scheduler,
            self.fleet.inflight,
            metrics,
            Telemetry("conductor", "c"),
            self.clock,
            ttft_slo_s=ttft_slo_s,
            sizing=self.sizing,
        )

    def clock(self) -> float:
        return self.now_s

    @property
    def wanted(self) -> float | None:
        return self.registry.get_sample_value("pinyon_conductor_instances_wanted", {"model": "m"})

    def ask(self, number: int, tokens: int, **more: int) -> None:
        request = conductor_pb2.ScheduleRequest(request_id=f"r{number}", model="m", prompt_tokens=tokens, **more)
        self.placer.answer(request, conductor_pb2.ScheduleResponse())


def test_more_are_wanted_where_requests_find_no_place_in_time() -> None:
    world = World(("p0", Role.PREFILL), ("d0", Role.DECODE))
    world.sizing.look()
    assert world.wanted == 1, "as many as there are"
    for number in range(40):
        world.ask(number, 3_000)
    world.now_s = 5.0
    world.sizing.look()
    assert world.wanted == 2
    world.now_s = 30.0
    world.sizing.look()
    assert world.wanted == 2, "it stays until something else is decided"


def test_who_is_refused_for_want_of_room_counts_as_late() -> None:
    world = World(("p0", Role.MIXED), inflight_max=1)
    world.sizing.look()
    for number in range(40):
        world.ask(number, 10)
    world.now_s = 5.0
    world.sizing.look()
    assert world.wanted == 2


def test_an_idle_cluster_wants_one_fewer_an_empty_one_nothing() -> None:
    world = World(("p0", Role.MIXED), ("p1", Role.MIXED), ("p2", Role.MIXED))
    world.sizing.look()
    world.ask(1, 10)
    world.now_s = 40.0
    world.sizing.look()
    assert world.wanted == 2
    for state in world.fleet.instances():
        world.fleet.set_load(state, InstanceLoad(draining=True), world.now_s)
    world.sizing.look()
    assert world.wanted is None


def test_a_model_that_nobody_serves_is_not_counted() -> None:
    world = World(("p0", Role.MIXED))
    world.sizing.refused("nobody's")
    world.sizing.look()
    assert world.registry.get_sample_value("pinyon_conductor_instances_wanted", {"model": "nobody's"}) is None


def test_who_is_lost_is_still_wanted() -> None:
    world = World(*((f"p{number}", Role.MIXED) for number in range(4)))
    world.sizing.look()
    for number in range(1, 4):
        world.fleet.leave(f"p{number}")
    world.ask(1, 4_000)  # the remaining instances are overloaded
    world.now_s = 5.0
    world.sizing.look()
    assert world.wanted == 4
    world.now_s = 300.0
    world.fleet.inflight.expire(world.now_s)
    world.sizing.look()
    assert world.wanted == 4, "it is idle, and the others are to come back"
    world.fleet.leave("p0")
    world.sizing.look()
    assert world.wanted == 4
    world.now_s += GONE_S + 1
    world.sizing.look()
    assert world.wanted is None


def test_nothing_is_said_while_instances_are_still_registering() -> None:
    world = World(("p0", Role.MIXED))
    world.fleet.settle(True)
    world.sizing.look()
    assert world.wanted is None
    for number in range(1, 4):
        world.fleet.join(info(f"p{number}", Role.MIXED), 0.0)
    world.fleet.settle(False)
    world.sizing.look()
    assert world.wanted == 4


@pytest.mark.parametrize("ttft_slo_s", [2.0, 0.0])
def test_what_no_instance_more_would_help_asks_for_none(ttft_slo_s: float) -> None:
    """A prompt alone takes longer than its own limit, or than the conductor's default, while none waits.

    If that limit is off, instances are added by the scaler's SLO."""
    world = World(("p0", Role.MIXED), ttft_slo_s=ttft_slo_s)
    for state in world.fleet.instances():
        state.prefill_model = KnownPrefillCost((0.0, 1e-3, 0.0))
        state.learned()
    world.sizing.look()
    for number in range(40):
        world.ask(number, 4_000)
        world.ask(100 + number, 100, ttft_slo_ms=1)
        world.fleet.inflight.release(f"r{number}")
    world.now_s = 5.0
    world.sizing.look()
    assert world.wanted == 1


def test_an_impossible_time_between_tokens_asks_for_no_instances() -> None:
    world = World(("p0", Role.MIXED))
    for state in world.fleet.instances():
        world.fleet.set_load(state, InstanceLoad(running_requests=1, mean_tbt_ms=50.0), 0.0)
    world.sizing.look()
    for number in range(40):
        world.ask(number, 10, tbt_slo_ms=1)
    assert not world.fleet.inflight.decodes, "all were refused"
    world.now_s = 5.0
    world.sizing.look()
    assert world.wanted == 1


def test_work_too_long_for_idle_instances_asks_for_none() -> None:
    world = World(("p0", Role.MIXED), ttft_slo_s=0.0)
    state = world.fleet.get("p0")
    assert state is not None
    state.prefill_model = KnownPrefillCost((0.0, 1e-3, 0.0))
    state.learned()
    for number in range(200):
        world.sizing.look()
        world.ask(number, 3_000)
        world.fleet.inflight.release(f"r{number}")
        world.now_s += 0.2
    assert world.wanted == 1
