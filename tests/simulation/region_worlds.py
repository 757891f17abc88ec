"""Random worlds of several regions in which everything goes wrong."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from pinyon.core.request import Role
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon.routing.target import Report
from pinyon_lab.simulator.attempt import SimRequest
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule
from pinyon_lab.simulator.regions.calls import ClientCall
from pinyon_lab.simulator.regions.chats import ChatSettings, RegionChatSource, SharedTexts
from pinyon_lab.simulator.regions.doors import Door
from pinyon_lab.simulator.regions.programs import Program, RegionProgramSource, Text, fresh_keys
from pinyon_lab.simulator.regions.settings import GLOBAL_VIEW, RoutingSystem, WorldSettings
from pinyon_lab.simulator.regions.workloads import TreeSettings, TreeSource
from pinyon_lab.simulator.regions.world import RegionsWorld
from pinyon_lab.simulator.world import Faults
from tests.simulation.leftovers import check_idle
from tests.simulation.worlds import BLOCK, ENGINE, MACHINE, Misfortune

NAMES = ("us", "eu", "asia", "moon")
POLICIES = ("round_robin", "least_loaded", "consistent_hash", "cache_aware", "skywalker", GLOBAL_VIEW)
PUSHING = ("blind", "outstanding:limit=2", "pending", "pending:credits=false", "pending:queue=0,burst=1")
SMALL = ClusterSettings(
    (Role.MIXED,),
    BLOCK,
    64 * BLOCK,
    max_batch=16,
    step_tokens=256,
    chunk_tokens=128,
    active_prefills=3,
    max_prefills=64,
)
SHORT = ChatSettings(
    prompt_mean=60, prompt_sigma=0.8, answer_mean=20, answer_sigma=0.8, again=0.5, long_share=0.1, long_again=0.8,
    users=5, skew=1.0, own=0.4, regional=0.2, worldwide=0.2, openings=2, context_max=300,
)  # fmt: skip

AGAIN_S = 1.0
"""The time until a client that found no load balancer looks for one again."""
FORGIVEN_S = 1.0
"""The time until a call may use again what it broke at last."""


@dataclass(frozen=True, slots=True)
class Repairs:
    """The ways in which a world gets over what breaks."""

    notice_s: float = 0.5
    """The time until a broken connection is noticed, and what it carried is sent again."""
    takeover_s: float = 2.0
    """The time until a dead load balancer's instances belong to the nearest live one (§4.2)."""
    tries: int = 16
    """The number of times that a request is tried where its way breaks."""


@dataclass(slots=True)
class Way:
    """The way of a call, as far as it may break."""

    epoch: int = 0
    """A number that grows whenever the way breaks, so that events of the old way are ignored."""
    tries: int = 0
    front: str = ""
    """The region of the load balancer to which the client sent the call; "": none."""


USUAL = Repairs()


