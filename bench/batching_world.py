"""Requests that run through a worker's decision modules and the NumPy engine in this process: no network, no waiting.

Processor time is measured, of decode-only steps and of everything. It is also the clock of the decisions, so that a run
does not depend on what else the machine does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pinyon.batching import BatchRequest, DecodeSlot, PrefillChunk, PromptWork, StepSeen
from pinyon.core.block_keys import chain_block_keys
from pinyon.core.request import SamplingParams
from pinyon.decisions import InstanceConfig, InstanceDecisions, make_room
from services.worker.engines.protocol import Engine

ROOT = bytes(16)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a workload."""

    tokens: npt.NDArray[np.uint32]
    new_tokens: int


def grouped_asks(count: int, groups: int, prefix: int, own: int, new_tokens: int, seed: int) -> list[Ask]:
    """Returns prompts of ``groups`` prefixes in random order, each with its own end; 0: no prefix is shared."""
    rng = np.random.default_rng(seed)

    def letters(length: int) -> npt.NDArray[np.uint32]:
        return rng.integers(32, 127, length, np.uint32)

    prefixes = [letters(prefix) for _ in range(groups)]
    chosen = rng.permutation(np.arange(count) % groups) if groups else None
    return [
        Ask(np.concatenate([letters(prefix) if chosen is None else prefixes[chosen[place]], letters(own)]), new_tokens)
        for place in range(count)
    ]


@dataclass(slots=True)
class _Request:
    ask: Ask
    keys: tuple[bytes, ...]
    table: list[int] = field(default_factory=list)
    done: int = 0
    """The number of prompt tokens whose KV is in the pool."""
    made: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.ask.tokens) + len(self.made) - 1


