"""A simulated engine instance: the modules by which a worker decides, and steps that take the time of a profile.

A worker's futures are members by number here. Steps in which nothing changes are simulated as one *leap*. A leap ends
with the first request that is done or needs another block. An event in between cuts it short, at the end of the step in
which the event happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from pinyon.batching import LEVEL_BLOCKS, BatchRequest, StepPlan
from pinyon.batching.engine_step import GROUPED
from pinyon.batching.policy import StepSeen
from pinyon.batching.token_times import TokenTimes
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.decisions import InstanceConfig, InstanceDecisions, RoomWaits, make_room
from pinyon.paging import Reservation
from pinyon.placement.instances import InstanceInfo, InstanceLoad, InstanceState
from pinyon_lab.simulator.attempt import Attempt
from pinyon_lab.simulator.cluster_settings import StepRule
from pinyon_lab.simulator.leap import DecodeSums, Leap
from pinyon_lab.simulator.world import World

LEAP_S = 1.0
"""The limit of a leap: the engine reports its load at least this often."""
WAITING_LEAP_S = 0.1
"""The limit of a leap while a request waits for KV memory, as passing time affects which request gets memory."""


class Owner(Protocol):
    """An owner of engines, which is told of the progress of their members: :class:`AttemptLifecycle`."""

    def started(self, engine: SimEngine, attempt: Attempt) -> None: ...
    def computing(self, engine: SimEngine, attempt: Attempt, end: int) -> None: ...
    def computed(self, engine: SimEngine, attempt: Attempt, start: int, end: int) -> None: ...
    def decoded(self, engine: SimEngine, attempt: Attempt, count: int, seconds: float) -> None: ...
    def failed(self, engine: SimEngine, attempt: Attempt) -> None: ...
    def gave_way(self, engine: SimEngine, attempt: Attempt) -> None: ...


class SimEngine:
    """An engine instance from one boot until it dies."""

    def __init__(self, world: World, owner: Owner, info: InstanceInfo, config: InstanceConfig) -> None:
        """Starts an instance that has as many machines as pipeline stages; tells ``owner`` of its members' progress."""
        time, fleet, machine, settings = world.time, world.fleet, world.machine, world.settings
        self.name, self.boot = info.instance_id, info.boot_id
        decisions = InstanceDecisions(config, world.journal(info.boot_id, config))
        self.pool, self.reservations, self.admission = decisions.pool, decisions.reservations, decisions.admission
        self.prompts, self.steps, self.batch_room = decisions.prompts, decisions.steps, decisions.room
        self.room_waits = RoomWaits()
        self.alive = True
        self.state: InstanceState = fleet.join(info, time.now_s)
        fleet.index.apply_snapshot(self.state, 0, b"", first=True, last=True)
        self.jobs: dict[int, Attempt] = {}
        """The attempts whose prompts are queued or computed here, by job."""
        self.decodes: dict[int, Attempt] = {}
        """The attempts that are decoded here, by number."""
        self.evicted = 0
        self.decode_sums = DecodeSums()
        self.stalled_s = 0.0
        """The total time that the engine has waited for its scheduler."""
        self.prompt_tokens = 0
        """The number of prompt tokens computed."""
        self.draining = False
        """True if the engine accepts nothing new."""
        self._owner, self._time, self._fleet = owner, time, fleet
        self._block_bytes = config.block_tokens * machine.kv_token_bytes
        self._dram_bytes_s = info.stages * machine.dram_bytes_s
        self._wanted: dict[int, Callable[[Reservation], None]] = {}
        self._after_step: list[tuple[int, list[int]]] = []
        self._expiry_s: float | None = None
        self._swapped_s = 0.0
        """The time at which all copies between the tiers are done."""
        self._profile, self._rule, self._faults = world.engine, settings.step_rule, world.faults
        self._whole_tokens = settings.whole_tokens
        self._scheduling = settings.scheduling
        self._block_tokens = config.block_tokens
        self._grouped = config.kernel == GROUPED
        self._stages = [0.0] * info.stages
        """The time at which each stage is free."""
        self._passing = 0
        """The prompt tokens that the first stage has computed, but not yet all stages."""
        self._plan: StepPlan | None = None
        """The plan of the step or leap under way."""
        self._leap = Leap(0.0, 0.0)
        self._turn = 0
        self._busy = False
        self._seq = 0
        self._token_times = TokenTimes()
        self._kv_tokens = 0
        """The tokens of KV that the last step read."""
        self._kv_counted = 0.0
        """The number of those tokens that the profile counts if the batch shares some of them."""

    # -- prompts

    def pump(self) -> None:
        """Starts the prompts that can leave the queue now."""
        for number in self.prompts.start(self._time.now_s):
            self._owner.started(self, self.jobs[number])

    def begin(self, attempt: Attempt, held: int) -> None:
        """Computes the rest of a prompt whose first ``held`` tokens have their KV here."""
        self.prompts.advanced(attempt.job, held)
        self.steps.add_prefill(self.prompts.work(attempt.job, held))
        self.kick()

    def drop_prompt(self, attempt: Attempt) -> None:
        if self.jobs.pop(attempt.job, None) is not None:
            self.prompts.end(attempt.job)
            self.steps.remove_prefill(attempt.job)
            self._shorten()

    # -- decoding

    def decode(self, attempt: Attempt) -> None:
        """Adds an attempt to the decode batch; its KV is here, and it has blocks for the next token."""
        assert attempt.room is not None
        self.decodes[attempt.number] = attempt
        held = attempt.request.tokens + attempt.request.generated - 1
        table = attempt.room.table
        self.steps.add_decode(attempt.number, held, len(table), self.steps.path(table, held))
        self.kick()

    def drop_decode(self, attempt: Attempt) -> None:
        if self.decodes.pop(attempt.number, None) is not None:
            self.steps.remove_decode(attempt.number)
            self._shorten()

    # -- steps

    def kick(self) -> None:
        """Begins a step if there is work and none is under way; otherwise ends the leap with the present step."""
        if self._plan is not None:
            self._shorten()
            return
        if self._busy or not self.alive:
            return
        self._busy = True  # a request that gets room in settle() may call kick()
        self.settle()
        self.steps.fill()
        for number in make_room(self.steps, self.admission, self, self._table):
            self._owner.gave_way(self, self.decodes.pop(number))
        self.settle()
        self._busy = False
        plan = self.steps.decide(self._time.now_s)
        if plan is not None:
            self._begin(plan)

    def _table(self, number: int) -> list[int]:
        room = self.decodes[number].room
        assert room is not None
        return room.table

    def _begin(self, plan: StepPlan) -> None:
        if plan.prefills and self._rule is StepRule.PREFILL_FIRST:
            plan.decodes.clear()
            del plan.prefills[self._together(plan) :]
        now_s, profile = self._time.now_s, self._profile
        chunks = [(start, end) for _, start, end in plan.prefills]
        context = sum(self._context(number) for number in plan.decodes)
        counted = profile.kv_read(context, self._read_again(plan))
        seconds = profile.seconds(chunks, len(plan.decodes), counted)
        self._kv_tokens, self._kv_counted = context, counted
        copies_s = self.copies_s()  # for grown tables; no block is used before its copies are done
        stall_s = self._scheduling.of(self.admission.waiting + self.steps.waiting)
        self._plan, self._leap = plan, Leap(now_s + copies_s + stall_s, seconds, stall_s=stall_s)
        self._turn += 1
        if len(self._stages) > 1:
            self._begin_stages(plan, seconds)
            return
        for number, _, end in plan.prefills:
            self._owner.computing(self, self.jobs[number], end)
        if not plan.prefills:
            self._leap.growth_s = profile.decode_kv_token_s * len(plan.decodes)
            self._leap.count = self._steps_until_change(plan)
        self._await()

    def _read_again(self, plan: StepPlan) -> int:
        """Returns the tokens of KV that the step has already read for another request. They are in blocks that all
        decoded requests share or, if the kernel reads these once, too, that only some share."""
        if self._profile.decode_shared_share == 1.0 or len(plan.decodes) < 2:
            return 0
        tables = [self._table(number) for number in plan.decodes]
        if self._grouped:
            return self._block_tokens * (sum(map(len, tables)) - len(set().union(*tables)))
        return self._block_tokens * shared_blocks(tables) * (len(tables) - 1)

    def _together(self, plan: StepPlan) -> int:
        """Returns the number of whole prompts that are computed at once: the first, and those that fit beside it."""
        ends = accumulate(end - start for _, start, end in plan.prefills)
        return max(1, sum(tokens <= self._whole_tokens for tokens in ends))

    def _context(self, number: int) -> int:
        request = self.decodes[number].request
        return request.tokens + request.generated

    def _steps_until_change(self, plan: StepPlan) -> int:
        """Returns the steps until the first decoded request is done or needs a block, limited by the time of a leap."""
        room = self.steps.room
        if len(plan.decodes) < self.steps.running or self.steps.learns:
            return 1  # the next step may decode others
        most = min(min(self._left(number), room(number)) for number in plan.decodes)
        limit_s = WAITING_LEAP_S if self._wanted else LEAP_S
        step_s = self._leap.step_s
        return max(1, min(most, int(limit_s / step_s) if step_s else most))

    def _left(self, number: int) -> int:
        request = self.decodes[number].request
        return request.max_tokens - request.generated

    def _await(self) -> None:
        turn = self._turn
        self._time.at(self._leap.end_s, lambda: self._stepped(turn))

    def _shorten(self) -> None:
        """Ends the leap with the present step, as an event changes the next step."""
        if self._plan is not None and self._leap.shorten(self._time.now_s):
            self._turn += 1
            self._await()

    def _begin_stages(self, plan: StepPlan, seconds: float) -> None:
        """Sends a chunk through the stages one after the other; the next step begins when the first stage is free."""
        stages, part_s = self._stages, seconds / len(self._stages)
        end_s = self._leap.began_s
        for stage, free_s in enumerate(stages):
            stages[stage] = end_s = max(end_s, free_s) + part_s
        for number, _, end in plan.prefills:
            self._owner.computing(self, self.jobs[number], end)
        turn = self._turn
        self._time.at(stages[0], lambda: self._stepped(turn, end_s))

    def _stepped(self, turn: int, effect_s: float | None = None) -> None:
        """Completes the step or leap. With ``effect_s`` it is the first stage's; the last one ends at that time."""
        if turn != self._turn or not self.alive:
            return
        plan, count = self._plan, self._leap.count
        assert plan is not None
        lasted_s, stall_s = self._time.now_s - self._leap.began_s, self._leap.stall_s
        seconds = lasted_s - (count - 1) * stall_s
        between_s = (seconds + count * stall_s) / count
        self.stalled_s += count * stall_s
        failed_prefills, failed_decodes = self._failures(plan)
        failed = [self.jobs[number] for number in failed_prefills if number in self.jobs]
        failed += [self.decodes[number] for number in failed_decodes if number in self.decodes]
        counted = self.steps.fold(plan, set(failed_prefills), set(failed_decodes), count)
        self._plan, self._busy = None, True  # the next step is decided once the owner knows everything about this one
        self.free_late()
        tokens, token_s = counted.prompt_tokens, plan.token_s(seconds)
        self.prompt_tokens += tokens
        decode_s = seconds
        if plan.prefills:
            decode_s = self._profile.seconds((), len(plan.decodes), self._kv_counted)
        told_s = decode_s if plan.prefills else 0.0  # the decode part of steps with prefill
        seen = StepSeen(count * len(counted.decodes), tokens, seconds, count, self._leap.growth_s, told_s)
        self.admission.observe(seen)
        self.steps.observe(seen)
        chunks = [(self.jobs[number], start, end) for number, start, end in counted.prefills]
        for attempt, start, end in chunks:
            attempt.computing_s += token_s * (end - start)  # prompts queued after it wait so long
        if effect_s is None:
            self._told(chunks)
        elif chunks:
            for attempt, _, _ in chunks:
                attempt.drain_s = effect_s - self._time.now_s
            self._passing += tokens
            self._time.at(effect_s, lambda: self._told_late(chunks, tokens))
        if counted.decodes:
            decodes, kv_tokens = len(plan.decodes), self._kv_counted
            grown = decodes * (count * (count - 1) // 2)
            self.decode_sums.add(count, decodes, decode_s, count * kv_tokens + grown)
            self._kv_tokens += len(plan.decodes) * count // 2
            running = self.steps.running
            if len(plan.decodes) < running:  # others are decoded in other steps of the round
                self._kv_tokens = sum(map(self._context, self.decodes))
            self._token_times.decoded(len(plan.decodes), between_s, self._kv_tokens, count, running)
        for number in counted.decodes:
            if number in self.decodes:
                self._owner.decoded(self, self.decodes[number], count, between_s)
        for attempt in failed:
            if not attempt.over:
                self._owner.failed(self, attempt)
        self.report()
        self.pump()
        self._busy = False
        self.kick()

    def _failures(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        faults = self._faults
        if faults is None:
            return [], []
        prefills = [number for number, _, _ in plan.prefills if faults.step_fails()]
        return prefills, [number for number in plan.decodes if faults.step_fails()]

    def _told(self, chunks: Sequence[tuple[Attempt, int, int]]) -> None:
        for attempt, start, end in chunks:
            if not attempt.over and attempt.job in self.jobs:
                self._computed(attempt, start, end)

    def _told_late(self, chunks: Sequence[tuple[Attempt, int, int]], tokens: int) -> None:
        self._passing -= tokens
        if self.alive:
            self._told(chunks)
            self.report()
            self.pump()
            self.kick()

    def _computed(self, attempt: Attempt, start: int, end: int) -> None:
        room, block = attempt.job_room, self._block_tokens
        assert room is not None
        self.prompts.advanced(attempt.job, end - start)
        keys = attempt.request.keys
        first, last = start // block, min(end // block, len(keys))
        self.publish(attempt, room, first, last)
        self.prompts.published(attempt.job, keys[first:last])
        if end == attempt.tokens:
            self.prompts.end(attempt.job)
            del self.jobs[attempt.job]
        self._owner.computed(self, attempt, start, end)

    # -- KV memory

    def want(self, request: BatchRequest, then: Callable[[Reservation], None], *, new: bool = True) -> None:
        """Queues a request for KV blocks; :meth:`settle` passes them to ``then``. Not ``new``: it was preempted."""
        self._wanted[request.number] = then
        if new:
            self.room_waits.began(request.number, self._time.now_s)
        self.admission.enqueue(request)
        self._line_changed()

    def unwant(self, number: int) -> None:
        """Ends the wait of a request for room, if it waits."""
        if self._wanted.pop(number, None) is not None:
            self.room_waits.left(number, self._time.now_s)
            self.admission.withdraw(number)
            self.settle()
        self._line_changed()

    def _line_changed(self) -> None:
        """Ends the leap if each waiting request costs scheduling time: its steps are no longer equal."""
        if self._scheduling.waiting_s:
            self._shorten()

    def wants(self, number: int) -> bool:
        return number in self._wanted

    def settle(self) -> None:
        """Gives blocks to the requests that can have them: blocks may have become free, or a new request may wait."""
        for number, reservation, _ in self.admission.admit(self._time.now_s):
            self.room_waits.granted(number, self._time.now_s)
            self._wanted.pop(number)(reservation)

    def free(self, number: int, table: list[int]) -> None:
        """Frees blocks of the request ``number``, or surplus blocks if it is 0. As in a worker, blocks are freed only
        when the step that may still touch them is over."""
        if self._plan is not None:
            self._after_step.append((number, table))
            self.kick()
            return
        self.give_way(number, table)
        self.settle()

    def grow(self, number: int, count: int) -> list[int] | None:
        """Implements :class:`pinyon.decisions.Room`."""
        return self.admission.grow(number, count, self._time.now_s)

    def free_late(self) -> None:
        """Frees the blocks that were given back during the step that has ended."""
        tables, self._after_step = self._after_step, []
        for number, table in tables:
            self.give_way(number, table)
        self.settle()

    def give_way(self, number: int, table: list[int]) -> None:
        """Implements :class:`pinyon.decisions.Room`."""
        if number:
            self.admission.end(number)
        self.reservations.release(table, self._time.now_s)

    def publish(self, attempt: Attempt, room: Reservation, first: int, last: int) -> None:
        """Publishes the request's blocks ``[first, last)``, whose content is complete. If the pool already holds the
        same content, that block replaces the room's own block, which is freed."""
        request = attempt.request
        keys = request.keys[first:last]
        if not keys:
            return
        after = request.keys[first - 1] if first else None
        duplicates = []
        blocks = room.table[first : first + len(keys)]
        for index, block in self.reservations.publish(
            blocks, keys, self._time.now_s, request.traits, first=first, after=after
        ):
            duplicates.append(room.table[first + index])
            room.table[first + index] = block
        if duplicates:
            self.free(0, duplicates)

    def copies_s(self) -> float:
        """Returns the seconds until all copies between the tiers are done, including new ones."""
        now_s = self._time.now_s
        swaps = self.reservations.take_swaps()
        if swaps:
            out = sum(swap.out >= 0 for swap in swaps)
            copied = out + sum(swap.into >= 0 for swap in swaps)
            self._swapped_s = max(self._swapped_s, now_s) + copied * self._block_bytes / self._dram_bytes_s
            if out:
                self._time.at(self._swapped_s, lambda: self.reservations.swapped(out))
        return max(0.0, self._swapped_s - now_s)

    # -- leases

    def lease(self, keys: Sequence[BlockKey], duration_s: float) -> tuple[int, int]:
        """Puts a lease on the leading keys that are held; returns the lease and the number of those keys."""
        lease, found = self.reservations.lease(keys, duration_s, self._time.now_s, False)
        self._watch_leases()
        return lease, len(found)

    def end_lease(self, lease: int) -> None:
        if self.alive and self.reservations.end_lease(lease, self._time.now_s):
            self.settle()
            self.kick()

    def _watch_leases(self) -> None:
        deadline_s = self.reservations.next_deadline()
        if deadline_s is not None and self._expiry_s is None:
            self._expiry_s = max(deadline_s, self._time.now_s)
            self._time.at(self._expiry_s, self._expire)

    def _expire(self) -> None:
        self._expiry_s = None
        if self.alive:
            for lease in self.reservations.overdue(self._time.now_s):
                self.reservations.end_lease(lease, self._time.now_s)
            self.settle()
            self._watch_leases()
            self.kick()

    # -- reports to the conductor

    def report(self) -> None:
        """Reports changed blocks and the load to the fleet, as a worker does to the conductor."""
        stored, removed = self.pool.drain_changes()
        self.evicted += len(removed)
        if stored or removed:
            self._seq += 1
            self._fleet.index.apply_delta(self.state, self._seq, pack_keys(stored), pack_keys(removed))
        pending = len(self.decodes) + len(self._wanted) - self.steps.running
        tbt_ms, batch, kv_tokens = self._token_times.take(idle=not self.steps.running)
        reads_once = self._profile.decode_shared_share < 1.0 and self.steps.reads_once
        load = InstanceLoad(
            max(0, pending),
            self.steps.running,
            max(0, self.prompts.pending_tokens - self._passing),
            self.pool.used,
            self.pool.cached,
            mean_tbt_ms=tbt_ms,
            mean_batch=batch,
            mean_kv_tokens=kv_tokens,
            kv_tokens=self._kv_tokens if self.steps.running else 0,
            room_wait_ms=self.room_waits.wait_s(self._time.now_s) * 1e3,
            draining=self.draining,
            level_blocks=LEVEL_BLOCKS if reads_once else 0,
            shared=self.admission.prefixes.shared() if reads_once else (),
        )
        self._fleet.set_load(self.state, load, self._time.now_s)

    def drain(self) -> None:
        """Accepts nothing new from now on."""
        self.draining = True
        self.report()

    @property
    def idle(self) -> bool:
        """True if nothing of any request is here, and no peer reads from the instance."""
        waits = self.jobs or self.decodes or self._wanted or self._after_step
        return not (waits or self.pool.used or self.reservations.leases)


def shared_blocks(tables: Sequence[list[int]]) -> int:
    """Returns the number of leading blocks that all of these tables share: in FEATHER, the depth of the shared prefix.
    O(requests · shared blocks), compared in C."""
    if not tables:
        return 0
    # What the smallest and the largest table share, all tables between them share, too.
    first, last = min(tables), max(tables)
    count = min(len(first), len(last))
    if first[:count] == last[:count]:
        return count
    return next(place for place in range(count) if first[place] != last[place])
