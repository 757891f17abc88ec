"""The instances that belong to each load balancer, and its probes of instances and peers (Listing 1, lines 1 to 16)."""

from __future__ import annotations

from typing import Protocol

from pinyon.routing.target import Report
from pinyon_lab.simulator.regions.doors import Door
from pinyon_lab.simulator.regions.instances import Instances
from pinyon_lab.simulator.regions.settings import Network, System, WorldSettings
from pinyon_lab.simulator.virtual_time import VirtualTime


class Probed(Protocol):
    """The part of a world that probes look at."""

    settings: WorldSettings
    system: System
    time: VirtualTime
    network: Network
    instances: Instances
    home: dict[str, str]
    doors: dict[str, Door]

    @property
    def over(self) -> bool: ...


class Probes:
    """The probes of all load balancers."""

    def __init__(self, world: Probed) -> None:
        self._world = world
        self._owners: dict[str, str] = {}
        """The region of the load balancer that pushes to an instance, by the instance's name."""

    def start(self) -> None:
        """Starts the probes of each load balancer, at different moments."""
        world = self._world
        for place, door in enumerate(world.doors.values()):
            delay_s = world.settings.probe_s * (place + 1) / len(world.doors)
            world.time.after(delay_s, lambda door=door: self._round(door))  # type: ignore[misc]

    # -- owners of instances

    def meet(self, door: Door) -> None:
        """Introduces a load balancer that has begun to all others, and the others to it."""
        world = self._world
        for other in world.doors.values():
            if other is not door:
                trip_s = world.network.round_trip_s(door.region, other.region)
                door.layers.remote.join(other.region, distance_s=trip_s, region=other.region)
                if other.layers.remote.get(door.region) is None:
                    other.layers.remote.join(door.region, distance_s=trip_s, region=door.region)
                other.layers.remote.begin_session(door.region)  # instances there still hold what they held

    def booted(self, name: str) -> None:
        world = self._world
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = world.system.alone or world.home[name]
        door = world.doors[owner]
        if door.alive:
            self._join(door, name)
            door.pump()

    def died(self, name: str) -> None:
        """Marks an instance as dead: connections to it break at once."""
        door = self._world.doors[self._owners[name]]
        door.layers.local.set_live(name, False)

    def _join(self, door: Door, name: str) -> None:
        world = self._world
        door.layers.local.join(name, distance_s=world.network.round_trip_s(door.region, world.home[name]))

    def take_over(self, region: str) -> None:
        """Gives the instances of a load balancer to the nearest live one, if it is still dead (§4.2)."""
        world = self._world
        if world.doors[region].alive:
            return
        near = [door for door in world.doors.values() if door.alive]
        if not near:
            return
        door = min(near, key=lambda each: (world.network.one_way_s(region, each.region), each.region))
        for name, owner in self._owners.items():
            if owner == region:
                self._owners[name] = door.region
                self._adopt(door, name)

    def give_back(self, region: str) -> None:
        """Gives a load balancer its own instances, and those that no other took over."""
        world = self._world
        door = world.doors[region]
        for name, home in world.home.items():
            own = (world.system.alone or home) == region
            if own or not world.doors[self._owners[name]].alive:
                owner = world.doors[self._owners[name]]
                if owner is not door:
                    owner.layers.local.leave(name)
                self._owners[name] = region
                self._adopt(door, name)

    def _adopt(self, door: Door, name: str) -> None:
        if self._world.instances.engine(name) is not None:
            self._join(door, name)

    # -- probes

    def _round(self, door: Door) -> None:
        world = self._world
        if world.over:
            return
        if door.alive:
            if world.system.probes:
                for region in dict.fromkeys(world.home[name] for name in self._owned(door)):
                    if world.network.reaches(door.region, region):
                        self._ask(door, region)
            if world.system.forwards:
                for other in world.doors.values():
                    if other is not door:
                        self._ask_peer(door, other)
        world.time.after(world.settings.probe_s, lambda: self._round(door))

    def _owned(self, door: Door) -> list[str]:
        return [name for name, owner in self._owners.items() if owner == door.region]

    def _ask(self, door: Door, region: str) -> None:
        """Probes all instances that the load balancer has in ``region`` at once."""
        world = self._world
        one_way_s = world.network.one_way_s(door.region, region)

        def there() -> None:
            found = {
                name: world.instances.report(name, door.region)
                for name in self._owned(door)
                if world.home[name] == region
            }
            world.time.after(one_way_s, lambda: self._answered(door, found))

        world.time.after(one_way_s, there)

    def _answered(self, door: Door, found: dict[str, Report | None]) -> None:
        if not door.alive:
            return
        local, now_s = door.layers.local, self._world.time.now_s
        for name, report in found.items():
            if report is not None and self._owners[name] == door.region:
                local.report(name, report, now_s)
        door.pump()

    def tell(self, region: str, name: str) -> None:
        """Sends an instance's report to its load balancer without a probe."""
        world = self._world
        door = world.doors[region]
        if not world.system.probes or self._owners[name] != region:
            return
        report = world.instances.report(name, region)
        delay_s = world.network.one_way_s(region, world.home[name])
        world.time.after(delay_s, lambda: self._answered(door, {name: report}))

    def _ask_peer(self, door: Door, other: Door) -> None:
        world = self._world
        one_way_s = world.network.one_way_s(door.region, other.region)
        if not world.network.reaches(door.region, other.region) or not other.alive:
            world.time.after(2 * one_way_s, lambda: door.layers.remote.set_live(other.region, False))
            return

        def there() -> None:
            if other.alive:
                report = other.report(door.region, len(world.doors) - 1)
                world.time.after(one_way_s, lambda: back(report))

        def back(report: Report) -> None:
            if door.alive and world.network.reaches(door.region, other.region):
                door.layers.remote.set_live(other.region, True)
                door.layers.remote.report(other.region, report, world.time.now_s)
                door.pump()

        world.time.after(one_way_s, there)