@dataclass(slots=True)
class Outcome:
    """The results of a run; seconds are of processor time."""

    tokens: dict[int, list[int]]
    """The generated tokens, by place of the request."""
    decode_tokens: int = 0
    """The tokens of steps without prefill."""
    decode_s: float = 0.0
    decode_steps: int = 0
    scheduling_s: float = 0.0
    total_s: float = 0.0
    kv_tokens_read: int = 0
    """The KV tokens read per layer in steps without prefill."""

    @property
    def decode_rate(self) -> float:
        """The tokens per second of decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def batch(self) -> float:
        """The mean number of requests in a decode-only step."""
        return self.decode_tokens / self.decode_steps if self.decode_steps else 0.0


class World:
    """One engine with its decisions; :meth:`run` may be called again, and reuses what the pool has cached."""

    def __init__(
        self,
        engine: Engine,
        batching: str,
        *,
        max_batch: int = 64,
        step_tokens: int = 512,
        chunk_tokens: int = 256,
        active_prefills: int = 8,
    ) -> None:
        block = engine.layout.block_tokens
        config = InstanceConfig(
            engine.num_blocks,
            block,
            max_batch,
            step_tokens,
            chunk_tokens,
            active_prefills,
            1 << 20,
            batching=batching,
            kernel=engine.kernel,
            spare_queued=True,
        )
        self.decisions = InstanceDecisions(config)
        self._engine = engine
        self._block = block
        self._active_prefills = active_prefills
        self._number = 0
        self._now_s = 0.0

    # -- make_room's Room

    def grow(self, number: int, count: int) -> list[int] | None:
        return self.decisions.admission.grow(number, count, self._now_s)

    def give_way(self, number: int, table: list[int]) -> None:
        self.decisions.admission.end(number)
        self.decisions.reservations.release(table, self._now_s)

    # -- requests

    def run(self, asks: Sequence[Ask]) -> Outcome:
        """Runs requests that arrive at once to their end. Raises ``RuntimeError`` if the pool is too small."""
        decisions, outcome = self.decisions, Outcome({})
        requests: dict[int, _Request] = {}
        places: dict[int, int] = {}
        waiting: list[int] = []
        """The admitted requests whose prefill has not begun."""
        began_s = time.process_time()
        mark = began_s
        for place, ask in enumerate(asks):
            self._number += 1
            requests[self._number] = _Request(ask, tuple(chain_block_keys(ROOT, ask.tokens.tobytes(), self._block)))
            places[self._number] = place
            self._enqueue(self._number, requests[self._number])
        while requests:
            for grant in decisions.admission.admit(self._now_s):
                request = requests[grant.number]
                request.table = grant.reservation.table
                request.done = min(grant.reservation.held * self._block, len(request.ask.tokens) - 1)
                waiting.append(grant.number)
            while waiting and decisions.steps.prefilling < self._active_prefills:
                number = waiting.pop(0)
                request = requests[number]
                decisions.steps.add_prefill(PromptWork(number, request.done, len(request.ask.tokens)))
            decisions.steps.fill()
            if make_room(decisions.steps, decisions.admission, self, lambda number: requests[number].table):
                raise RuntimeError("somebody had to give way: the pool is too small for this workload")
            plan = decisions.steps.decide(self._now_s)
            outcome.scheduling_s += time.process_time() - mark
            if plan is None:
                raise RuntimeError("nobody has room: the pool is too small for this workload")
            chunks = [self._chunk(requests[number], start, end) for number, start, end in plan.prefills]
            slots = [self._slot(requests[number]) for number in plan.decodes]
            mark = time.process_time()
            result = self._engine.step(chunks, slots)
            seconds = time.process_time() - mark
            self._now_s += seconds
            mark = time.process_time()
            decisions.steps.fold(plan)
            decode_s = result.decode_share * seconds
            seen = StepSeen(len(plan.decodes), plan.prompt_tokens, seconds, decode_s=decode_s)
            decisions.admission.observe(seen)
            decisions.steps.observe(seen)
            outcome.scheduling_s += time.process_time() - mark
            if not plan.prefills:
                outcome.decode_s += seconds
                outcome.decode_tokens += len(slots)
                outcome.decode_steps += 1
                outcome.kv_tokens_read += result.kv_tokens_read
            for (number, start, end), token in zip(plan.prefills, result.prefill_tokens, strict=True):
                request = requests[number]
                self._publish(request, start, end)
                if token is not None:
                    request.made.append(token)
                    held = len(request.ask.tokens)
                    steps = decisions.steps
                    steps.add_decode(number, held, len(request.table), steps.path(request.table, held))
            for number, token in zip(plan.decodes, result.decode_tokens, strict=True):
                requests[number].made.append(token)
            for number in [*plan.decodes, *(number for number, _, _ in plan.prefills)]:
                request = requests[number]
                if len(request.made) >= request.ask.new_tokens:
                    decisions.steps.remove_decode(number)
                    self.give_way(number, request.table)
                    outcome.tokens[places[number]] = request.made
                    del requests[number]
            mark = time.process_time()
        outcome.total_s = time.process_time() - began_s
        return outcome

    def _enqueue(self, number: int, request: _Request) -> None:
        tokens = len(request.ask.tokens)
        self.decisions.admission.enqueue(
            BatchRequest(
                number,
                tokens,
                -(-(tokens + 1) // self._block),
                request.keys,
                reusable=(tokens - 1) // self._block,
                max_new_tokens=request.ask.new_tokens,
                arrived_s=self._now_s,
            )
        )

    def _chunk(self, request: _Request, start: int, end: int) -> PrefillChunk:
        last = end == len(request.ask.tokens)
        return PrefillChunk(
            request.ask.tokens[start:end], start, request.table, SamplingParams(temperature=0.0) if last else None
        )

    def _slot(self, request: _Request) -> DecodeSlot:
        return DecodeSlot(
            request.made[-1], request.position, request.table, SamplingParams(temperature=0.0), len(request.made)
        )

    def _publish(self, request: _Request, start: int, end: int) -> None:
        """Publishes full blocks for reuse. A block that another request published meanwhile replaces its twin."""
        first, last = start // self._block, end // self._block
        if first == last:
            return
        table = request.table
        replaced = self.decisions.reservations.publish(
            table[first:last],
            request.keys[first:last],
            self._now_s,
            first=first,
            after=request.keys[first - 1] if first else None,
        )
        own = []
        for index, block in replaced:
            own.append(table[first + index])
            table[first + index] = block
        self.decisions.reservations.release(own, self._now_s)
