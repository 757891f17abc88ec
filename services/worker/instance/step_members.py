"""The members of engine steps: the prompts and requests behind the numbers in the scheduler's plans.

``decide`` turns a plan into the engine's input; ``fold`` gives each member its result. Members may be removed between
the two: their results are dropped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pinyon.batching import (
    DecodeSlot,
    Formed,
    LayerHook,
    PrefillChunk,
    PromptWork,
    StepPlan,
    StepScheduler,
    TokenCounts,
)
from pinyon.core.errors import Internal
from pinyon.core.logprobs import LogprobRows, TokenLogprob
from pinyon.core.orders import PrefillOrder
from pinyon.decisions import Admission, Room, make_room
from services.worker.engines.protocol import StepLogprobs
from services.worker.kv.swaps import Swapping

LOOK_S = 1.0
"""The time in s between looks at what all decoded requests share, where no policy forms batches of them."""
ChunkHooks = Callable[[int, int], tuple[LayerHook | None, LayerHook | None]]
"""Maps ``(start, end)`` of a chunk to its ``(wait_layer, on_layer)``."""


@dataclass(eq=False, slots=True)
class PrefillMember:
    """A prompt being computed."""

    work: PromptWork
    """The work; its position counts tokens whose KV is in the pool at first, or arrives through ``wait_layer``."""
    order: PrefillOrder
    table: list[int]
    advanced: Callable[[int, int, int | None, float], None]
    """The callback ``(start, end, token, seconds)``; the token comes with the last chunk.

    The seconds are the prompt's share of the step's whole time, which is divided among its prompts only. So they
    include the batch's part: beside a batch a prompt takes longer, and others wait for as long."""
    failed: Callable[[Exception], None]
    hooks: ChunkHooks | None = None
    counts: TokenCounts | None = None
    """The counts of the order's tokens, if its sampling is penalised."""
    logprob: TokenLogprob | None = None
    """The log-probability of the sampled token, once there is one, if the order asks for it."""
    prompt_logprobs: LogprobRows | None = None
    """The log-probabilities of the tokens that follow those of the last chunk."""
    alive: bool = True


@dataclass(eq=False, slots=True)
class DecodeMember:
    """A request in (or waiting for) the batch."""

    number: int
    slot: DecodeSlot
    """The token that is fed next; it, its position and the counts up to it change here, between steps."""
    table: list[int]
    """The blocks of the slot, which cover all before its position, and mostly more; it grows here."""
    advanced: Callable[[int], bool]
    """The callback for the new token; it returns False when the request is finished."""
    failed: Callable[[Exception], None]
    preempted: Callable[[], None]
    """The callback when it has left the batch and lost its blocks, because there was no room for all."""
    logprob: TokenLogprob | None = None
    """The log-probability of the slot's token, if its sampling asks for it and it was sampled here."""
    alive: bool = True


@dataclass(slots=True)
class EngineStep:
    """A plan: its members and the engine's input for each, in the plan's order."""

    plan: StepPlan
    tokens: int
    """The number of tokens computed: ``plan.tokens``."""
    kv_tokens: int
    """The tokens before those decoded, whose KV they read."""
    prefills: list[PrefillMember]
    chunks: list[PrefillChunk]
    decodes: list[DecodeMember]
    slots: list[DecodeSlot]
    swapping: Swapping | None = None
    """Copies between the tiers that must end before decoding; chunks wait for theirs layer by layer."""


@dataclass(slots=True)
class StepOutcome:
    """The token that the engine sampled for each member, or the member's error."""

    prefills: Sequence[int | Exception | None]
    decodes: Sequence[int | Exception]
    elapsed_s: float
    whole: bool = False
    """True if certainly none failed."""
    logprobs: StepLogprobs | None = None
    decode_s: float = 0.0
    """The time of decoding, see :class:`pinyon.batching.StepSeen`."""


class StepRoom(Room, Protocol):
    """The source of blocks: :class:`services.worker.kv.cache.KvCache`."""

    def settle(self) -> None:
        """Admits the requests whose turn it is."""
        ...

    def swapping(self, tables: Iterable[Sequence[int]]) -> Swapping | None:
        """Returns the copies that touch these blocks and are not over."""
        ...


