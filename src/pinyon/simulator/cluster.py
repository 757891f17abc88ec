"""A whole cluster on a virtual clock, from the modules that production runs, and without an event loop.

Front queue → placement → prompt queue → KV memory → steps → block pools → eviction. What services do around them is
done here: clients that come and cancel, instances that come and go, requests that are tried again. Every wait is an
event of the virtual clock; the same inputs give the same history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from pinyon.batching import BatchRequest, Prompt
from pinyon.core.block_keys import KEY_BYTES, pack_keys
from pinyon.core.errors import PinyonError, Rejected, ResourceExhausted, Unavailable
from pinyon.core.request import Role
from pinyon.decisions import FrontConfig, FrontDecisions
from pinyon.paging import Reservation
from pinyon.placement.decode_selection import decode_blocks
from pinyon.placement.fleet import Fleet
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.policy import Move, PlacementDecision, PlacementPolicy, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon.simulator.attempt import Attempt, Request
from pinyon.simulator.cluster_settings import ClusterSettings
from pinyon.simulator.engine import Engine, Faults
from pinyon.simulator.front import Front
from pinyon.simulator.kv_moves import KvMoves
from pinyon.simulator.members import MODEL, JournalOf, Members
from pinyon.simulator.outcome import Outcome
from pinyon.simulator.virtual_time import VirtualTime
from pinyon.simulator.workload import Arrival

__all__ = ["Cluster"]

UNLIMITED = 1 << 40
FOREVER_S = 1e15
RETRY_S = 0.25
"""Until a request that no instance takes is placed again."""


class Cluster:
    """``run`` plays everything until nothing is left to happen."""

    def __init__(
        self,
        settings: ClusterSettings,
        machine: MachineProfile,
        engine: EngineProfile,
        policy: PlacementPolicy,
        seed: int = 0,
        faults: Faults | None = None,
        journal: JournalOf = lambda name, config: None,
        heard: Callable[..., None] = lambda *what: None,
    ) -> None:
        """``heard`` is told of each decision that two runs of one seed must agree on, its name first."""
        self.settings = settings
        self.time = VirtualTime()
        self.counts: Counter[str] = Counter()
        self._heard = heard
        config = FrontConfig(settings.front_slots, settings.front_queue)
        decisions = FrontDecisions(config, journal("lb", config))
        self.front = Front(self.time, settings, decisions, self._place, self._withdraw, self.log)
        inflight = InFlightTable(UNLIMITED, FOREVER_S, FOREVER_S, FOREVER_S, expected_keys_max=UNLIMITED)
        together = all(role is Role.MIXED for role in settings.roles)
        self.fleet = Fleet(BlockIndex(UNLIMITED), inflight, 1 << 20, together)
        self.scheduler = Scheduler(self.fleet, policy, Random(seed))
        self.members = Members(self.time, self, self.fleet, settings, machine, engine, faults, journal)
        self.moves = KvMoves(
            self.time, self.fleet, settings, machine, self.members.engines, self.members.stores, faults
        )
        self._boots = self.members.boots
        self._numbers = count(1)
        self._placed: dict[str, Attempt] = {}
        """Attempts that may be moved, by id."""
        for number, role in enumerate(settings.roles):
            self.boot(f"{role.value}-{number:04d}", role)

    # -- a run

    def run(
        self,
        arrivals: Sequence[Arrival],
        clients: int = 0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Outcome]:
        """What came of each. ``clients``: see :class:`Clients`; ``progress`` hears how many are over."""
        self.front.open(arrivals, clients, progress)
        self.time.run()
        return self.front.outcomes()

    @property
    def evicted(self) -> int:
        """Blocks that instances which live have lost."""
        return sum(engine.evicted for engine in self.members.engines.values())

    def log(self, *what: object) -> None:
        self.counts[str(what[0])] += 1
        self._heard(self.time.now_s, *what)

    # -- instances

    def boot(self, name: str, role: Role) -> None:
        """An instance comes, or comes back, empty."""
        self.members.boot(name, role)

    def kill(self, name: str) -> None:
        """An instance dies with all it holds; what was with it is tried elsewhere."""
        victim = self.members.remove(name)
        if victim is None:
            return
        self.log("death", name)
        lost = [
            request.attempt
            for request in self.front.requests.values()
            if request.attempt is not None
            and not request.attempt.over
            and victim.boot in (request.attempt.prefill, request.attempt.decode)
        ]
        for attempt in lost:
            decode = self._boots.get(attempt.decode)
            if decode is not None and decode.decodes.get(attempt.number) is attempt:
                continue  # its prompt is computed and here: the prefill instance is not needed any more
            if not attempt.over:
                self.fail(attempt, name)

    def cancel(self, number: int) -> None:
        """The request's client leaves."""
        self.front.cancel(number)

    # -- placement

    def _place(self, request: Request, give_up_s: float) -> None:
        if request.ends:  # cancelled while it waited for an instance
            return
        number, job = next(self._numbers), next(self._numbers)
        asked = PlacementRequest(
            f"{request.number}~{number}",
            MODEL,
            request.tokens + request.generated,
            pack_keys(request.keys),
            request.max_tokens,
            0.0 if request.attempts else self.settings.ttft_slo_s,
            exclude=frozenset(request.exclude),
            request_class=request.request_class,
        )
        try:
            decision = self.scheduler.schedule(asked, self.time.now_s)
        except Rejected:
            self.front.leave(request, "rejected")
            return
        except PinyonError as error:
            if self.time.now_s < give_up_s and isinstance(error, Unavailable):
                request.exclude.clear()
                self.time.after(RETRY_S, lambda: self._place(request, give_up_s))
            else:
                self.front.leave(request, "unavailable")
            return
        request.attempts += 1
        self._attempt(request, number, job, decision)
        for move in self.scheduler.moves(asked, decision, self.fleet.inflight.waiting, self.time.now_s):
            self._move(move)

    def _attempt(self, request: Request, number: int, job: int, decision: PlacementDecision) -> None:
        prefill, decode = decision.prefill.info, decision.decode.info
        self.log(
            "placed",
            request.number,
            prefill.instance_id,
            decode.instance_id,
            decision.local_blocks,
            decision.reused_blocks,
        )
        tokens = request.tokens + request.generated
        attempt = request.attempt = Attempt(request, number, job, decision, prefill.boot_id, decode.boot_id, tokens)
        if decision.alternate is not None:
            self._placed[attempt.id] = attempt
        self.fleet.inflight.begin_decode(attempt.id, decision.decode)
        self._want_room(attempt)
        engine = self._boots[attempt.decode]
        engine.settle()
        engine.kick()

    def _move(self, move: Move) -> None:
        """Recall what waits, and queue it at its other instance."""
        attempt = self._placed.get(move.request.request_id)
        if attempt is None or attempt.over:
            return
        prefill = self._boots.get(attempt.prefill)
        if prefill is None or (attempt.job in prefill.jobs and not prefill.prompts.waits(attempt.job)):
            return  # it is on its way
        request = attempt.request
        self._withdraw(attempt)
        number, job = next(self._numbers), next(self._numbers)
        asked = replace(move.request, request_id=f"{request.number}~{number}")
        decision = self.scheduler.decide_at(asked, move.target, move.source, self.time.now_s)
        expected = asked.block_keys[decision.local_blocks * KEY_BYTES :]
        blocks = decode_blocks(asked, self.settings.block_tokens)
        self.fleet.inflight.add(asked.request_id, decision, blocks, self.time.now_s, expected, asked)
        self.counts["moved"] += 1
        self._attempt(request, number, job, decision)

    def _want_room(self, attempt: Attempt) -> None:
        """At its decode instance, for its prompt and, where there is a next one, the token after that."""
        request, block_tokens = attempt.request, self.settings.block_tokens
        attempt.tokens = request.tokens + request.generated
        more = request.generated + 1 < request.max_tokens
        usable = attempt.tokens - (1 if attempt.together else 0)
        total = -(-(attempt.tokens + more) // block_tokens)
        asked = BatchRequest(
            attempt.number,
            attempt.tokens,
            total,
            request.keys,
            min(len(request.keys), usable // block_tokens),
            max_new_tokens=request.max_tokens,
            arrived_s=self.time.now_s,
            request_class=request.request_class,
        )
        self._boots[attempt.decode].want(asked, lambda room: self._decode_room(attempt, room))

    def _decode_room(self, attempt: Attempt, room: Reservation) -> None:
        attempt.room = room
        prefill, request = self._boots.get(attempt.prefill), attempt.request
        if prefill is None:
            self.fail(attempt, attempt.prefill.rpartition("/")[0])
            return
        reusable = attempt.reusable(self.settings.block_tokens)
        prompt = Prompt(attempt.job, attempt.tokens, request.keys, reusable, attempt.together, self.time.now_s)
        try:
            prefill.prompts.add(prompt, self.time.now_s)
        except ResourceExhausted:
            self.fail(attempt, prefill.name)
            return
        prefill.jobs[attempt.job] = attempt
        prefill.pump()

    # -- at the engines: see :class:`pinyon.simulator.engine.Owner`

    def started(self, engine: Engine, attempt: Attempt) -> None:
        self._placed.pop(attempt.id, None)
        block_tokens = self.settings.block_tokens
        reusable = attempt.reusable(block_tokens)
        if attempt.together:
            room = attempt.room
            assert room is not None
            keys = attempt.request.keys[:reusable]
            engine.reservations.extend(room, keys, self.time.now_s, attempt.request.traits)
            engine.settle()
            self._has_room(engine, attempt, room)
            return
        attempt.room_number = next(self._numbers)  # the order of those that ask for room is that of their numbers
        blocks = -(-attempt.tokens // block_tokens)
        engine.want(
            BatchRequest(attempt.room_number, attempt.tokens, blocks, attempt.request.keys, reusable, decodes=False),
            lambda room: self._has_room(engine, attempt, room),
        )
        engine.settle()
        if engine.wants(attempt.room_number):
            attempt.roomless = True
            self.counts["roomless"] += 1
            engine.prompts.waits_for_room(attempt.job)
            number = attempt.room_number
            self.time.after(self.settings.room_wait_s, lambda: self._too_late(engine, attempt, number))
            engine.pump()

    def _too_late(self, engine: Engine, attempt: Attempt, number: int) -> None:
        """Mixed instances may wait for each other's room in a circle: whoever waits for long gives up."""
        if engine.alive and not attempt.over and attempt.roomless and attempt.room_number == number:
            self.counts["gave up"] += 1
            self.fail(attempt, engine.name)

    def _has_room(self, engine: Engine, attempt: Attempt, room: Reservation) -> None:
        if attempt.roomless:
            attempt.roomless = False
            engine.prompts.has_room(attempt.job)
        engine.prompts.reserved(attempt.job)
        attempt.job_room = room
        if attempt.request.attempts <= 1 and not attempt.request.generated:
            attempt.request.hit_tokens = room.held * self.settings.block_tokens
        self.moves.fetch(attempt, engine, lambda: self._compute(engine, attempt))

    def _compute(self, engine: Engine, attempt: Attempt) -> None:
        """As soon as what was promoted from the second tier is copied."""
        copies_s = engine.copies_s()
        if copies_s:
            self.time.after(copies_s, lambda: self._begin(engine, attempt))
        else:
            self._begin(engine, attempt)

    def _begin(self, engine: Engine, attempt: Attempt) -> None:
        if attempt.over or not engine.alive:
            return
        room = attempt.job_room
        assert room is not None
        held = room.held * self.settings.block_tokens
        self.fleet.inflight.begin_prefill(attempt.id, engine.state, self.time.now_s)
        engine.begin(attempt, held)

    def computing(self, engine: Engine, attempt: Attempt, end: int) -> None:
        if attempt.together:
            return
        decode = self._boots.get(attempt.decode)
        if decode is not None:
            if not attempt.pushed and attempt.room is not None:
                attempt.pushed = attempt.room.held * self.settings.block_tokens
            self.moves.push(attempt, engine, decode, end, lambda: self._pushed(engine, attempt))

    def computed(self, engine: Engine, attempt: Attempt, start: int, end: int) -> None:
        request, now_s = attempt.request, self.time.now_s
        store = self.members.store(engine)
        if store is not None:
            store.put(request.keys[: end // self.settings.block_tokens], now_s, request.traits)
        if end < attempt.tokens:
            return
        held = attempt.job_room.held * self.settings.block_tokens if attempt.job_room is not None else 0
        self.fleet.learn_prefill(engine.state, end - held, held, attempt.computing_s, now_s)
        self.fleet.inflight.end_prefill(attempt.id, engine.state, now_s)
        request.computing_s += attempt.computing_s
        attempt.computed = True
        if attempt.together:
            self._decode(engine, attempt)
        elif not attempt.pushing:
            self._all_pushed(engine, attempt)

    def _pushed(self, engine: Engine, attempt: Attempt) -> None:
        attempt.pushing -= 1
        if attempt.computed and not attempt.pushing:
            self._all_pushed(engine, attempt)

    def _all_pushed(self, engine: Engine, attempt: Attempt) -> None:
        """The KV is at the decode instance: the blocks here are given back."""
        room, attempt.job_room = attempt.job_room, None
        if engine.alive and room is not None:
            engine.free(attempt.room_number, room.table)
            engine.pump()
            engine.kick()
        decode = self._boots.get(attempt.decode)
        if attempt.over or decode is None:
            return
        there = attempt.room
        assert there is not None
        decode.publish(attempt, there, there.held, len(attempt.request.keys))
        self._decode(decode, attempt)

    def _decode(self, engine: Engine, attempt: Attempt) -> None:
        """Its first token is there."""
        request, now_s = attempt.request, self.time.now_s
        if request.generated:
            request.intervals.append((now_s - request.last_token_s, 1))
        else:
            request.first_token_s = now_s
            self.log("first", request.number, engine.name)
        request.generated += 1
        request.last_token_s = now_s
        if request.generated == request.max_tokens:
            self._finish(engine, attempt)
        else:
            engine.decode(attempt)

    def decoded(self, engine: Engine, attempt: Attempt, count: int, seconds: float) -> None:
        request, now_s = attempt.request, self.time.now_s
        waited_s = now_s - request.last_token_s - count * seconds
        request.intervals.append((seconds + max(0.0, waited_s), 1))
        if count > 1:
            request.intervals.append((seconds, count - 1))
        request.generated += count
        request.last_token_s = now_s
        if request.generated >= request.max_tokens:
            self._finish(engine, attempt)

    def gave_way(self, engine: Engine, attempt: Attempt) -> None:
        """It is computed here again when there is room, before all that came after it."""
        self.log("preempted", attempt.request.number, attempt.request.generated)
        attempt.prefill, attempt.room, attempt.job_room = engine.boot, None, None
        attempt.job, attempt.computed, attempt.computing_s = next(self._numbers), False, 0.0
        self._want_room(attempt)

    def failed(self, engine: Engine, attempt: Attempt) -> None:
        self.fail(attempt, engine.name)

    # -- the end of an attempt

    def _finish(self, engine: Engine, attempt: Attempt) -> None:
        self._tear_down(attempt)
        self.fleet.inflight.end_decode(attempt.id, engine.state)
        self.front.leave(attempt.request, "finished")

    def fail(self, attempt: Attempt, culprit: str) -> None:
        """Once more elsewhere, as the load balancer does: with what was generated."""
        request = attempt.request
        self._withdraw(attempt)
        if request.attempts < self.settings.attempts:
            request.exclude.add(culprit)
            self.log("retry", request.number, culprit)
            self._place(request, self.time.now_s + self.settings.placement_wait_s)
        else:
            self.front.leave(request, "failed")

    def _withdraw(self, attempt: Attempt) -> None:
        self._tear_down(attempt)
        self.fleet.inflight.release(attempt.id)

    def _tear_down(self, attempt: Attempt) -> None:
        """Give back everything that lives: what died took its share along."""
        attempt.over = True
        self._placed.pop(attempt.id, None)
        prefill, decode = self._boots.get(attempt.prefill), self._boots.get(attempt.decode)
        if prefill is not None:
            prefill.unwant(attempt.room_number)
            prefill.drop_prompt(attempt)
            if attempt.job_room is not None and not attempt.together:
                room, attempt.job_room = attempt.job_room, None
                prefill.free(attempt.room_number, room.table)
        if decode is not None:
            decode.unwant(attempt.number)
            decode.drop_decode(attempt)
            if attempt.room is not None:
                room, attempt.room = attempt.room, None
                decode.free(attempt.number, room.table)
        for engine in (prefill,) if attempt.together else (prefill, decode):
            if engine is not None:
                engine.pump()
                engine.kick()

    # -- afterwards

    def check_over(self) -> None:
        """Raises if a request has not ended, or anything is left anywhere."""
        self.front.check_over()
        inflight = self.fleet.inflight
        assert (inflight.prefills, inflight.decodes, len(inflight.expected)) == (0, 0, 0)
        assert not self.moves.links.flows
        assert not self._placed
        self.fleet.index.check_integrity()
        for engine in self.members.engines.values():
            engine.check_idle()
            state = engine.state
            assert (state.queued_prefill_us, state.inflight_decode_blocks, state.inflight_reads) == (0, 0, 0)