class BreakableWorld(RegionsWorld):
    """A world in which instances and load balancers die, and regions are cut off."""

    def __init__(
        self,
        settings: WorldSettings,
        system: RoutingSystem,
        instance: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        faults: Faults | None = None,
        repairs: Repairs = USUAL,
    ) -> None:
        self.repairs = repairs
        self._ways: defaultdict[int, Way] = defaultdict(Way)
        self._dead: set[str] = set()
        """The regions whose load balancers are dead."""
        self._cut: set[str] = set()
        super().__init__(settings, system, instance, machine, engine, faults)

    # -- faults

    def kill(self, name: str) -> None:
        """Kills an instance with all it holds; its requests go on elsewhere."""
        instances, lost = self.instances, []
        if instances._members.remove(name) is not None:
            lost = list(instances._at.pop(name).values())
        for request in lost:
            if request.attempt is not None:
                instances._attempts.tear_down(request.attempt)
        self.doors[self.owners[name]].layers.local.set_live(name, False)  # connections to it break at once
        for request in lost:
            call = self.calls[request.number]
            self._broken(call, len(call.hops))

    def boot(self, name: str) -> None:
        """Starts an instance again, empty."""
        if self.instances.engine(name) is None:
            self.instances.boot(name)
            for key in [key for key in self.instances._received if key[0] == name]:
                del self.instances._received[key]
            door = self.doors[self.owners[name]]
            if self._lives(door):
                self.join(door, name)
                door.pump()

    def kill_door(self, region: str) -> None:
        """Kills a load balancer: clients go to the next one, which takes over its instances some time later."""
        if region in self._dead:
            return
        self._dead.add(region)
        self.doors[region]._begin()
        for call in list(self.calls.values()):
            if self._ways[call.number].front == region:
                self._broken(call, 0)
            elif any(hop.name == region for hop in call.hops):
                self._broken(call, 1)
        self.time.after(self.repairs.takeover_s, lambda: self._take_over(region))

    def _take_over(self, region: str) -> None:
        """Gives the instances of a load balancer to the nearest live one, if it is still dead (§4.2)."""
        near = [door for door in self.doors.values() if self._lives(door)]
        if region not in self._dead or not near:
            return
        door = min(near, key=lambda each: self.distance(region, each))
        for name, owner in self.owners.items():
            if owner == region:
                self._adopt(door, name)

    def restore_door(self, region: str) -> None:
        """Restores a load balancer, and gives it its own instances, and those that no other took over."""
        if region not in self._dead:
            return
        self._dead.remove(region)
        door = self.doors[region]
        self.meet(door)
        for name, home in self.home.items():
            owner = self.doors[self.owners[name]]
            if (self.system.alone or home) == region or not self._lives(owner):
                if owner is not door:
                    owner.layers.local.leave(name)
                self._adopt(door, name)

    def _adopt(self, door: Door, name: str) -> None:
        self.owners[name] = door.region
        if self.instances.engine(name) is not None:
            self.join(door, name)

    def _lives(self, door: Door) -> bool:
        return door.region not in self._dead

    def cut_off(self, region: str) -> None:
        """Cuts off a region: nothing gets out of it or into it until the cut is healed."""
        self._cut.add(region)
        for call in list(self.calls.values()):
            kept = self._reach(call)
            if kept >= 0:
                self._broken(call, kept)

    def heal(self, region: str) -> None:
        self._cut.discard(region)

    def reaches(self, one: str, other: str) -> bool:
        """Returns whether messages get through."""
        return one == other or (one not in self._cut and other not in self._cut)

    def _reach(self, call: ClientCall) -> int:
        """Returns the number of the call's load balancers before the cut, or -1 if its path is whole."""
        front = self._ways[call.number].front
        if not front:
            return -1
        stops = [call.region, front]
        stops += [self.home.get(hop.name, hop.name) for hop in call.hops]
        for place, (one, other) in enumerate(pairwise(stops)):
            if not self.reaches(one, other):
                return place
        return -1

    # -- ways that break: the part of a call's way that is left sends it on again, after the time that noticing takes

    def _broken(self, call: ClientCall, kept: int) -> None:
        """Breaks a call's way but for its first ``kept`` load balancers, the last of which sends it on again. 0: the
        client begins anew."""
        way = self._ways[call.number]
        self.counts["broken"] += 1
        way.epoch += 1
        way.tries += 1
        self._cancel(call)
        lost = call.hops[max(0, kept - 1) :]
        del call.hops[max(0, kept - 1) :]
        for region in (way.front, *[hop.name for hop in lost]):
            if region in self.doors:
                self.doors[region].forget(call)
        for hop in lost:
            hop.end()
            self.time.after(0.0, self.doors[hop.region].pump)
        call.exclude = tuple([hop.name for hop in lost[:1]]) if kept else ()
        if way.tries >= self.repairs.tries:
            self._later(call, self.repairs.notice_s, lambda: self._end(call, "failed"))
        else:
            self._later(call, self.repairs.notice_s, lambda: self._retry(call, kept))

    def _cancel(self, call: ClientCall) -> None:
        """Cancels a request, for which nobody waits any more, if it is at an instance."""
        attempt = call.request.attempt
        if attempt is not None and not attempt.over:
            self.instances._gone(call.request, attempt)
            self.instances._attempts.tear_down(attempt)

    def _retry(self, call: ClientCall, kept: int) -> None:
        if not kept:
            step = call.step  # the new request knows nothing of the tokens that were generated
            output_tokens = max(1, step.output_tokens)
            call.request = SimRequest(
                call.number, step.keys, step.tokens, output_tokens, self.time.now_s, answer=step.answer
            )
            self._enter(call)
            return
        request = call.request
        request.generated = min(request.generated, request.max_tokens - 1)  # the last token did not get through
        door = self.doors[call.hops[kept - 2].name if kept > 1 else self._ways[call.number].front]
        sender = call.hops[kept - 2].region if kept > 1 else ""
        self._later(call, FORGIVEN_S, lambda: self._forgive(call, door))
        door.arrive(call, sender, again=True)

    def _forgive(self, call: ClientCall, door: Door) -> None:
        call.exclude = ()
        door.pump()

    # -- what is otherwise where something is broken

    def failed(self, request: SimRequest) -> None:
        call = self.calls[request.number]
        self._broken(call, len(call.hops))

    def _give_up(self, call: ClientCall) -> None:
        self._ways[call.number].epoch += 1
        super()._give_up(call)

    def _enter(self, call: ClientCall) -> None:
        near = [door for door in self.doors.values() if self._lives(door) and self.reaches(call.region, door.region)]
        if not near:
            self._later(call, AGAIN_S, lambda: self._retry(call, 0))
            return
        door = min(near, key=lambda each: self.distance(call.region, each))
        self._ways[call.number].front = door.region
        self._later(call, self.settings.one_way_s(call.region, door.region), lambda: door.arrive(call, ""))

    def _forward(self, door: Door, call: ClientCall) -> None:
        if len(call.hops) > 1:
            self.counts["twice forwarded"] += 1
        super()._forward(door, call)

    def _carry(self, call: ClientCall, sender: str, receiver: str, then: Callable[[], None]) -> None:
        if not self.reaches(sender, receiver):
            self._broken(call, len(call.hops))
            return

        def arrive() -> None:
            name = call.hops[-1].name
            if name in self._dead or (name in self.home and self.instances.engine(name) is None):
                self._broken(call, len(call.hops))
            else:
                then()

        super()._carry(call, sender, receiver, arrive)

    def _later(self, call: ClientCall, delay_s: float, then: Callable[[], None]) -> None:
        way = self._ways[call.number]
        epoch = way.epoch

        def act() -> None:
            if way.epoch == epoch:
                then()

        super()._later(call, delay_s, act)

    def _told(self, call: ClientCall) -> None:
        if self.owners[call.hops[-1].name] == call.hops[-1].region:
            super()._told(call)

    def _ask(self, door: Door, region: str) -> None:
        if self._lives(door) and self.reaches(door.region, region):
            super()._ask(door, region)

    def _answered(self, door: Door, found: Mapping[str, Report | None]) -> None:
        if self._lives(door):
            super()._answered(
                door, {name: report for name, report in found.items() if self.owners[name] == door.region}
            )

    def _ask_peer(self, door: Door, other: Door) -> None:
        if not self._lives(door):
            return
        one_way_s = self.settings.one_way_s(door.region, other.region)
        if not self.reaches(door.region, other.region) or not self._lives(other):
            self.time.after(2 * one_way_s, lambda: door.layers.remote.set_live(other.region, False))
        else:
            super()._ask_peer(door, other)

    def _peer_asked(self, door: Door, other: Door) -> None:
        if self._lives(other):
            super()._peer_asked(door, other)

    def _told_by_peer(self, door: Door, other: Door, report: Report) -> None:
        if self._lives(door) and self.reaches(door.region, other.region):
            door.layers.remote.set_live(other.region, True)
            super()._told_by_peer(door, other, report)

    def check_over(self) -> None:
        """Raises if a call has not ended, or anything is left anywhere."""
        assert not self.calls, sorted(self.calls)
        assert not any(self.instances._at.values())
        for engine in self.instances._members.engines.values():
            check_idle(engine)
        for door in self.doors.values():
            assert door.queued == 0, f"{door.region} has a queue of {door.queued}"
            for layer in (door.layers.local, door.layers.remote):
                assert not any(target.outstanding for target in layer), f"{door.region} counts what has ended"


