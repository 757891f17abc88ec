"""A cluster on a virtual clock, from the modules that production runs, and without an event loop.

Load balancer queue → placement → prompt queue → reservations → step scheduler → block pool → eviction. The world plays
everything around them: clients that come and cancel, the time that steps and transfers take, instances that die and
come back. Every wait is an event in one heap, every draw comes from one seeded generator.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pinyon.batching import BatchRequest, Prompt, PromptWork, StepPlan
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.errors import PinyonError, Rejected, ResourceExhausted, Unavailable
from pinyon.core.journal import Codec, Journal
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.decisions import (
    JOURNAL_TYPES,
    FrontConfig,
    FrontDecisions,
    InstanceConfig,
    InstanceDecisions,
    journal_header,
    make_room,
)
from pinyon.paging import Reservation
from pinyon.placement.fleet import Fleet
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler

MODEL = "simulated"
BLOCK = 16
ATTEMPTS = 3
TENANTS = 3
LAYOUT = KvLayout(2, 1, 8, BLOCK, "float32")


@dataclass(frozen=True)
class Plan:
    """What a world is like. Times in seconds, of the virtual clock."""

    roles: tuple[Role, ...] = (Role.MIXED,) * 4
    requests: int = 10_000
    requests_per_s: float = 150.0
    pool_blocks: int = 96
    lb_slots: int = 96
    lb_queue: int = 64
    cancelled: float = 0.1
    deaths: int = 40
    failed_steps: float = 0.002
    forgotten_leases: float = 0.05
    lease_s: float = 2.0
    room_timeout_s: float = 2.0
    ttft_slo_s: float = 1.5
    eviction: str = "lru"
    batching: str = "fcfs"
    journals: bool = False


@dataclass(eq=False)
class Request:
    """What a client wants, and how often it was told an end."""

    number: int
    keys: list[BlockKey]
    tokens: int
    max_tokens: int
    attempt: Attempt | None = None
    attempts: int = 0
    exclude: set[str] = field(default_factory=set)
    queued: bool = False
    placed: bool = False
    ends: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Attempt:
    """A request at the instances of one placement. ``number`` names its decode part, ``job`` its prompt."""

    request: Request
    number: int
    job: int
    decision: PlacementDecision
    prefill: Instance
    decode: Instance
    room: Reservation | None = None
    """Of the decode instance."""
    job_room: Reservation | None = None
    """Of the prefill instance; the same one where the two are one."""
    roomless: bool = False
    room_number: int = 0
    """Under which it asks the prefill instance for room."""
    tokens: int = 0
    """Of the prompt: the request's, and what was generated before it gave way."""
    generated: int = 0
    over: bool = False

    @property
    def together(self) -> bool:
        return self.prefill is self.decode


