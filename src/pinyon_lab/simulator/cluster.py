"""A whole cluster on a virtual clock, from the modules that production runs, without an event loop.

Front queue → placement → prompt queue → KV memory → steps → block pools → eviction. This module does what services do
around them: clients come and cancel, instances come and go, requests are retried. Every wait is an event of the virtual
clock; the same inputs give the same history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from pinyon.core.block_keys import KEY_BYTES, pack_keys
from pinyon.core.errors import PinyonError, Rejected, Unavailable
from pinyon.core.request import Role
from pinyon.decisions import FrontConfig, FrontDecisions
from pinyon.placement.decode_selection import decode_blocks
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest
from pinyon.placement.scaling import Scaler, ScalingSettings
from pinyon.placement.scheduler import Scheduler
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.attempt import Attempt, SimRequest
from pinyon_lab.simulator.attempt_lifecycle import AttemptLifecycle
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.engine import SimEngine
from pinyon_lab.simulator.front import Front
from pinyon_lab.simulator.members import MODEL, Members, endless_fleet
from pinyon_lab.simulator.report import RequestOutcome
from pinyon_lab.simulator.virtual_time import VirtualTime
from pinyon_lab.simulator.workload import Arrival
from pinyon_lab.simulator.world import NO_JOURNAL, Faults, JournalOf, World

RETRY_S = 0.25
"""The time until a request that no instance takes is placed again."""


LOOK_S = 1.0
"""The time between two looks at the load."""


class Elasticity:
    """The scaling of instances that prefill, as :class:`Scaler` decides. An instance to be removed accepts nothing new,
    and leaves when it is idle."""

    def __init__(self, world: World, scaling: ScalingSettings, members: Members, over: Callable[[], bool]) -> None:
        """Starts scaling, which ends as soon as ``over`` returns true: all requests have ended."""
        self.sizes: list[tuple[float, int]] = []
        """The target number of instances, and the time since which it holds."""
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


class SimCluster:
    """A simulated cluster; :meth:`run` simulates until nothing is left to happen."""

    def __init__(
        self,
        settings: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        policy: PlacementPolicy,
        seed: int = 0,
        faults: Faults | None = None,
        journal: JournalOf = NO_JOURNAL,
        heard: Callable[..., None] = lambda *what: None,
    ) -> None:
        """Starts the instances; calls ``heard`` with the name of each decision on which runs of one seed must agree."""
        self.settings = settings
        self.time = VirtualTime()
        self.counts: Counter[str] = Counter()
        self._heard = heard
        config = FrontConfig(settings.front_slots, settings.front_queue)
        decisions = FrontDecisions(config, journal("lb", config))
        self.front = Front(self.time, settings, decisions, self._place, self.log)
        together = all(role is Role.MIXED for role in settings.roles)
        self.fleet = endless_fleet(together=together, decode_sharing=settings.decode_sharing)
        self.scheduler = Scheduler(self.fleet, policy, Random(seed))
        self._numbers = count(1)
        world = self._world = World(self.time, self.fleet, settings, machine, engine, faults, journal)
        self._attempts = AttemptLifecycle(world, self._numbers, self.counts, self.log, self.fail, self.front.leave)
        self.members, self.moves = self._attempts.members, self._attempts.moves
        self.elasticity: Elasticity | None = None
        for number, role in enumerate(settings.roles):
            self.members.boot(f"{role.value}-{number:04d}", role)

    # -- a run

    def run(
        self, arrivals: Sequence[Arrival], clients: int = 0, progress: Callable[[int], None] = lambda done: None
    ) -> list[RequestOutcome]:
        """Returns the requests' outcomes. ``clients``: see :class:`Clients`; ``progress`` gets how many have ended."""
        self.front.open(arrivals, clients, progress)
        if self.settings.scaling is not None:
            over = lambda: self.front.over  # noqa: E731 - asked again and again
            self.elasticity = Elasticity(self._world, self.settings.scaling, self.members, over)
        self.time.run()
        return self.front.outcomes()

    @property
    def evicted(self) -> int:
        """The number of blocks that live instances have evicted."""
        return sum(engine.evicted for engine in self.members.engines.values())

    def log(self, *what: object) -> None:
        self.counts[str(what[0])] += 1
        self._heard(self.time.now_s, *what)

    # -- placement

    def _place(self, request: SimRequest, give_up_s: float) -> None:
        if request.ends:  # cancelled while waiting for an instance
            return
        number, job = next(self._numbers), next(self._numbers)
        settings, again = self.settings, bool(request.attempts)
        asked = PlacementRequest(
            f"{request.number}~{number}",
            MODEL,
            request.tokens + request.generated,
            pack_keys(request.keys),
            request.max_tokens,
            0.0 if again else settings.ttft_slo_s,
            0.0 if again else settings.tbt_slo_s,
            exclude=frozenset(request.exclude),
            request_class=request.request_class,
        )
        try:
            decision = self.scheduler.schedule(asked, self.time.now_s)
        except Rejected as refusal:
            if refusal.retry_after_s and not asked.tbt_slo_s:  # otherwise, as in a conductor, more would not help
                self._look_at(request, None)
            self.front.leave(request, "rejected")
            return
        except PinyonError as error:
            if self.time.now_s < give_up_s and isinstance(error, Unavailable):
                request.exclude.clear()
                self.time.after(RETRY_S, lambda: self._place(request, give_up_s))
            else:
                self.front.leave(request, "unavailable")
            return
        self._look_at(request, decision)
        if not request.attempts:
            request.placed_s = self.time.now_s
        request.attempts += 1
        self._attempt(request, number, job, decision)
        for move in self.scheduler.moves(asked, decision, self.fleet.inflight.waiting, self.time.now_s):
            self._move(move)

    def _look_at(self, request: SimRequest, decision: PlacementDecision | None) -> None:
        if self.elasticity is not None and not request.attempts:
            self.elasticity.placed(decision)

    def _attempt(self, request: SimRequest, number: int, job: int, decision: PlacementDecision) -> None:
        prefill, decode = decision.prefill.info, decision.decode.info
        names = prefill.instance_id, decode.instance_id
        self.log("placed", request.number, *names, decision.local_blocks, decision.reused_blocks)
        tokens = request.tokens + request.generated
        attempt = request.attempt = Attempt(request, number, job, decision, prefill.boot_id, decode.boot_id, tokens)
        if decision.alternate is not None:
            self._attempts.movable[attempt.id] = attempt
        self.fleet.inflight.begin_decode(attempt.id, decision.decode)
        self._attempts.begin(attempt)

    def _move(self, move: Move) -> None:
        """Recalls a request whose prompt waits, and queues it at its other instance."""
        attempt = self._attempts.movable.get(move.request.request_id)
        if attempt is None or attempt.over:
            return
        prefill = self.members.boots.get(attempt.prefill)
        if prefill is None or (attempt.job in prefill.jobs and not prefill.prompts.waits(attempt.job)):
            return  # the prompt has left the queue
        request = attempt.request
        self._withdraw(attempt)
        number, job = next(self._numbers), next(self._numbers)
        asked = replace(move.request, request_id=f"{request.number}~{number}")
        decision = self.scheduler.decide_at(asked, move.target, move.source, self.time.now_s)
        expected = asked.block_keys[decision.local_blocks * KEY_BYTES :]
        blocks = decode_blocks(asked, self.settings.block_tokens) - decision.shared_blocks
        now_s, first_s = self.time.now_s, request.placed_s
        keys = asked.block_keys
        self.fleet.inflight.add(asked.request_id, decision, blocks, now_s, expected, asked, first_s, keys)
        self.counts["moved"] += 1
        self._attempt(request, number, job, decision)

    # -- the end of an attempt

    def fail(self, attempt: Attempt, culprit: str) -> None:
        """Retries a failed request elsewhere with the tokens generated so far, as the load balancer does."""
        request = attempt.request
        self._withdraw(attempt)
        if request.attempts < self.settings.attempts:
            request.exclude.add(culprit)
            self.log("retry", request.number, culprit)
            self._place(request, self.time.now_s + self.settings.placement_wait_s)
        else:
            self.front.leave(request, "failed")

    def _withdraw(self, attempt: Attempt) -> None:
        self._attempts.tear_down(attempt)
        self.fleet.inflight.release(attempt.id)