class Troubled:
    """A world, the faults that befall it, and the answers that its clients got."""

    def __init__(self, seed: int, system: RoutingSystem | None = None, faults: int | None = None) -> None:
        rng = self.rng = random.Random(seed)
        regions = NAMES[: rng.randint(1, 4)]
        instances = {region: rng.randint(0, 3) for region in regions}
        instances[rng.choice(regions)] += 1
        settings = WorldSettings(instances, probe_s=rng.choice([0.02, 0.1]), wait_s=3.0)
        repairs = Repairs(notice_s=rng.choice([0.01, 0.5]), takeover_s=0.3, tries=rng.choice([2, 16]))
        if system is None:
            forwards = rng.random() < 0.7
            alone = rng.choice(regions) if not forwards and rng.random() < 0.5 else ""
            pushing, told = rng.choice(PUSHING), rng.random() < 0.5
            system = RoutingSystem("any", rng.choice(POLICIES), pushing, alone, forwards or not alone, told)
        instance = replace(SMALL, step_rule=rng.choice([StepRule.MIXED, StepRule.PREFILL_FIRST]))
        self.until_s = rng.choice([5.0, 8.0])
        self.told: dict[tuple[str, int, int], int] = {}
        """The number of times that a client heard of each step that it sent."""
        self._programs: list[Program] = []
        self.world = BreakableWorld(
            settings, system, instance, MACHINE, ENGINE, Misfortune(rng, 0.003) if faults != 0 else None, repairs
        )
        chats, system_text = SharedTexts(SHORT, rng), Text().extended(32, fresh_keys(rng))
        for region in regions:
            source = self._source(region, chats, system_text)
            self.world.add_clients(region, source, random.Random(rng.random()), rng.randint(1, 6))
        self._count_answers()
        for _ in range(rng.randint(0, 8) if faults is None else faults):
            self.world.time.at(rng.uniform(0.0, self.until_s), self._fault)

    def _source(self, region: str, chats: SharedTexts, system_text: Text) -> RegionProgramSource:
        kind = self.rng.randrange(3)
        if kind == 0:
            tree = TreeSettings(2, 3, 32, 30.0, 16, 20.0, 40)
            return TreeSource(system_text, tree, region)
        return RegionChatSource(chats, region, self.rng, 1, 1 if kind == 1 else 3)

    def _count_answers(self) -> None:
        send = self.world.send

        def counted(region: str, program: Program, place: int, ended: Callable[[bool], None]) -> None:
            self._programs.append(program)  # so that no other program gets its id
            key = region, id(program), place
            assert key not in self.told, "a step is sent twice"
            self.told[key] = 0

            def once(answered: bool) -> None:
                self.told[key] += 1
                if answered:
                    assert self.world.served[-1].output_tokens == program.steps[place].output_tokens
                ended(answered)

            send(region, program, place, once)

        for clients in self.world.clients:
            clients.send = counted

    def _fault(self) -> None:
        world, rng = self.world, self.rng
        back_s = rng.uniform(0.05, 2.0)
        kind = rng.randrange(3)
        if kind == 0:
            name = rng.choice(sorted(world.home))
            world.kill(name)
            world.time.after(back_s, lambda: world.boot(name))
        elif kind == 1:
            region = rng.choice(sorted(world.doors))
            world.kill_door(region)
            world.time.after(back_s, lambda: world.restore_door(region))
        else:
            region = rng.choice(world.settings.regions)
            world.cut_off(region)
            world.time.after(back_s, lambda: world.heal(region))

    def run(self) -> None:
        self.world.run(self.until_s, drain=True)

    def check(self) -> None:
        """Checks that every request ended once, none went to a third region, and nothing is left anywhere."""
        world = self.world
        world.check_over()
        assert all(times == 1 for times in self.told.values())
        assert len(world.served) == len(self.told)
        assert world.counts["twice forwarded"] == 0


def troubled(seed: int, system: RoutingSystem | None = None, faults: int | None = None) -> Troubled:
    print(f"seed {seed}")
    world = Troubled(seed, system, faults)
    world.run()
    world.check()
    return world
