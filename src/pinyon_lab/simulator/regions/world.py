"""Several regions on a virtual clock: clients of a closed loop, a network with latencies, load balancers, instances.

Load balancers route by production's modules (:mod:`pinyon.routing`), and instances serve by those of workers. This
module does what services and networks do around them: it delays messages, and sends probes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count, pairwise
from random import Random

from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon.routing.target import Report
from pinyon_lab.simulator.attempt import SimRequest
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.regions.calls import CallOutcome, ClientCall, Hop
from pinyon_lab.simulator.regions.clients import RegionClients
from pinyon_lab.simulator.regions.doors import Door, GlobalView
from pinyon_lab.simulator.regions.instances import Instances
from pinyon_lab.simulator.regions.programs import Program, RegionProgramSource
from pinyon_lab.simulator.regions.settings import RoutingSystem, WorldSettings
from pinyon_lab.simulator.virtual_time import VirtualTime
from pinyon_lab.simulator.world import Faults

WATCH_S = 5.0


class RegionsWorld:
    """A world of regions: call :meth:`add_clients`, then :meth:`run`. The same inputs give the same history."""

    def __init__(
        self,
        settings: WorldSettings,
        system: RoutingSystem,
        instance: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        faults: Faults | None = None,
    ) -> None:
        self.settings, self.system = settings, system
        self.time = VirtualTime()
        heard = self.began, self.finished, self.failed
        self.instances = Instances(self.time, instance, machine, engine, *heard, faults)
        self.counts: Counter[str] = Counter()
        self.served: list[CallOutcome] = []
        self.calls: dict[int, ClientCall] = {}
        """The calls that have not ended."""
        self._numbers = count(1)
        self.clients: list[RegionClients] = []
        self._until_s = 0.0
        self.home = {
            f"{region}-{place}": region for region, number in settings.instances.items() for place in range(number)
        }
        """The region of each instance, by name."""
        self.owners = {name: system.alone or region for name, region in self.home.items()}
        """The region of the load balancer that pushes to an instance, by the instance's name."""
        view = GlobalView(self.instances)
        self.doors: dict[str, Door] = {
            region: Door(region, system, self.time, view, self._push, self._forward, self._give_up, settings.wait_s)
            for region in settings.regions
            if system.alone in ("", region)
        }
        for name, owner in self.owners.items():
            self.instances.boot(name)
            self.join(self.doors[owner], name)
        for door in self.doors.values():
            self.meet(door)

    # -- a run

    def add_clients(
        self,
        region: str,
        source: RegionProgramSource,
        rng: Random,
        most: int,
        wanted: Callable[[float], float] | None = None,
    ) -> None:
        """Adds the :class:`RegionClients` of a region; by default all are active."""
        wanted = wanted or (lambda now_s: most)
        self.clients.append(RegionClients(self.time, region, source, rng, most, wanted, self.send))

    def run(self, until_s: float, *, drain: bool = False) -> None:
        """Runs until ``until_s``. ``drain``: no client begins a program after that, and all that have begun end."""
        self._until_s = until_s if drain else math.inf
        for clients in self.clients:
            clients.until_s = until_s
            clients.start()
        for place, door in enumerate(self.doors.values()):  # which probe at different moments
            delay_s = self.settings.probe_s * (place + 1) / len(self.doors)
            self.time.after(delay_s, partial(self._probe, door))
        self.time.run(math.inf if drain else until_s)

    def watch(self, progress: Callable[[float], None]) -> None:
        """Calls ``progress`` with the time every :data:`WATCH_S`."""

        def look() -> None:
            progress(self.time.now_s)
            if not self.over:
                self.time.after(WATCH_S, look)

        self.time.after(WATCH_S, look)

    @property
    def over(self) -> bool:
        return self.time.now_s >= self._until_s and not self.calls

    @property
    def programs(self) -> int:
        """The number of programs that have ended."""
        return sum(clients.programs for clients in self.clients)

    # -- a call's way to an instance

    def send(self, region: str, program: Program, place: int, ended: Callable[[bool], None]) -> None:
        """Sends a step of a program as a client does."""
        call = ClientCall(next(self._numbers), region, program.user, program.steps[place], self.time.now_s, ended)
        self.calls[call.number] = call
        if not self.instances.fits(call.request):
            self._end(call, "too long")
            return
        self._enter(call)

    def _enter(self, call: ClientCall) -> None:
        """Sends a call to the nearest load balancer, as a name server would (§4.1)."""
        door = min(self.doors.values(), key=lambda each: self.distance(call.region, each))
        self._carry(call, call.region, door.region, lambda: door.arrive(call, ""))

    def distance(self, region: str, door: Door) -> tuple[float, str]:
        """Returns a key by which load balancers are sorted by distance."""
        return self.settings.one_way_s(region, door.region), door.region

    def _push(self, door: Door, call: ClientCall) -> None:
        name = call.hops[-1].name
        submit = lambda: self.instances.submit(call.request, name, door.region)  # noqa: E731 - on its arrival
        self._carry(call, door.region, self.home[name], submit)

    def _forward(self, door: Door, call: ClientCall) -> None:
        other = self.doors[call.hops[-1].name]
        call.forwards += 1
        self.counts["forwarded"] += 1
        self._carry(call, door.region, other.region, lambda: other.arrive(call, door.region))

    def _carry(self, call: ClientCall, sender: str, receiver: str, then: Callable[[], None]) -> None:
        """Sends a call from region to region, and calls ``then`` when it arrives."""
        self._later(call, self.settings.one_way_s(sender, receiver), then)

    def _later(self, call: ClientCall, delay_s: float, then: Callable[[], None]) -> None:
        """Calls ``then``, which is the next thing that happens to the call, after a delay."""
        self.time.after(delay_s, then)

    # -- and back

    def began(self, request: SimRequest) -> None:
        call = self.calls[request.number]
        if call.hits < 0:
            call.hits = request.hit_tokens
        if call.first_s < 0:
            call.first_s = self.time.now_s + self._way_back_s(call)
        if self.system.told:
            self._told(call)

    def finished(self, request: SimRequest) -> None:
        call = self.calls[request.number]
        delay_s, last = 0.0, self.home[call.instance()]
        for hop in reversed(call.hops):
            delay_s += self.settings.one_way_s(last, hop.region)
            last = hop.region
            self.time.after(delay_s, partial(self._freed, hop))
        if self.system.told:
            self._told(call)
        self._later(call, self._way_back_s(call), lambda: self._end(call, "finished"))

    def failed(self, request: SimRequest) -> None:
        self._end(self.calls[request.number], "failed")

    def _way_back_s(self, call: ClientCall) -> float:
        stops = [self.home[call.instance()], *[hop.region for hop in reversed(call.hops)], call.region]
        return sum([self.settings.one_way_s(one, other) for one, other in pairwise(stops)])

    def _told(self, call: ClientCall) -> None:
        """Reports the instance's load to its load balancer, which the answer's frames carry."""
        hop = call.hops[-1]
        if self.system.probes:
            report = self.instances.report(hop.name, hop.region)
            delay_s = self.settings.one_way_s(hop.region, self.home[hop.name])
            self.time.after(delay_s, lambda: self._answered(self.doors[hop.region], {hop.name: report}))

    def _freed(self, hop: Hop) -> None:
        hop.end()
        self.doors[hop.region].pump()

    def _give_up(self, call: ClientCall) -> None:
        self._end(call, "unavailable")

    def _end(self, call: ClientCall, how: str) -> None:
        for hop in call.hops:
            hop.end()
        call.ends.append(how)
        self.counts[how] += 1
        del self.calls[call.number]
        now_s, request = self.time.now_s, call.request
        ttft_s = call.first_s - call.sent_s if call.first_s >= 0 else -1.0
        self.served.append(
            CallOutcome(
                call.number, call.region, call.sent_s, ttft_s, now_s - call.sent_s, call.step.tokens, request.generated,
                max(0, call.hits), call.instance(), call.forwards > 0, how,
            )
        )  # fmt: skip
        call.ended(how == "finished")

    # -- what load balancers know of instances and of each other (Listing 1, lines 1 to 16)

    def meet(self, door: Door) -> None:
        """Introduces a load balancer that has begun to all others, and the others to it."""
        for other in self.doors.values():
            if other is not door:
                trip_s = 2 * self.settings.one_way_s(door.region, other.region)
                door.layers.remote.join(other.region, distance_s=trip_s, region=other.region)
                if other.layers.remote.get(door.region) is None:
                    other.layers.remote.join(door.region, distance_s=trip_s, region=door.region)
                other.layers.remote.begin_session(door.region)  # instances there still hold what they held

    def join(self, door: Door, name: str) -> None:
        """Introduces an instance to its load balancer."""
        door.layers.local.join(name, distance_s=2 * self.settings.one_way_s(door.region, self.home[name]))

    def _probe(self, door: Door) -> None:
        """Has a load balancer probe its instances and its peers, and does so again later."""
        if self.over:
            return
        if self.system.probes:
            for region in dict.fromkeys(self.home[name] for name in self._owned(door)):
                self._ask(door, region)
        if self.system.forwards:
            for other in self.doors.values():
                if other is not door:
                    self._ask_peer(door, other)
        self.time.after(self.settings.probe_s, lambda: self._probe(door))

    def _owned(self, door: Door) -> list[str]:
        return [name for name, owner in self.owners.items() if owner == door.region]

    def _ask(self, door: Door, region: str) -> None:
        """Probes all instances that the load balancer has in ``region`` at once."""
        one_way_s = self.settings.one_way_s(door.region, region)

        def there() -> None:
            names = [name for name in self._owned(door) if self.home[name] == region]
            found = {name: self.instances.report(name, door.region) for name in names}
            self.time.after(one_way_s, lambda: self._answered(door, found))

        self.time.after(one_way_s, there)

    def _answered(self, door: Door, found: Mapping[str, Report | None]) -> None:
        for name, report in found.items():
            if report is not None:
                door.layers.local.report(name, report, self.time.now_s)
        door.pump()

    def _ask_peer(self, door: Door, other: Door) -> None:
        self.time.after(self.settings.one_way_s(door.region, other.region), lambda: self._peer_asked(door, other))

    def _peer_asked(self, door: Door, other: Door) -> None:
        report = other.report(door.region, len(self.doors) - 1)
        one_way_s = self.settings.one_way_s(door.region, other.region)
        self.time.after(one_way_s, lambda: self._told_by_peer(door, other, report))

    def _told_by_peer(self, door: Door, other: Door, report: Report) -> None:
        door.layers.remote.report(other.region, report, self.time.now_s)
        door.pump()
