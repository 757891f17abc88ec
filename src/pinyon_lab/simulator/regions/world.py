"""Several regions on a virtual clock: clients of a closed loop, a network with latencies, load balancers, instances.

Load balancers route by production's modules (:mod:`pinyon.routing`), and instances serve by those of workers. This
module does what services and networks do around them: it delays messages, sends probes, and handles load balancers and
instances that die, and regions that are cut off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise
from random import Random

from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.attempt import Request
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.regions.calls import Call, Hop, Served
from pinyon_lab.simulator.regions.clients import Clients
from pinyon_lab.simulator.regions.doors import Door, GlobalView
from pinyon_lab.simulator.regions.instances import Instances
from pinyon_lab.simulator.regions.probes import Probes
from pinyon_lab.simulator.regions.programs import Program, Source
from pinyon_lab.simulator.regions.settings import Network, System, WorldSettings
from pinyon_lab.simulator.virtual_time import VirtualTime
from pinyon_lab.simulator.world import Faults

WATCH_S = 5.0
AGAIN_S = 1.0
"""The time until a client that found no load balancer looks for one again."""
FORGIVEN_S = 1.0
"""The time until a call may use again what it broke at last."""


class World:
    """A world of regions: call :meth:`add_clients`, then :meth:`run`. The same inputs give the same history."""

    def __init__(
        self,
        settings: WorldSettings,
        system: System,
        instance: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        faults: Faults | None = None,
    ) -> None:
        self.settings, self.system = settings, system
        self.time = VirtualTime()
        self.network = Network(settings.round_trips_s)
        self.instances = Instances(self.time, instance, machine, engine, self, faults)
        self.counts: Counter[str] = Counter()
        self.served: list[Served] = []
        self.calls: dict[int, Call] = {}
        """The calls that have not ended."""
        self._numbers = count(1)
        self.clients: list[Clients] = []
        self._until_s = 0.0
        self.home: dict[str, str] = {}
        """The region of each instance, by name."""
        view = GlobalView(self.instances)
        self.doors: dict[str, Door] = {
            region: Door(region, system, self.time, view, self._push, self._forward, self._give_up, settings.wait_s)
            for region in settings.regions
            if system.alone in ("", region)
        }
        self.probes = Probes(self)
        for region, number in settings.instances.items():
            for place in range(number):
                self.home[f"{region}-{place}"] = region
        for name in self.home:
            self.boot(name)
        for door in self.doors.values():
            self.probes.meet(door)

    # -- a run

    def add_clients(
        self, region: str, source: Source, rng: Random, most: int, wanted: Callable[[float], float] | None = None
    ) -> None:
        """Adds the :class:`Clients` of a region; by default all are active."""
        wanted = wanted or (lambda now_s: most)
        self.clients.append(Clients(self.time, region, source, rng, most, wanted, self.send))

    def run(self, until_s: float, *, drain: bool = False) -> None:
        """Runs until ``until_s``. ``drain``: no client begins a program after that, and all that have begun end."""
        self._until_s = until_s if drain else math.inf
        for clients in self.clients:
            clients.until_s = until_s
            clients.start()
        self.probes.start()
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
        call = Call(next(self._numbers), region, program.user, program.steps[place], self.time.now_s, ended)
        self.calls[call.number] = call
        if not self.instances.fits(call.request):
            self._end(call, "too long")
            return
        self._enter(call)

    def _enter(self, call: Call) -> None:
        """Sends a call to the nearest live load balancer, as a name server would (§4.1)."""
        network, region = self.network, call.region
        near = [door for door in self.doors.values() if door.alive and network.reaches(region, door.region)]
        if not near:
            self._later(call, AGAIN_S, lambda: self._retry(call, 0))
            return
        door = min(near, key=lambda each: (network.one_way_s(region, each.region), each.region))
        call.front = door.region
        self._later(call, network.one_way_s(region, door.region), lambda: door.arrive(call, ""))

    def _push(self, door: Door, call: Call) -> None:
        name = call.hops[-1].name
        self._carry(call, door.region, self.home[name], lambda: self._at_instance(door, call, name))

    def _forward(self, door: Door, call: Call) -> None:
        other = self.doors[call.hops[-1].name]
        call.forwards += 1
        self.counts["forwarded"] += 1
        if len(call.hops) > 1:
            self.counts["twice forwarded"] += 1
        self._carry(call, door.region, other.region, lambda: self._at_door(other, call, door.region))

    def _carry(self, call: Call, sender: str, receiver: str, then: Callable[[], None]) -> None:
        if self.network.reaches(sender, receiver):
            self._later(call, self.network.one_way_s(sender, receiver), then)
        else:
            self._broken(call, len(call.hops))

    def _at_door(self, door: Door, call: Call, sender: str) -> None:
        if door.alive:
            door.arrive(call, sender)
        else:
            self._broken(call, len(call.hops))

    def _at_instance(self, door: Door, call: Call, name: str) -> None:
        if not self.instances.submit(call.request, name, door.region):
            self._broken(call, len(call.hops))

    def _later(self, call: Call, delay_s: float, then: Callable[[], None]) -> None:
        """Calls ``then`` after a delay, unless the call's way breaks before."""
        epoch = call.epoch

        def act() -> None:
            if call.epoch == epoch:
                then()

        self.time.after(delay_s, act)

    # -- and back: implements :class:`pinyon_lab.simulator.regions.instances.Heard`

    def began(self, request: Request) -> None:
        call = self.calls[request.number]
        if call.hits < 0:
            call.hits = request.hit_tokens
        if call.first_s < 0:
            call.first_s = self.time.now_s + self._way_back_s(call)
        if self.system.told:
            self._told(call)

    def finished(self, request: Request) -> None:
        call = self.calls[request.number]
        delay_s, last = 0.0, self.home[call.instance()]
        for hop in reversed(call.hops):
            delay_s += self.network.one_way_s(last, hop.region)
            last = hop.region
            self.time.after(delay_s, lambda hop=hop: self._freed(hop))  # type: ignore[misc]
        if self.system.told:
            self._told(call)
        self._later(call, self._way_back_s(call), lambda: self._end(call, "finished"))

    def failed(self, request: Request, name: str) -> None:
        call = self.calls[request.number]
        self._broken(call, len(call.hops))

    def _way_back_s(self, call: Call) -> float:
        stops = [self.home[call.instance()], *[hop.region for hop in reversed(call.hops)], call.region]
        return sum([self.network.one_way_s(one, other) for one, other in pairwise(stops)])

    def _told(self, call: Call) -> None:
        """Reports the instance's load, which the answer's frames carry."""
        hop = call.hops[-1]
        self.probes.tell(hop.region, hop.name)

    def _freed(self, hop: Hop) -> None:
        hop.end()
        door = self.doors[hop.region]
        door.pump()

    def _give_up(self, call: Call) -> None:
        call.epoch += 1
        self._end(call, "unavailable")

    def _end(self, call: Call, how: str) -> None:
        for hop in call.hops:
            hop.end()
        call.ends.append(how)
        self.counts[how] += 1
        del self.calls[call.number]
        now_s, request = self.time.now_s, call.request
        ttft_s = call.first_s - call.sent_s if call.first_s >= 0 else -1.0
        self.served.append(
            Served(
                call.number, call.region, call.sent_s, ttft_s, now_s - call.sent_s, call.step.tokens, request.generated,
                max(0, call.hits), call.instance(), call.forwards > 0, how,
            )
        )  # fmt: skip
        call.ended(how == "finished")

    # -- faults: the part of a call's way that is left sends it on again, after the time that noticing takes

    def _broken(self, call: Call, kept: int) -> None:
        """Breaks a call's way but for its first ``kept`` load balancers, the last of which sends it on again. 0: the
        client begins anew."""
        self.counts["broken"] += 1
        call.epoch += 1
        call.tries += 1
        self.instances.cancel(call.request)
        lost = call.hops[max(0, kept - 1) :]
        del call.hops[max(0, kept - 1) :]
        for region in (call.front, *[hop.name for hop in lost]):
            if region in self.doors:
                self.doors[region].forget(call)
        for hop in lost:
            hop.end()
            self.time.after(0.0, self.doors[hop.region].pump)
        call.exclude = tuple([hop.name for hop in lost[:1]]) if kept else ()
        if call.tries >= self.settings.tries:
            self._later(call, self.settings.notice_s, lambda: self._end(call, "failed"))
        else:
            self._later(call, self.settings.notice_s, lambda: self._retry(call, kept))

    def _retry(self, call: Call, kept: int) -> None:
        if not kept:
            call.restart(self.time.now_s)
            self._enter(call)
            return
        request = call.request
        request.generated = min(request.generated, request.max_tokens - 1)  # the last token did not get through
        door = self.doors[call.hops[kept - 2].name] if kept > 1 else self.doors[call.front]
        sender = call.hops[kept - 2].region if kept > 1 else ""
        self._later(call, FORGIVEN_S, lambda: self._forgive(call, door))
        door.arrive(call, sender, again=True)

    def _forgive(self, call: Call, door: Door) -> None:
        call.exclude = ()
        door.pump()

    def boot(self, name: str) -> None:
        """Starts an instance, for the first time or again, empty."""
        if self.instances.engine(name) is None:
            self.instances.boot(name)
            self.probes.booted(name)

    # -- after the run

    def check_over(self) -> None:
        """Raises if a call has not ended, or anything is left anywhere."""
        assert not self.calls, sorted(self.calls)
        self.instances.check_over()
        for door in self.doors.values():
            assert door.queued == 0, f"{door.region} has a queue of {door.queued}"
            for layer in (door.layers.local, door.layers.remote):
                assert not any(target.outstanding for target in layer), f"{door.region} counts what has ended"
