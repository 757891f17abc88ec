"""The life of an attempt at its instances: KV blocks, prefill, KV transfers, decoded tokens, and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from pinyon.batching import BatchRequest, Prompt
from pinyon.core.errors import ResourceExhausted
from pinyon.eviction import Use
from pinyon.paging import Reservation
from pinyon_lab.simulator.attempt import Attempt, SimRequest
from pinyon_lab.simulator.engine import SimEngine
from pinyon_lab.simulator.kv_moves import KvMoves
from pinyon_lab.simulator.members import Members
from pinyon_lab.simulator.world import World


class AttemptLifecycle:
    """The owner of one cluster's engines, which starts them and moves their KV."""

    def __init__(
        self,
        world: World,
        numbers: Iterator[int],
        counts: Counter[str],
        log: Callable[..., None],
        again: Callable[[Attempt, str], None],
        leave: Callable[[SimRequest, str], None],
    ) -> None:
        """Starts without engines; ``numbers`` numbers prompts and demands for KV blocks. Calls ``again`` with an
        attempt that failed and the instance at fault, and ``leave`` with a request that ended and how."""
        self.members = Members(world, self)
        self.moves = KvMoves(world, self.members)
        self.movable: dict[str, Attempt] = {}
        """The attempts, by id, that may be moved to another instance while their prompts wait."""
        self._boots = self.members.boots
        self._time, self._settings, self._fleet = world.time, world.settings, world.fleet
        self._numbers, self._counts = numbers, counts
        self._log, self._again, self._leave = log, again, leave

    def begin(self, attempt: Attempt) -> None:
        """Begins a new attempt, for which the decode instance may have room now."""
        self._want_room(attempt)
        engine = self._boots[attempt.decode]
        engine.settle()
        engine.kick()

    def _want_room(self, attempt: Attempt, *, new: bool = True) -> None:
        """Asks the decode instance for KV blocks: for the prompt and, if more follow, the first generated token."""
        request, block_tokens = attempt.request, self._settings.block_tokens
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
            arrived_s=self._time.now_s,
            traits=Use.of(request.request_class).traits,
            seconds=attempt.decision.prefill_s + attempt.decision.drain_s,
            deadline_s=request.arrived_s + self._settings.slo_s,
            computes=attempt.together,
        )
        self._boots[attempt.decode].want(asked, lambda room: self._decode_room(attempt, room), new=new)

    def _decode_room(self, attempt: Attempt, room: Reservation) -> None:
        attempt.room = room
        prefill, request = self._boots.get(attempt.prefill), attempt.request
        if prefill is None:
            self._again(attempt, attempt.prefill.rpartition("/")[0])
            return
        reusable = attempt.reusable(self._settings.block_tokens)
        gave_way = attempt.together and request.generated > 0  # then it precedes all other prompts, as in a worker
        prompt = Prompt(
            attempt.job, attempt.tokens, request.keys, reusable, attempt.together, self._time.now_s,
            seconds=0.0 if gave_way else attempt.decision.prefill_s + attempt.decision.drain_s,
            deadline_s=0.0 if gave_way else request.arrived_s + self._settings.slo_s,
        )  # fmt: skip
        try:
            prefill.prompts.add(prompt, self._time.now_s)
        except ResourceExhausted:
            self._again(attempt, prefill.name)
            return
        prefill.jobs[attempt.job] = attempt
        prefill.pump()

    # -- called by engines

    def started(self, engine: SimEngine, attempt: Attempt) -> None:
        """Notes that a prompt has left the queue: it may move KV, then compute. Called again if it was held back."""
        self.movable.pop(attempt.id, None)
        block_tokens = self._settings.block_tokens
        reusable = attempt.reusable(block_tokens)
        room = attempt.room if attempt.together else attempt.job_room  # set if the prompt was held back
        if room is not None:
            keys = attempt.request.keys[:reusable]
            engine.reservations.extend(room, keys, self._time.now_s, attempt.request.traits)
            engine.settle()
            self._has_room(engine, attempt, room)
            return
        attempt.room_number = next(self._numbers)  # demands for room are ordered by number
        blocks = -(-attempt.tokens // block_tokens)
        engine.want(
            BatchRequest(attempt.room_number, attempt.tokens, blocks, attempt.request.keys, reusable, decodes=False),
            lambda room: self._has_room(engine, attempt, room),
        )
        engine.settle()
        if engine.wants(attempt.room_number):
            attempt.roomless = True
            self._counts["roomless"] += 1
            engine.prompts.waits_for_room(attempt.job)
            number = attempt.room_number
            self._time.after(self._settings.room_wait_s, lambda: self._too_late(engine, attempt, number))
            engine.pump()

    def _too_late(self, engine: SimEngine, attempt: Attempt, number: int) -> None:
        """Gives up an attempt: mixed instances may wait for each other's room in a circle, for ever."""
        if engine.alive and not attempt.over and attempt.roomless and attempt.room_number == number:
            self._counts["gave up"] += 1
            self._again(attempt, engine.name)

    def _has_room(self, engine: SimEngine, attempt: Attempt, room: Reservation) -> None:
        if attempt.roomless:
            attempt.roomless = False
            engine.prompts.has_room(attempt.job)
        engine.prompts.reserved(attempt.job)
        attempt.job_room = room
        if engine.prompts.held_back(attempt.job):
            return
        if attempt.request.attempts <= 1 and not attempt.request.generated:
            attempt.request.hit_tokens = room.held * self._settings.block_tokens
        self.moves.fetch(attempt, engine, lambda: self._compute(engine, attempt))

    def _compute(self, engine: SimEngine, attempt: Attempt) -> None:
        """Begins the prefill once blocks that were promoted from the second tier have been copied."""
        copies_s = engine.copies_s()
        if copies_s:
            self._time.after(copies_s, lambda: self._begin(engine, attempt))
        else:
            self._begin(engine, attempt)

    def _begin(self, engine: SimEngine, attempt: Attempt) -> None:
        if attempt.over or not engine.alive:
            return
        room = attempt.job_room
        assert room is not None
        held = room.held * self._settings.block_tokens
        self._fleet.inflight.begin_prefill(attempt.id, engine.state, self._time.now_s)
        engine.begin(attempt, held)

    def computing(self, engine: SimEngine, attempt: Attempt, end: int) -> None:
        """Notes that the prompt's tokens up to ``end`` are being computed."""
        if attempt.together:
            return
        decode = self._boots.get(attempt.decode)
        if decode is not None:
            if not attempt.pushed and attempt.room is not None:
                attempt.pushed = attempt.room.held * self._settings.block_tokens
            self.moves.push(attempt, engine, decode, end, lambda: self._pushed(engine, attempt))

    def computed(self, engine: SimEngine, attempt: Attempt, start: int, end: int) -> None:
        """Notes that these tokens are computed and published; the prompt is complete if ``end`` is its length."""
        request, now_s = attempt.request, self._time.now_s
        store = self.members.store(engine)
        if store is not None:
            block_tokens = self._settings.block_tokens
            store.put(request.keys[: end // block_tokens], now_s, request.traits, attempt.told)
            attempt.told = end // block_tokens
        if end < attempt.tokens:
            return
        held = attempt.job_room.held * self._settings.block_tokens if attempt.job_room is not None else 0
        self._fleet.learn_prefills(engine.state, [(end - held, held, attempt.computing_s)], now_s)
        self._fleet.inflight.end_prefill(attempt.id, engine.state, now_s)
        request.computing_s += attempt.computing_s + attempt.drain_s
        attempt.computed = True
        if attempt.together:
            self._decode(engine, attempt)
        elif not attempt.pushing:
            self._all_pushed(engine, attempt)

    def _pushed(self, engine: SimEngine, attempt: Attempt) -> None:
        attempt.pushing -= 1
        if attempt.computed and not attempt.pushing:
            self._all_pushed(engine, attempt)

    def _all_pushed(self, engine: SimEngine, attempt: Attempt) -> None:
        """Frees the prefill instance's blocks, as all KV is at the decode instance, and begins decoding."""
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

    def _decode(self, engine: SimEngine, attempt: Attempt) -> None:
        """Counts the first token, which the prefill has sampled, and decodes if more are wanted."""
        request, now_s = attempt.request, self._time.now_s
        if request.generated:
            request.intervals.append((now_s - request.last_token_s, 1))
        else:
            request.first_token_s = now_s
            self._log("first", request.number, engine.name)
        self._generated(engine, attempt, 1)
        if request.generated == request.max_tokens:
            self._finish(engine, attempt)
        else:
            engine.decode(attempt)

    def decoded(self, engine: SimEngine, attempt: Attempt, count: int, seconds: float) -> None:
        """Notes ``count`` new tokens, ``seconds`` apart. The request goes on unless it is dropped."""
        request, now_s = attempt.request, self._time.now_s
        waited_s = now_s - request.last_token_s - count * seconds
        request.intervals.append((seconds + max(0.0, waited_s), 1))
        if count > 1:
            request.intervals.append((seconds, count - 1))
        self._generated(engine, attempt, count)
        if request.generated >= request.max_tokens:
            self._finish(engine, attempt)

    def _generated(self, engine: SimEngine, attempt: Attempt, count: int) -> None:
        """Counts new tokens, and publishes the blocks that they fill as those of prompts are published."""
        request, room = attempt.request, attempt.room
        request.generated += count
        request.last_token_s = self._time.now_s
        new = request.filled(self._settings.block_tokens)
        if new and room is not None:
            engine.publish(attempt, room, len(request.keys) - new, len(request.keys))

    def gave_way(self, engine: SimEngine, attempt: Attempt) -> None:
        """Queues a preempted attempt to be computed here again once there is room, before all that came after it."""
        self._log("preempted", attempt.request.number, attempt.request.generated)
        attempt.prefill, attempt.room, attempt.job_room = engine.boot, None, None
        attempt.job, attempt.computed, attempt.computing_s = next(self._numbers), False, 0.0
        attempt.drain_s = 0.0
        self._want_room(attempt, new=False)

    def failed(self, engine: SimEngine, attempt: Attempt) -> None:
        """Notes that a step failed for this attempt."""
        self._again(attempt, engine.name)

    def _finish(self, engine: SimEngine, attempt: Attempt) -> None:
        self.tear_down(attempt)
        self._fleet.inflight.end_decode(attempt.id, engine.state)
        self._leave(attempt.request, "finished")

    def tear_down(self, attempt: Attempt) -> None:
        """Frees everything that the attempt holds at live instances; a dead instance has lost its part."""
        attempt.over = True
        self.movable.pop(attempt.id, None)
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