class Instance:
    """One boot of an engine instance: the pure modules, and what a service would keep as futures."""

    def __init__(self, world: World, name: str, boot: int, role: Role) -> None:
        self.name = name
        self.world = world
        plan = world.plan
        policies = {"eviction": plan.eviction, "batching": plan.batching, "spare_queued": True}
        config = InstanceConfig(plan.pool_blocks, BLOCK, 16, 256, 128, 3, 64, **policies)
        decisions = InstanceDecisions(config, world.journal(f"{name}/{boot}", config))
        self.pool, self.reservations, self.admission = decisions.pool, decisions.reservations, decisions.admission
        self.prompts, self.steps = decisions.prompts, decisions.steps
        self.wanted: dict[int, Callable[[Reservation], None]] = {}
        self.jobs: dict[int, Attempt] = {}
        self.decodes: dict[int, Attempt] = {}
        self.after_step: list[tuple[int, list[int]]] = []
        self.stepping = self.busy = False
        self.alive = True
        self.expiry_s: float | None = None
        self.seq = 0
        self.state = world.fleet.join(
            InstanceInfo(
                name, f"{name}/{boot}", role, f"{name}:1", MODEL, "weights", LAYOUT, world.plan.pool_blocks, 16
            ),
            world.now_s,
        )
        world.fleet.index.apply_snapshot(self.state, 0, b"", first=True, last=True)

    # -- blocks

    def want(self, request: BatchRequest, then: Callable[[Reservation], None]) -> None:
        self.wanted[request.number] = then
        self.admission.enqueue(request)

    def settle(self) -> None:
        """Blocks may have become free, or somebody new wants some."""
        for number, reservation in self.admission.admit(self.world.now_s):
            self.wanted.pop(number)(reservation)

    def publish(self, room: Reservation, first: int, keys: list[BlockKey]) -> None:
        """What others hold already takes the places of the room's own blocks."""
        duplicates = []
        for index, block in self.reservations.publish(
            room.table[first : first + len(keys)], keys, self.world.now_s, first=first
        ):
            duplicates.append(room.table[first + index])
            room.table[first + index] = block
        self.world.counts["duplicates"] += len(duplicates)
        self.free(0, duplicates)

    def free(self, number: int, table: list[int]) -> None:
        """What was admitted under ``number``, or more than that if it is 0. As a service does: not before the step that
        may still touch the blocks is over."""
        if self.stepping:
            self.after_step.append((number, table))
            return
        self.give_way(number, table)
        self.settle()

    def grow(self, number: int, count: int) -> list[int] | None:
        return self.admission.grow(number, count, self.world.now_s)

    def give_way(self, number: int, table: list[int]) -> None:
        if number:
            self.admission.end(number)
        self.reservations.release(table, self.world.now_s)

    def unwant(self, number: int) -> bool:
        if self.wanted.pop(number, None) is None:
            return False
        self.admission.withdraw(number)
        self.settle()
        return True

    def watch_leases(self) -> None:
        deadline_s = self.reservations.next_deadline()
        if deadline_s is not None and self.expiry_s is None:
            self.expiry_s = max(deadline_s, self.world.now_s)
            self.world.at(self.expiry_s, self._expire)

    def _expire(self) -> None:
        self.expiry_s = None
        if self.alive:
            for lease in self.reservations.overdue(self.world.now_s):
                self.reservations.end_lease(lease, self.world.now_s)
                self.settle()
                self.world.counts["expired"] += 1
            self.watch_leases()

    # -- prompts

    def pump(self) -> None:
        for number in self.prompts.start(self.world.now_s):
            self._start(self.jobs[number])

    def _start(self, attempt: Attempt) -> None:
        if attempt.together:
            assert attempt.room is not None
            reusable = attempt.request.keys[: _reusable(attempt)]
            self.reservations.extend(attempt.room, reusable, self.world.now_s)
            self.settle()
            self._has_room(attempt, attempt.room)
            return
        keys, blocks = tuple(attempt.request.keys), LAYOUT.blocks_for(attempt.tokens)
        attempt.room_number = self.world.number()  # the order of those that ask for room is that of their numbers
        self.want(
            BatchRequest(attempt.room_number, attempt.tokens, blocks, keys, _reusable(attempt), decodes=False),
            lambda room: self._has_room(attempt, room),
        )
        self.settle()
        if attempt.room_number in self.wanted:
            attempt.roomless = True
            self.world.counts["roomless"] += 1
            self.prompts.waits_for_room(attempt.job)
            self.world.after(self.world.plan.room_timeout_s, lambda: self._too_late(attempt))
            self.pump()

    def _too_late(self, attempt: Attempt) -> None:
        """Mixed instances may wait for each other's room in a circle: whoever waits for long gives up."""
        if self.alive and not attempt.over and attempt.roomless:
            self.world.counts["gave up"] += 1
            self.world.fail(attempt, self)

    def _has_room(self, attempt: Attempt, room: Reservation) -> None:
        if attempt.roomless:
            attempt.roomless = False
            self.prompts.has_room(attempt.job)
        self.prompts.reserved(attempt.job)
        attempt.job_room = room
        if not self._fetch(attempt, room):
            self._compute(attempt, room)

    def _fetch(self, attempt: Attempt, room: Reservation) -> bool:
        """Read what the plan says another instance holds, under a lease."""
        world, first = self.world, room.held
        keys = attempt.request.keys[first : _reusable(attempt)]
        spans = [
            span for span in attempt.decision.fetches if span.first_block <= first < span.first_block + span.block_count
        ]
        source = world.instances.get(spans[0].source.info.instance_id) if spans and keys else None
        if source is None or source is self:
            return False
        lease, found = source.reservations.lease(keys, world.plan.lease_s, world.now_s, False)
        source.watch_leases()
        if not found:
            return False
        forgotten = world.rng.random() < world.plan.forgotten_leases

        def arrived() -> None:
            if source.alive and not forgotten:
                source.reservations.end_lease(lease, world.now_s)
                source.settle()
            if attempt.over or not self.alive:
                return
            if source.alive:
                world.log("fetched", attempt.request.number, source.name, len(found))
                room.held = first + len(found)
                self.publish(room, first, keys[: len(found)])
                self.prompts.published(attempt.job, keys[: len(found)])
                self.pump()
            self._compute(attempt, room)

        world.after(0.001 + 0.0004 * len(found), arrived)
        return True

    def _compute(self, attempt: Attempt, room: Reservation) -> None:
        held = room.held * BLOCK
        self.prompts.advanced(attempt.job, held)
        self.steps.add_prefill(PromptWork(attempt.job, held, attempt.tokens))
        self.kick()

    # -- steps

    def kick(self) -> None:
        if self.stepping or self.busy or not self.alive:
            return
        self.busy = True  # whoever gets room meanwhile may have something to compute
        self.settle()
        self.steps.fill()
        for number in make_room(self.steps, self.admission, self, self._table):
            self._preempted(self.decodes.pop(number))
        self.settle()
        self.busy = False
        plan = self.steps.decide(self.world.now_s)
        if plan is not None:
            self.stepping = True
            began_s = self.world.now_s
            self.world.after(
                0.003 + 0.00002 * plan.tokens + 0.0002 * len(plan.decodes), lambda: self._stepped(plan, began_s)
            )

    def _table(self, number: int) -> list[int]:
        room = self.decodes[number].room
        assert room is not None
        return room.table

    def _preempted(self, attempt: Attempt) -> None:
        """It is computed here again when there is room, before all that came after it."""
        self.world.log("preempted", attempt.request.number, attempt.generated)
        attempt.prefill, attempt.room, attempt.job_room = self, None, None
        attempt.job = self.world.number()
        self.world.want_room(attempt)

    def _stepped(self, plan: StepPlan, began_s: float) -> None:
        if not self.alive:
            return
        world, rate = self.world, self.world.plan.failed_steps
        failed_prefills = {number for number, _, _ in plan.prefills if world.rng.random() < rate}
        failed_decodes = {number for number in plan.decodes if world.rng.random() < rate}
        failed = [self.jobs[number] for number in sorted(failed_prefills) if number in self.jobs]
        failed += [self.decodes[number] for number in sorted(failed_decodes) if number in self.decodes]
        counted = self.steps.fold(plan, failed_prefills, failed_decodes)
        self.stepping, self.busy = False, True  # the next step is decided when all of this one is told
        tables, self.after_step = self.after_step, []
        for number, table in tables:
            self.give_way(number, table)
        self.settle()
        for number, start, end in counted.prefills:
            self._computed(self.jobs[number], start, end, world.now_s - began_s)
        for number in counted.decodes:
            self._token(self.decodes[number])
        for attempt in failed:
            if not attempt.over:
                world.fail(attempt, self)
        self.report()
        self.pump()
        self.busy = False
        self.kick()

    def _computed(self, attempt: Attempt, start: int, end: int, seconds: float) -> None:
        request, room = attempt.request, attempt.job_room
        assert room is not None
        self.prompts.advanced(attempt.job, end - start)
        first, last = start // BLOCK, min(end // BLOCK, len(request.keys))
        self.publish(room, first, request.keys[first:last])
        self.prompts.published(attempt.job, request.keys[first:last])
        self.world.fleet.learn_prefill(self.state, end - start, start, seconds, self.world.now_s)
        if end < attempt.tokens:
            return
        self.prompts.end(attempt.job)
        del self.jobs[attempt.job]
        self.world.fleet.inflight.end_prefill(attempt_id(attempt), self.state, self.world.now_s)
        if attempt.together:
            self.decode(attempt)
            return
        self.world.after(0.002, lambda: self._pushed(attempt, room))

    def _pushed(self, attempt: Attempt, room: Reservation) -> None:
        """The KV is at the decode instance: the blocks here are given back."""
        if self.alive and attempt.job_room is room:
            attempt.job_room = None
            self.free(attempt.room_number, room.table)
        if not attempt.over and attempt.decode.alive:
            there = attempt.room
            assert there is not None
            keys = attempt.request.keys
            attempt.decode.publish(there, there.held, keys[there.held :])
            attempt.decode.decode(attempt)

    def decode(self, attempt: Attempt) -> None:
        request = attempt.request
        attempt.generated += 1
        self.world.log("first", request.number, self.name)
        if attempt.generated == request.max_tokens:
            self.world.finish(attempt)
            return
        assert attempt.room is not None
        self.decodes[attempt.number] = attempt
        self.steps.add_decode(attempt.number, attempt.tokens, len(attempt.room.table))
        self.kick()

    def _token(self, attempt: Attempt) -> None:
        attempt.generated += 1
        if attempt.generated == attempt.request.max_tokens:
            self.world.finish(attempt)

    def report(self) -> None:
        """What a worker tells the conductor."""
        stored, removed = self.pool.drain_changes()
        self.world.counts["evicted"] += len(removed)
        if stored or removed:
            self.seq += 1
            self.world.fleet.index.apply_delta(self.state, self.seq, pack_keys(stored), pack_keys(removed))
        pending = len(self.decodes) + len(self.wanted) - self.steps.running
        self.world.fleet.set_load(
            self.state,
            InstanceLoad(
                max(0, pending), self.steps.running, self.prompts.pending_tokens, self.pool.used, self.pool.cached
            ),
            self.world.now_s,
        )

    def check_idle(self) -> None:
        """Nothing of any request is left, and the books balance."""
        self.admission.check_integrity()
        self.prompts.check_integrity()
        held = {
            "blocks": self.pool.used,
            "waiting": self.admission.waiting,
            "admitted": self.admission.admitted,
            "leases": self.reservations.leases,
            "prompts": self.prompts.queued + self.prompts.active,
            "prompt tokens": self.prompts.pending_tokens,
            "steps": self.steps.waiting + self.steps.running + self.steps.prefilling,
            "jobs": len(self.jobs) + len(self.decodes) + len(self.wanted) + len(self.after_step),
        }
        assert not any(held.values()), f"{self.name}: {held}"


