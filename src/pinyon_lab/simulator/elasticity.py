"""The growth and shrinkage of a simulated cluster, as :class:`pinyon.placement.scaling.Scaler` decides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from pinyon.core.request import Role
from pinyon.placement.policy import PlacementDecision
from pinyon.placement.scaling import Scaler, ScalingSettings
from pinyon_lab.simulator.engine import SimEngine
from pinyon_lab.simulator.members import Members
from pinyon_lab.simulator.world import World

LOOK_S = 1.0


class Elasticity:
    """The scaling of instances that prefill. One that is removed accepts nothing new, and leaves when it is idle."""

    def __init__(self, world: World, scaling: ScalingSettings, members: Members, over: Callable[[], bool]) -> None:
        """Starts scaling, which ends as soon as ``over`` returns true: all requests have ended."""
        self.sizes: list[tuple[float, int]] = []
        """The target number of instances, and since when."""
        self._time, self._fleet, self._members, self._over = world.time, world.fleet, members, over
        self._scaler = Scaler(scaling, world.time.now_s)
        self._boot_s = world.settings.boot_s
        self._role = Role.MIXED if Role.MIXED in world.settings.roles else Role.PREFILL
        self._numbers = count(len(members.engines))
        self._booting = 0
        self._sized(len(self._there()))
        self._time.after(LOOK_S, self._look)

    def placed(self, decision: PlacementDecision | None) -> None:
        """Tells the scaler that a request was placed; None: it was rejected."""
        if decision is None:
            self._scaler.placed(float("inf"), 0.0, self._time.now_s)
        else:
            self._scaler.placed(decision.ttft_s, decision.prefill_s, self._time.now_s, own_s=decision.own_s)

    def _through(self, engine: SimEngine) -> bool:
        """Returns whether the engine drains, holds nothing of any request, and has no request placed on it."""
        return engine.draining and engine.idle and not self._fleet.inflight.holds(engine.state)

    def _there(self) -> list[SimEngine]:
        engines = self._members.engines.values()
        return [each for each in engines if not each.draining and each.state.info.role.prefills]

    def _sized(self, instances: int) -> None:
        self.sizes.append((self._time.now_s, instances))

    def _look(self) -> None:
        for engine in [each for each in self._members.engines.values() if self._through(each)]:
            self._members.remove(engine.name)
        if self._over():
            return
        there, now_s = self._there(), self._time.now_s
        queues_s = [each.state.prefill_queue_s(now_s) for each in there] + [0.0] * self._booting
        change = self._scaler.decide(queues_s, now_s)
        if change:
            self._sized(len(queues_s) + change)
        for _ in range(change):
            self._booting += 1
            self._time.after(self._boot_s, self._boot)
        if change < 0 and there:
            least = min(there, key=lambda each: (each.state.prefill_queue_s(now_s), each.name))
            least.drain()
        self._time.after(LOOK_S, self._look)

    def _boot(self) -> None:
        self._booting -= 1
        self._members.boot(f"{self._role.value}-{next(self._numbers):04d}", self._role)
