"""The instances of all regions, each of which serves whole requests, and their reports to load balancers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from pinyon.core.block_keys import BlockKey
from pinyon.core.request import Role
from pinyon.placement.policy import DecodeChoice, PlacementDecision, Times
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon.routing.target import Report
from pinyon_lab.simulator.attempt import Attempt, Request
from pinyon_lab.simulator.attempt_lifecycle import AttemptLifecycle
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.engine import Engine
from pinyon_lab.simulator.members import endless_fleet
from pinyon_lab.simulator.virtual_time import VirtualTime
from pinyon_lab.simulator.world import Faults, World

LB = "lb"


class Heard(Protocol):
    """A listener that is told at once, at the instance; the way from there is not the instance's business."""

    def began(self, request: Request) -> None:
        """Reports that the request has its first token."""

    def finished(self, request: Request) -> None:
        """Reports that the request has all its tokens."""

    def failed(self, request: Request, name: str) -> None:
        """Reports that the request lost its instance by the fault of ``name``; it keeps the tokens generated so far."""


class Instances:
    """The instances of all regions. ``settings`` are those of each, but for its roles: all are mixed."""

    def __init__(
        self,
        time: VirtualTime,
        settings: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        heard: Heard,
        faults: Faults | None = None,
    ) -> None:
        self._time, self._settings, self._heard = time, settings, heard
        self.counts: Counter[str] = Counter()
        fleet = endless_fleet(together=True, decode_sharing=False)
        self._numbers = count(1)
        world = World(time, fleet, settings, machine, engine, faults)
        self._attempts = AttemptLifecycle(world, self._numbers, self.counts, self._log, self._again, self._leave)
        self._members = self._attempts.members
        self._at: dict[str, dict[int, Request]] = {}
        """The requests at each instance that have not ended."""
        self._received: dict[tuple[str, str], int] = {}
        """The number of requests by instance and by sender, since the instance's boot."""

    # -- members

    @property
    def names(self) -> list[str]:
        """The names of the live instances."""
        return list(self._members.engines)

    def engine(self, name: str) -> Engine | None:
        """Returns the engine of an instance, None if it is dead."""
        return self._members.engines.get(name)

    def boot(self, name: str) -> None:
        """Starts an instance, for the first time or again; it is empty."""
        self._members.boot(name, Role.MIXED)
        self._at[name] = {}
        for key in [key for key in self._received if key[0] == name]:
            del self._received[key]

    def kill(self, name: str) -> list[Request]:
        """Kills an instance with all it holds; returns the requests that were there."""
        if self._members.remove(name) is None:
            return []
        lost = list(self._at.pop(name).values())
        for request in lost:
            if request.attempt is not None:
                self._attempts.tear_down(request.attempt)
        return lost

    # -- requests

    def fits(self, request: Request) -> bool:
        """Returns whether the request fits into an empty instance."""
        blocks = -(-(request.tokens + request.max_tokens) // self._settings.block_tokens)
        return blocks <= self._settings.hbm_tokens // self._settings.block_tokens

    def submit(self, request: Request, name: str, sender: str) -> bool:
        """Submits a request to an instance, with tokens generated elsewhere, if any. False: the instance is dead."""
        engine = self.engine(name)
        if engine is None:
            return False
        self._received[name, sender] = self._received.get((name, sender), 0) + 1
        decision = PlacementDecision(engine.state, DecodeChoice(engine.state), 0, (), Times(), LB)
        number, job = next(self._numbers), next(self._numbers)
        tokens = request.tokens + request.generated
        attempt = request.attempt = Attempt(request, number, job, decision, engine.boot, engine.boot, tokens)
        request.attempts += 1
        self._at[name][request.number] = request
        self._attempts.want_room(attempt)
        engine.settle()
        engine.kick()
        return True

    def cancel(self, request: Request) -> None:
        """Cancels a request, for which nobody waits any more, if it is at an instance."""
        attempt = request.attempt
        if attempt is not None and not attempt.over:
            self._gone(request, attempt)
            self._attempts.tear_down(attempt)

    def _gone(self, request: Request, attempt: Attempt) -> None:
        request.attempt = None
        at = self._at.get(attempt.names[0])
        if at is not None:
            at.pop(request.number, None)

    def _log(self, *what: object) -> None:
        self.counts[str(what[0])] += 1
        if what[0] == "first":
            engine = self.engine(str(what[2]))
            assert engine is not None
            self._heard.began(self._at[engine.name][int(str(what[1]))])

    def _again(self, attempt: Attempt, culprit: str) -> None:
        request = attempt.request
        self._gone(request, attempt)
        self._attempts.tear_down(attempt)
        self._heard.failed(request, culprit)

    def _leave(self, request: Request, how: str) -> None:
        if request.attempt is not None:
            self._gone(request, request.attempt)
        self._heard.finished(request)

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
        engine = self.engine(name)
        return 0 if engine is None else engine.admission.waiting

    def outstanding(self, name: str) -> int:
        return len(self._at.get(name, ()))

    def used(self, name: str) -> float:
        """Returns the share of an instance's KV memory that requests hold, without blocks that are only cached."""
        engine = self.engine(name)
        return 0.0 if engine is None else engine.pool.used / engine.pool.total

    def held(self, name: str, keys: Sequence[BlockKey]) -> int:
        """Returns the number of leading blocks that the instance holds."""
        engine = self.engine(name)
        return 0 if engine is None else engine.pool.match_prefix(keys)

    def check_over(self) -> None:
        """Raises ``AssertionError`` if anything of a request is left, ``RuntimeError`` if the books do not balance."""
        assert not any(self._at.values())
        for engine in self._members.engines.values():
            engine.check_idle()
