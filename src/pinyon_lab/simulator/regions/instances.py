"""The instances of all regions, each of which serves whole requests, and their reports to load balancers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from pinyon.core.block_keys import BlockKey
from pinyon.core.request import Role
from pinyon.placement.policy import PlacementDecision
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon.routing.target import Report
from pinyon_lab.simulator.attempt import Attempt, SimRequest
from pinyon_lab.simulator.attempt_lifecycle import AttemptLifecycle
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.engine import SimEngine
from pinyon_lab.simulator.members import endless_fleet
from pinyon_lab.simulator.virtual_time import VirtualTime
from pinyon_lab.simulator.world import Faults, World

LB = "lb"


class Instances:
    """The instances of all regions. ``settings`` are those of each, but for its roles: all are mixed.

    ``began`` is told that a request has its first token, ``finished`` that it has all. ``failed`` is told that it lost
    its instance, and keeps the tokens generated so far. They are told at once, at the instance; the way from there is
    not the instance's business."""

    def __init__(
        self,
        time: VirtualTime,
        settings: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        began: Callable[[SimRequest], None],
        finished: Callable[[SimRequest], None],
        failed: Callable[[SimRequest], None],
        faults: Faults | None = None,
    ) -> None:
        self._settings, self._began, self._finished, self._failed = settings, began, finished, failed
        self.counts: Counter[str] = Counter()
        fleet = endless_fleet(together=True, decode_sharing=False)
        self._numbers = count(1)
        world = World(time, fleet, settings, machine, engine, faults)
        self._attempts = AttemptLifecycle(world, self._numbers, self.counts, self._log, self._again, self._leave)
        self._members = self._attempts.members
        self._at: dict[str, dict[int, SimRequest]] = {}
        """The requests at each instance that have not ended."""
        self._received: dict[tuple[str, str], int] = {}
        """The number of requests by instance and by sender, since the instance's boot."""

    # -- members

    def engine(self, name: str) -> SimEngine | None:
        """Returns the engine of an instance, None if it is dead."""
        return self._members.engines.get(name)

    def boot(self, name: str) -> None:
        """Starts an instance, which is empty."""
        self._members.boot(name, Role.MIXED)
        self._at[name] = {}

    # -- requests

    def fits(self, request: SimRequest) -> bool:
        """Returns whether the request fits into an empty instance."""
        blocks = -(-(request.tokens + request.max_tokens) // self._settings.block_tokens)
        return blocks <= self._settings.hbm_tokens // self._settings.block_tokens

    def submit(self, request: SimRequest, name: str, sender: str) -> None:
        """Submits a request to a live instance, with tokens generated elsewhere, if any."""
        engine = self._members.engines[name]
        self._received[name, sender] = self._received.get((name, sender), 0) + 1
        decision = PlacementDecision(engine.state, engine.state, policy=LB)
        number, job = next(self._numbers), next(self._numbers)
        tokens = request.tokens + request.generated
        attempt = request.attempt = Attempt(request, number, job, decision, engine.boot, engine.boot, tokens)
        request.attempts += 1
        self._at[name][request.number] = request
        self._attempts.begin(attempt)

    def _gone(self, request: SimRequest, attempt: Attempt) -> None:
        request.attempt = None
        at = self._at.get(attempt.names[0])
        if at is not None:
            at.pop(request.number, None)

    def _log(self, *what: object) -> None:
        self.counts[str(what[0])] += 1
        if what[0] == "first":
            self._began(self._at[str(what[2])][int(str(what[1]))])

    def _again(self, attempt: Attempt, culprit: str) -> None:
        request = attempt.request
        self._gone(request, attempt)
        self._attempts.tear_down(attempt)
        self._failed(request)

    def _leave(self, request: SimRequest, how: str) -> None:
        if request.attempt is not None:
            self._gone(request, request.attempt)
        self._finished(request)

    # -- answers to probes

    def report(self, name: str, sender: str) -> Report | None:
        """Returns the answer to a probe by ``sender``; None: the instance is dead."""
        engine = self.engine(name)
        if engine is None:
            return None
        load = engine.batch_room.look(len(self._at[name]), 0)
        return Report(load.waiting, load.running, load.room, self._received.get((name, sender), 0))

    def waiting(self, name: str) -> int:
        """Returns the number of requests at the instance that wait for KV blocks."""
        return self._members.engines[name].admission.waiting

    def outstanding(self, name: str) -> int:
        return len(self._at[name])

    def used(self, name: str) -> float:
        """Returns the share of an instance's KV memory that requests hold, without blocks that are only cached."""
        pool = self._members.engines[name].pool
        return pool.used / pool.total

    def held(self, name: str, keys: Sequence[BlockKey]) -> int:
        """Returns the number of leading blocks that the instance holds; 0 if there is none of that name."""
        engine = self.engine(name)
        return 0 if engine is None else engine.pool.match_prefix(keys)