class StepMembers:
    """The members of steps, owned by the event loop's thread."""

    def __init__(self, scheduler: StepScheduler, admission: Admission, room: StepRoom) -> None:
        self.scheduler = scheduler
        """The scheduler, for reading: changes of its members go through this object."""
        self._admission = admission
        self._room = room
        self._prefills: dict[int, PrefillMember] = {}
        self._decodes: dict[int, DecodeMember] = {}
        self.preemptions = 0
        self.scheduling_s = 0.0
        """The time taken to choose what steps compute."""
        self._looked_s = -math.inf
        """The time at which :attr:`formed` was looked up."""
        self.formed = Formed()
        """The batch of the last step; where steps decode all running requests, all that are admitted for it.

        It is replaced, never changed: the metrics' thread reads it."""

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self.scheduler.running

    @property
    def kv_tokens(self) -> int:
        """The tokens whose KV is read by the batch and by requests that wait to enter it."""
        return sum(member.slot.position for member in self._decodes.values())

    def add_prefill(self, member: PrefillMember) -> None:
        self.scheduler.add_prefill(member.work)
        self._prefills[member.work.number] = member

    def remove_prefill(self, member: PrefillMember) -> None:
        member.alive = False
        number = member.work.number
        if self._prefills.get(number) is member:
            del self._prefills[number]
            self.scheduler.remove_prefill(number)

    def add_decode(self, member: DecodeMember) -> None:
        table, tokens = member.table, member.slot.position
        self.scheduler.add_decode(member.number, tokens, len(table), self.scheduler.path(table, tokens))
        self._decodes[member.number] = member

    def remove_decode(self, member: DecodeMember) -> None:
        member.alive = False
        if self._decodes.pop(member.number, None) is not None:
            self.scheduler.remove_decode(member.number)
            if not self._decodes and not self.scheduler.level_blocks:
                self.formed = Formed()

    def decide(self, now_s: float) -> EngineStep | None:
        """Returns the next step, or None when there is nothing to do. It may preempt requests."""
        # Waiting requests may have waited long enough for others to give way, even if nothing was released since.
        began_s = time.perf_counter()
        self._room.settle()
        self.scheduler.fill()
        preempted = make_room(self.scheduler, self._admission, self._room, self._table)
        for number in preempted:
            self._preempt(self._decodes.pop(number))
        if preempted:
            self._room.settle()
        plan = self.scheduler.decide(now_s)
        self._look(now_s)
        self.scheduling_s += time.perf_counter() - began_s
        if plan is None:
            return None
        # Each call here happens once per step, and short steps are frequent.
        prefills: list[PrefillMember] = []
        chunks: list[PrefillChunk] = []
        decodes: list[DecodeMember] = []
        slots: list[DecodeSlot] = []
        tokens, kv_tokens = len(plan.decodes), 0
        for number, start, end in plan.prefills:
            prefill = self._prefills[number]
            prefills.append(prefill)
            chunks.append(_chunk(prefill, start, end))
            tokens += end - start
        for number in plan.decodes:
            member = self._decodes[number]
            decodes.append(member)
            slots.append(member.slot)
            kv_tokens += member.slot.position
        swapping = self._room.swapping(member.table for member in decodes)
        return EngineStep(plan, tokens, kv_tokens, prefills, chunks, decodes, slots, swapping)

    def switch(self, choice: str) -> None:
        """Switches the batching policy, see :meth:`pinyon.batching.StepScheduler.switch`."""
        tables = {number: (list(member.table), member.slot.position) for number, member in self._decodes.items()}
        self.scheduler.switch(choice, tables)
        self.formed = Formed()

    def _look(self, now_s: float) -> None:
        if self.scheduler.level_blocks:
            self.formed = self.scheduler.formed
        elif now_s - self._looked_s >= LOOK_S and self._decodes:
            self._looked_s = now_s
            self.formed = self._admission.prefixes.formed()

    def _table(self, number: int) -> list[int]:
        return self._decodes[number].table

    def _preempt(self, member: DecodeMember) -> None:
        member.alive = False
        self.preemptions += 1
        try:
            member.preempted()
        except Exception as error:  # a defect in one member must not harm the others
            member.failed(error)

    def fold(self, step: EngineStep, outcome: StepOutcome) -> int:
        """Gives its result to every member that is still there. Returns the number of tokens sampled."""
        plan = step.plan
        if len(outcome.prefills) != len(step.prefills) or len(outcome.decodes) != len(step.decodes):
            outcome = _none_good(step, outcome)
        if outcome.logprobs is not None:
            _tell(step, outcome.logprobs)
        counted = self.scheduler.fold(plan) if outcome.whole else self.scheduler.fold(plan, *_failed(step, outcome))
        token_s = plan.token_s(outcome.elapsed_s)
        sampled = len(counted.decodes)
        for place, prefill in enumerate(step.prefills):
            _, start, end = plan.prefills[place]
            result = outcome.prefills[place]
            if not prefill.alive:
                continue
            if isinstance(result, Exception):
                self.remove_prefill(prefill)
                prefill.failed(result)
                continue
            if end == prefill.work.tokens:
                self.remove_prefill(prefill)
                sampled += 1
            try:
                prefill.advanced(start, end, result, token_s * (end - start))
            except Exception as error:  # a defect in one member must not cost the others their tokens
                self.remove_prefill(prefill)
                prefill.failed(error)
        tokens = outcome.decodes
        for place, decode in enumerate(step.decodes):
            if not decode.alive:
                continue
            token = tokens[place]
            if not isinstance(token, int) and isinstance(token, Exception):  # the first check is the faster one
                self.remove_decode(decode)
                decode.failed(token)
                continue
            slot = decode.slot
            slot.token = token
            slot.position += 1
            slot.sample_index += 1
            if slot.counts is not None:
                slot.counts.add(token)
            try:
                if not decode.advanced(token):
                    self.remove_decode(decode)
            except Exception as error:
                self.remove_decode(decode)
                decode.failed(error)
        return sampled


