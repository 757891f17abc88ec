"""Random worlds of several regions in which everything goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from pinyon.core.request import Role
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule
from pinyon_lab.simulator.regions.calls import Call
from pinyon_lab.simulator.regions.chats import Chats, ChatSettings, ChatSource, Together
from pinyon_lab.simulator.regions.programs import Program, Source
from pinyon_lab.simulator.regions.settings import GLOBAL_VIEW, System, WorldSettings
from pinyon_lab.simulator.regions.workloads import Trees, TreeSettings, TreeSource
from pinyon_lab.simulator.regions.world import World

BLOCK = 16
NAMES = ("us", "eu", "asia", "moon")
POLICIES = ("round_robin", "least_loaded", "consistent_hash", "cache_aware", "skywalker", GLOBAL_VIEW)
PUSHING = ("blind", "outstanding:limit=2", "pending", "pending:credits=false", "pending:queue=0,burst=1")
ENGINE = EngineProfile("s", "", "", 3e-3, 2e-5, 0.0, 0.0, 2e-4, 1e-8)
MACHINE = MachineProfile("s", "", "", "tiny", 1024, 1536, 0, 1e9, 4e7, 2e7)
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


class Misfortune:
    """See :class:`pinyon_lab.simulator.world.Faults`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def step_fails(self) -> bool:
        return self._rng.random() < 0.003

    def reader_forgets(self) -> bool:
        return False


class BreakableWorld(World):
    """A world in which instances and load balancers die, and regions are cut off."""

    def kill(self, name: str) -> None:
        """Kills an instance with all it holds; its requests go on elsewhere."""
        lost = self.instances.kill(name)
        self.probes.died(name)
        for request in lost:
            call = self.calls[request.number]
            self._broken(call, len(call.hops))

    def kill_door(self, region: str) -> None:
        """Kills a load balancer: clients go to the next one, which takes over its instances some time later."""
        door = self.doors[region]
        if not door.alive:
            return
        door.die()
        for call in list(self.calls.values()):
            if call.front == region:
                self._broken(call, 0)
            elif any(hop.name == region for hop in call.hops):
                self._broken(call, 1)
        self.time.after(self.settings.takeover_s, lambda: self.probes.take_over(region))

    def restore_door(self, region: str) -> None:
        """Restores a load balancer, and gives it its instances back."""
        door = self.doors[region]
        if not door.alive:
            door.live()
            self.probes.meet(door)
            self.probes.give_back(region)

    def cut_off(self, region: str) -> None:
        """Cuts off a region: nothing gets out of it or into it until the cut is healed."""
        self.network.cut_off(region)
        for call in list(self.calls.values()):
            kept = self._reach(call)
            if kept >= 0:
                self._broken(call, kept)

    def _reach(self, call: Call) -> int:
        """Returns the number of the call's load balancers before the cut, or -1 if its path is whole."""
        if not call.front:
            return -1
        stops = [call.region, call.front]
        stops += [self.home.get(hop.name, hop.name) for hop in call.hops]
        for place, (one, other) in enumerate(pairwise(stops)):
            if not self.network.reaches(one, other):
                return place
        return -1


class Troubled:
    """A world, the faults that befall it, and the answers that its clients got."""

    def __init__(self, seed: int, system: System | None = None, faults: int | None = None) -> None:
        rng = self.rng = random.Random(seed)
        regions = NAMES[: rng.randint(1, 4)]
        instances = {region: rng.randint(0, 3) for region in regions}
        instances[rng.choice(regions)] += 1
        settings = WorldSettings(
            instances, probe_s=rng.choice([0.02, 0.1]), notice_s=rng.choice([0.01, 0.5]), takeover_s=0.3, wait_s=3.0,
            tries=rng.choice([2, 16]),
        )  # fmt: skip
        if system is None:
            forwards = rng.random() < 0.7
            alone = rng.choice(regions) if not forwards and rng.random() < 0.5 else ""
            pushing, told = rng.choice(PUSHING), rng.random() < 0.5
            system = System("any", rng.choice(POLICIES), pushing, alone, forwards or not alone, told)
        instance = replace(SMALL, step_rule=rng.choice([StepRule.MIXED, StepRule.PREFILL_FIRST]))
        self.until_s = rng.choice([5.0, 8.0])
        self.told: dict[tuple[str, int, int], int] = {}
        """The number of times that a client heard of each step that it sent."""
        self._programs: list[Program] = []
        self.world = BreakableWorld(
            settings, system, instance, MACHINE, ENGINE, Misfortune(rng) if faults != 0 else None
        )
        chats, trees = Chats(SHORT, BLOCK, rng), Trees(BLOCK, 32, rng)
        for region in regions:
            source = self._source(region, chats, trees)
            self.world.add_clients(region, source, random.Random(rng.random()), rng.randint(1, 6))
        self._count_answers()
        for _ in range(rng.randint(0, 8) if faults is None else faults):
            self.world.time.at(rng.uniform(0.0, self.until_s), self._fault)

    def _source(self, region: str, chats: Chats, trees: Trees) -> Source:
        kind = self.rng.randrange(3)
        if kind == 0:
            tree = TreeSettings(2, 3, 32, 30.0, 16, 20.0, 40)
            return TreeSource(trees, tree, region)
        source = ChatSource(chats, region, self.rng)
        return source if kind == 1 else Together(source, 1, 3)

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
            world.time.after(back_s, lambda: world.network.heal(region))

    def run(self) -> None:
        self.world.run(self.until_s, drain=True)

    def check(self) -> None:
        """Checks that every request ended once, none went to a third region, and nothing is left anywhere."""
        world = self.world
        world.check_over()
        assert all(times == 1 for times in self.told.values())
        assert len(world.served) == len(self.told)
        assert world.counts["twice forwarded"] == 0


def troubled(seed: int, system: System | None = None, faults: int | None = None) -> Troubled:
    print(f"seed {seed}")
    world = Troubled(seed, system, faults)
    world.run()
    world.check()
    return world
