"""What goes wrong in a world of several regions, and how calls go on: instances and load balancers that die, regions
that are cut off, steps that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from pinyon_lab.simulator.regions.calls import Call
from pinyon_lab.simulator.regions.doors import Door
from pinyon_lab.simulator.regions.probes import Probed, Probes

FORGIVEN_S = 1.0
"""Until what a call broke at last is asked again."""


class Breakable(Probed, Protocol):
    """What of a world can break, and who hears of it."""

    counts: Counter[str]
    calls: dict[int, Call]
    probes: Probes

    def enter(self, call: Call) -> None: ...

    def later(self, call: Call, delay_s: float, then: Callable[[], None]) -> None: ...

    def end(self, call: Call, how: str) -> None: ...


class Breaks:
    """Whoever is left of a call's way sends it on again, as much later as it takes to notice."""

    def __init__(self, world: Breakable) -> None:
        self._world = world

    def broken(self, call: Call, kept: int) -> None:
        """Its way is gone but for that many of its load balancers, the last of which sends it on again; 0: the client
        does, which has to begin anew."""
        world = self._world
        world.counts["broken"] += 1
        call.epoch += 1
        call.tries += 1
        world.instances.cancel(call.request)
        lost = call.hops[max(0, kept - 1) :]
        del call.hops[max(0, kept - 1) :]
        for region in (call.front, *[hop.name for hop in lost]):
            if region in world.doors:
                world.doors[region].forget(call)
        for hop in lost:
            hop.end()
            world.time.after(0.0, world.doors[hop.region].pump)
        call.exclude = tuple([hop.name for hop in lost[:1]]) if kept else ()
        if call.tries >= world.settings.tries:
            world.later(call, world.settings.notice_s, lambda: world.end(call, "failed"))
        else:
            world.later(call, world.settings.notice_s, lambda: self.retry(call, kept))

    def retry(self, call: Call, kept: int) -> None:
        world = self._world
        if not kept:
            call.restart(world.time.now_s)
            world.enter(call)
            return
        request = call.request
        request.generated = min(request.generated, request.max_tokens - 1)  # the last one did not get through
        door = world.doors[call.hops[kept - 2].name] if kept > 1 else world.doors[call.front]
        sender = call.hops[kept - 2].region if kept > 1 else ""
        world.later(call, FORGIVEN_S, lambda: self._forgive(call, door))
        door.arrive(call, sender, again=True)

    def _forgive(self, call: Call, door: Door) -> None:
        call.exclude = ()
        door.pump()

    def boot(self, name: str) -> None:
        """An instance comes, or comes back, empty."""
        world = self._world
        if world.instances.engine(name) is None:
            world.instances.boot(name)
            world.probes.booted(name)

    def kill(self, name: str) -> None:
        """An instance dies with all it holds; what was there goes on elsewhere."""
        world = self._world
        lost = world.instances.kill(name)
        world.probes.died(name)
        for request in lost:
            call = world.calls[request.number]
            self.broken(call, len(call.hops))

    def kill_door(self, region: str) -> None:
        """A load balancer dies. Clients go to the next one, which has its instances some time later."""
        world = self._world
        door = world.doors[region]
        if not door.alive:
            return
        door.die()
        for call in list(world.calls.values()):
            if call.front == region:
                self.broken(call, 0)
            elif any(hop.name == region for hop in call.hops):
                self.broken(call, 1)
        world.time.after(world.settings.takeover_s, lambda: world.probes.take_over(region))

    def restore_door(self, region: str) -> None:
        """It comes back, and gets its instances."""
        world = self._world
        door = world.doors[region]
        if not door.alive:
            door.live()
            world.probes.meet(door)
            world.probes.give_back(region)

    def cut_off(self, region: str) -> None:
        """Nothing gets out of a region or into it, until it is healed."""
        world = self._world
        world.network.cut_off(region)
        for call in list(world.calls.values()):
            kept = self._reach(call)
            if kept >= 0:
                self.broken(call, kept)

    def _reach(self, call: Call) -> int:
        """How many of its load balancers are left where its way is cut; -1: it is whole."""
        world = self._world
        if not call.front:
            return -1
        stops = [call.region, call.front]
        stops += [world.home.get(hop.name, hop.name) for hop in call.hops]
        for place, (one, other) in enumerate(pairwise(stops)):
            if not world.network.reaches(one, other):
                return place
        return -1

    def heal(self, region: str) -> None:
        world = self._world
        world.network.heal(region)
