"""Worlds of several regions: nothing is lost, nothing happens twice, and messages take their time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from pinyon_lab.simulator.regions.programs import Program, ProgramStep, Text, fresh_keys
from pinyon_lab.simulator.regions.settings import SYSTEMS, RoutingSystem, WorldSettings
from tests.long import usually
from tests.simulation.region_worlds import SMALL, USUAL, BreakableWorld, Repairs, troubled
from tests.simulation.worlds import ENGINE, MACHINE

TRIPS_S = {("us", "eu"): 0.1, ("us", "asia"): 0.2, ("eu", "asia"): 0.3}
ONE = {"us": 1, "eu": 1, "asia": 1}


class Chain:
    """Programs of several requests, each after the end of the one before, or all at once with ``together``."""

    def __init__(self, count: int, tokens: int = 40, output_tokens: int = 10, *, together: bool = False) -> None:
        self._count, self._tokens, self._output, self._together = count, tokens, output_tokens, together
        self.made = 0

    def program(self, rng: random.Random) -> Program:
        self.made += 1
        steps = []
        for place in range(self._count):
            prompt = Text().extended(self._tokens, fresh_keys(rng))
            steps.append(ProgramStep(-1 if self._together else place - 1, prompt.tokens, self._output, prompt.keys, ()))
        return Program(f"user {self.made}", tuple(steps))


def world_of(system: RoutingSystem | str, instances: dict[str, int] = ONE, repairs: Repairs = USUAL) -> BreakableWorld:
    settings, chosen = WorldSettings(instances, TRIPS_S), SYSTEMS[system] if isinstance(system, str) else system
    return BreakableWorld(settings, chosen, SMALL, MACHINE, ENGINE, repairs=repairs)


def played(
    world: BreakableWorld, region: str, source: Chain, clients: int = 1, until_s: float = 20.0
) -> BreakableWorld:
    world.add_clients(region, source, random.Random(1), clients)
    world.run(until_s, drain=True)
    world.check_over()
    return world


@pytest.mark.parametrize("batch", range(usually(2, long=5)))
def test_every_request_ends_once_whatever_breaks(batch: int) -> None:
    for seed in range(1_000 + 8 * batch, 1_000 + 8 * batch + usually(3, long=8)):
        troubled(seed)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_gets_through_trouble(name: str) -> None:
    system = replace(SYSTEMS[name], alone="us" if SYSTEMS[name].alone else "")
    troubled(77, system, 6)


def test_a_seed_has_one_history() -> None:
    assert troubled(5).world.served == troubled(5).world.served


# -- messages take their time


@pytest.mark.parametrize(("region", "there_and_back_s"), [("us", 0.0), ("eu", 0.1), ("asia", 0.2)])
def test_the_only_load_balancer_is_far_from_some(region: str, there_and_back_s: float) -> None:
    found = {name: played(world_of(name, {"us": 1}), region, Chain(3)).served for name in ("ll", "rr")}
    here = played(world_of("ll", {"us": 1}), "us", Chain(3)).served
    for served in found.values():
        extra = [far.ttft_s - near.ttft_s for far, near in zip(served, here, strict=False)]
        assert all(each == pytest.approx(there_and_back_s, abs=0.002) for each in extra)


def test_it_pushes_to_instances_that_are_far_too() -> None:
    served = played(world_of("rr"), "us", Chain(3), until_s=3.0).served
    times: dict[str, float] = {each.instance: each.ttft_s for each in served}
    assert times["eu-0"] - times["us-0"] == pytest.approx(0.1, abs=0.002)
    assert times["asia-0"] - times["us-0"] == pytest.approx(0.2, abs=0.002)


def test_a_load_balancer_of_ones_own_costs_nothing() -> None:
    served = played(world_of("skywalker"), "asia", Chain(3)).served
    assert {each.instance for each in served} == {"asia-0"}
    assert max(each.ttft_s for each in served) < 0.02


# -- forwarding


def test_only_what_has_no_room_goes_elsewhere() -> None:
    burst = Chain(12, 600, 60, together=True)
    world = played(world_of("skywalker"), "eu", burst, 2)
    regions = {each.instance for each in world.served if each.forwarded}
    assert world.counts["forwarded"] > 0
    assert regions <= {"us-0", "asia-0"}
    assert world.counts["twice forwarded"] == 0
    alone = played(world_of("region-local"), "eu", Chain(12, 600, 60, together=True), 2)
    assert not any(each.forwarded for each in alone.served)


def test_credits_keep_bursts_from_waiting_at_instances() -> None:
    def waiting(system: str) -> int:
        world = world_of(system, {"us": 2})
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, *(world.instances.waiting(name) for name in world.home))
            if not world.over:
                world.time.after(0.002, look)

        world.time.after(0.002, look)
        played(world, "us", Chain(24, 300, 40, together=True), 2, 6.0)
        return most

    assert waiting("pinyon") < waiting("skywalker")


# -- faults


def test_another_load_balancer_takes_over_and_gives_back() -> None:
    world = world_of("skywalker", {"us": 1, "eu": 1}, Repairs(takeover_s=1.0, notice_s=0.1))
    world.time.at(6.0, lambda: world.kill_door("us"))
    world.time.at(12.0, lambda: world.restore_door("us"))
    played(world, "us", Chain(2), 2)
    assert all(each.end == "finished" for each in world.served)

    def where(begin_s: float, end_s: float) -> set[str]:
        return {each.instance for each in world.served if begin_s < each.sent_s < end_s}

    assert where(0.0, 5.5) == {"us-0"}
    assert where(6.0, 6.9) == {"eu-0"}, "nobody pushes to the other one yet"
    assert where(7.5, 11.5) == {"us-0", "eu-0"}
    assert where(12.5, 20.0) == {"us-0"}, "it has its own again"


def test_a_region_that_is_cut_off_serves_its_own() -> None:
    world = world_of("skywalker", {"us": 1, "eu": 1})
    world.time.at(6.0, lambda: world.cut_off("eu"))
    played(world, "eu", Chain(2), 2)
    assert {each.end for each in world.served} == {"finished"}
    assert {each.instance for each in world.served} == {"eu-0"}


def test_nobody_is_served_while_the_only_load_balancer_is_down() -> None:
    world = world_of("ll", {"us": 1, "eu": 1})
    world.time.at(6.0, lambda: world.kill_door("us"))
    world.time.at(12.0, lambda: world.restore_door("us"))
    played(world, "eu", Chain(1), 1)
    assert all(each.end == "finished" for each in world.served)
    ends = [each.sent_s + each.e2e_s for each in world.served]
    assert not [end for end in ends if 6.1 < end < 12.0]
    assert [end for end in ends if end > 12.0]


# -- clients


def test_clients_have_one_program_under_way() -> None:
    world = world_of("skywalker", {"us": 2})
    source = Chain(3)
    most = _watched(world, source, clients=2)
    assert most == 2
    assert len(world.served) == 3 * source.made


def test_siblings_are_sent_at_once_children_after_their_parent() -> None:
    world = world_of("skywalker", {"us": 1})
    prompt = Text().extended(40, fresh_keys(random.Random(1)))
    steps = tuple(ProgramStep(after, 40, 10, prompt.keys, ()) for after in (-1, 0, 0, 1))

    class Once:
        def program(self, rng: random.Random) -> Program:
            return Program("u", steps)

    world.add_clients("us", Once(), random.Random(1), 1)
    world.run(5.0, drain=True)
    root, child, sibling, grandchild = sorted(world.served[:4], key=lambda each: each.number)
    assert child.sent_s == sibling.sent_s == root.sent_s + root.e2e_s
    assert grandchild.sent_s == child.sent_s + child.e2e_s


def _watched(world: BreakableWorld, source: Chain, clients: int) -> int:
    open_now: set[int] = set()
    most = 0
    send = world.send

    def counted(region: str, program: Program, place: int, ended: Callable[[bool], None]) -> None:
        nonlocal most
        open_now.add(id(program))
        kept.append(program)
        most = max(most, len(open_now))

        def over(answered: bool) -> None:
            if place == len(program.steps) - 1:
                open_now.discard(id(program))
            ended(answered)

        send(region, program, place, over)

    kept: list[Program] = []
    world.add_clients("us", source, random.Random(1), clients)
    for each in world.clients:
        each.send = counted
    world.run(10.0, drain=True)
    return most


def test_who_is_not_wanted_does_nothing() -> None:
    world = world_of("skywalker", {"us": 2})
    world.add_clients("us", Chain(1), random.Random(1), 4, lambda now_s: 0.0 if now_s < 10 else 4.0)
    world.run(20.0, drain=True)
    assert world.served
    assert min(each.sent_s for each in world.served) >= 10.0