def _tell(step: EngineStep, logprobs: StepLogprobs) -> None:
    for place, rows in logprobs.prompts.items():
        step.prefills[place].prompt_logprobs = rows
    for place, logprob in logprobs.prefills.items():
        step.prefills[place].logprob = logprob
    for place, logprob in logprobs.decodes.items():
        step.decodes[place].logprob = logprob


def _none_good(step: EngineStep, outcome: StepOutcome) -> StepOutcome:
    """Returns errors for all members, as the results cannot be assigned."""
    error = Internal(
        f"{len(outcome.prefills)} and {len(outcome.decodes)} results of {len(step.prefills)} prompts and "
        f"{len(step.decodes)} decoded requests"
    )
    return StepOutcome([error] * len(step.prefills), [error] * len(step.decodes), outcome.elapsed_s)


def _failed(step: EngineStep, outcome: StepOutcome) -> tuple[list[int], list[int]]:
    """Returns the numbers of the prompts and of the decoded requests that failed."""
    return (
        [
            member.work.number
            for member, result in zip(step.prefills, outcome.prefills, strict=True)
            if isinstance(result, Exception)
        ],
        [
            member.number
            for member, token in zip(step.decodes, outcome.decodes, strict=True)
            if isinstance(token, Exception)
        ],
    )


def _chunk(member: PrefillMember, start: int, end: int) -> PrefillChunk:
    wait_layer, on_layer = member.hooks(start, end) if member.hooks is not None else (None, None)
    order, last = member.order, end == member.work.tokens
    return PrefillChunk(
        tokens=order.tokens[start:end],
        start=start,
        block_table=member.table,
        sampling=order.sampling if last else None,
        sample_index=order.sample_index,
        counts=member.counts if last else None,
        next_tokens=order.tokens[start + 1 : end + 1] if order.tells_prompt else None,
        next_top=max(0, order.sampling.logprobs),
        wait_layer=wait_layer,
        on_layer=on_layer,
    )