def attempt_id(attempt: Attempt) -> str:
    return f"{attempt.request.number}~{attempt.number}"


def _reusable(attempt: Attempt) -> int:
    """The last token is always computed."""
    return min(len(attempt.request.keys), (attempt.tokens - 1) // BLOCK)


class World:
    """``run`` plays everything until no event is left."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._digest = hashlib.sha256()
        self.counts: Counter[str] = Counter()
        self.journals: dict[str, list[str]] = {}
        self._recording: list[Journal] = []
        config = FrontConfig(plan.lb_slots, plan.lb_queue)
        self.queue = FrontDecisions(config, self.journal("lb", config)).queue
        self.fleet = Fleet(BlockIndex(1 << 20), InFlightTable(100_000, 60.0, 600.0, 600.0), 16)
        self.scheduler = Scheduler(self.fleet, KvCacheCentric(KvCacheCentricSettings(1.0)))
        self.instances: dict[str, Instance] = {}
        self._boots = itertools.count(1)
        self.requests: dict[int, Request] = {}
        for number, role in enumerate(plan.roles):
            self._boot(f"{role.value}-{number}", role)

    def journal(self, name: str, config: InstanceConfig | FrontConfig) -> Journal | None:
        """Where the named part's decisions are written, if they are."""
        if not self.plan.journals:
            return None
        lines = self.journals[name] = []
        header = journal_header(config, service=name)
        journal = Journal(lambda line: lines.append(line + "\n"), lambda: self.now_s, Codec(JOURNAL_TYPES), header)
        self._recording.append(journal)
        return journal

    # -- time

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def log(self, *what: object) -> None:
        """One decision: what two runs of one seed must agree on."""
        self._digest.update(repr((round(self.now_s, 9), *what)).encode())
        self.counts[str(what[0])] += 1

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def run(self) -> None:
        prefixes = [self._keys(self.rng.randint(1, 6)) for _ in range(60)]
        arrival_s = 0.0
        for number in range(1, self.plan.requests + 1):
            arrival_s += self.rng.expovariate(self.plan.requests_per_s)
            keys = list(self.rng.choice(prefixes)) if self.rng.random() < 0.7 else []
            keys += self._keys(self.rng.randint(0, 6))
            tokens = len(keys) * BLOCK + self.rng.randint(1, BLOCK - 1)
            request = Request(number, keys, tokens, self.rng.randint(1, 40))
            self.requests[number] = request
            self.at(arrival_s, lambda request=request: self._arrive(request))  # type: ignore[misc]
            if self.rng.random() < self.plan.cancelled:
                self.at(arrival_s + self.rng.expovariate(4.0), lambda request=request: self._cancel(request))  # type: ignore[misc]
        for _ in range(self.plan.deaths):
            self.at(self.rng.uniform(0.0, arrival_s), self._death)
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self.counts["events"] += 1

    def _keys(self, count: int) -> list[BlockKey]:
        return [self.rng.randbytes(16) for _ in range(count)]

    # -- the load balancer

    def _arrive(self, request: Request) -> None:
        try:
            displaced = self.queue.reserve(request.number, f"tenant {request.number % TENANTS}", self.now_s)
        except ResourceExhausted:
            self._end(request, "refused")
            return
        if displaced is not None:
            self.requests[displaced].queued = False
            self._end(self.requests[displaced], "refused")
        if self.queue.enter(request.number, request.tokens + request.max_tokens, self.now_s):
            self._place(request, self.now_s + 5.0)
        else:
            request.queued = True
            self.counts["queued"] += 1

    def _leave(self) -> None:
        following = self.queue.leave(self.now_s)
        if following is not None:
            request = self.requests[following]
            request.queued = False
            self._place(request, self.now_s + 5.0)

    def _place(self, request: Request, give_up_s: float) -> None:
        request.placed = True
        if request.ends:  # cancelled while it waited for an instance
            return
        number, job = next(self._numbers), next(self._numbers)
        asked = PlacementRequest(
            f"{request.number}~{number}",
            MODEL,
            request.tokens,
            pack_keys(request.keys),
            request.max_tokens,
            0.0 if request.attempts else self.plan.ttft_slo_s,
            exclude=frozenset(request.exclude),
        )
        try:
            decision = self.scheduler.schedule(asked, self.now_s)
        except Rejected:
            self._end(request, "rejected")
            self._leave()
            return
        except (Unavailable, PinyonError) as error:
            if self.now_s < give_up_s and isinstance(error, Unavailable):
                request.exclude.clear()
                self.after(0.25, lambda: self._place(request, give_up_s))
            else:
                self._end(request, "unavailable")
                self._leave()
            return
        prefill = self.instances[decision.prefill.info.instance_id]
        decode = self.instances[decision.decode.info.instance_id]
        self.log("placed", request.number, prefill.name, decode.name, decision.local_blocks, decision.reused_blocks)
        attempt = request.attempt = Attempt(request, number, job, decision, prefill, decode)
        request.attempts += 1
        self.fleet.inflight.begin_decode(attempt_id(attempt), decode.state)
        self.want_room(attempt)
        decode.settle()

    def want_room(self, attempt: Attempt) -> None:
        """At its decode instance, for its prompt and, where there is a next one, the token after that."""
        request = attempt.request
        attempt.tokens = request.tokens + attempt.generated
        more = attempt.generated + 1 < request.max_tokens
        usable = attempt.tokens - (1 if attempt.together else 0)
        total = LAYOUT.blocks_for(attempt.tokens + more)
        asked = BatchRequest(attempt.number, attempt.tokens, total, tuple(request.keys), usable // BLOCK)
        attempt.decode.want(asked, lambda room: self._decode_room(attempt, room))

    def number(self) -> int:
        return next(self._numbers)

    def _decode_room(self, attempt: Attempt, room: Reservation) -> None:
        attempt.room = room
        prefill, request = attempt.prefill, attempt.request
        if not prefill.alive:
            self.fail(attempt, prefill)
            return
        prompt = Prompt(
            attempt.job, attempt.tokens, tuple(request.keys), _reusable(attempt), attempt.together, self.now_s
        )
        try:
            prefill.prompts.add(prompt, self.now_s)
        except ResourceExhausted:
            self.fail(attempt, prefill)
            return
        prefill.jobs[attempt.job] = attempt
        prefill.pump()

    # -- the end of an attempt, and of a request

    def finish(self, attempt: Attempt) -> None:
        self._tear_down(attempt)
        self.fleet.inflight.end_decode(attempt_id(attempt), attempt.decode.state)
        self._end(attempt.request, "finished")
        self._leave()

    def fail(self, attempt: Attempt, culprit: Instance) -> None:
        """Once more elsewhere, as the load balancer does."""
        request = attempt.request
        self._tear_down(attempt)
        self.fleet.inflight.release(attempt_id(attempt))
        if request.attempts < ATTEMPTS:
            request.exclude.add(culprit.name)
            self.log("retry", request.number, culprit.name)
            self._place(request, self.now_s + 5.0)
        else:
            self._end(request, "failed")
            self._leave()

    def _cancel(self, request: Request) -> None:
        if request.ends:
            return
        attempt = request.attempt
        if request.queued:
            request.queued = False
            assert self.queue.cancel(request.number, self.now_s)
            self._end(request, "cancelled")
            return
        if attempt is not None and not attempt.over:
            self._tear_down(attempt)
            self.fleet.inflight.release(attempt_id(attempt))
        self._end(request, "cancelled")
        self._leave()

    def _tear_down(self, attempt: Attempt) -> None:
        """Give back everything that lives: what died took its share along."""
        attempt.over = True
        prefill, decode = attempt.prefill, attempt.decode
        if prefill.alive:
            prefill.unwant(attempt.room_number)
            if prefill.jobs.pop(attempt.job, None) is not None:
                prefill.prompts.end(attempt.job)
                prefill.steps.remove_prefill(attempt.job)
            if attempt.job_room is not None and not attempt.together:
                room, attempt.job_room = attempt.job_room, None
                prefill.free(attempt.room_number, room.table)
        if decode.alive:
            decode.unwant(attempt.number)
            if decode.decodes.pop(attempt.number, None) is not None:
                decode.steps.remove_decode(attempt.number)
            if attempt.room is not None:
                room, attempt.room = attempt.room, None
                decode.free(attempt.number, room.table)
        for instance in (prefill,) if attempt.together else (prefill, decode):
            if instance.alive:
                instance.pump()

    def _end(self, request: Request, how: str) -> None:
        request.ends.append(how)
        self.log(how, request.number, request.attempts)

    # -- deaths

    def _boot(self, name: str, role: Role) -> None:
        self.instances[name] = Instance(self, name, next(self._boots), role)

    def _death(self) -> None:
        victim = self.rng.choice([self.instances[name] for name in sorted(self.instances)])
        if not victim.alive:
            return
        victim.alive = False
        self.log("death", victim.name)
        role = victim.state.info.role
        self.fleet.leave(victim.name)
        for request in list(self.requests.values()):
            attempt = request.attempt
            if attempt is not None and not attempt.over and victim in (attempt.prefill, attempt.decode):
                if attempt.decode is not victim and attempt.decode.decodes.get(attempt.number) is attempt:
                    continue  # its prompt is computed and here: the prefill instance is not needed any more
                self.fail(attempt, victim)
        self.after(self.rng.uniform(0.2, 3.0), lambda: self._boot(victim.name, Role(role.value)))

    def check_over(self) -> None:
        """Every request ended once, and nothing is left anywhere."""
        wrong = {number: request.ends for number, request in self.requests.items() if len(request.ends) != 1}
        assert not wrong, wrong
        assert not any(journal.ended for journal in self._recording)
        assert (self.queue.in_flight, self.queue.queued) == (0, 0)
        self.queue.check_integrity()
        assert (self.fleet.inflight.prefills, self.fleet.inflight.decodes) == (0, 0)
        self.fleet.index.check_integrity()
        for instance in self.instances.values():
            instance.check_idle()
            assert (instance.state.queued_prefill_us, instance.state.inflight_decode_blocks) == (0, 0)
            assert instance.state.inflight_reads == 0
