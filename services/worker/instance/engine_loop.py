"""The engine loop: decide, act, fold. The engine computes in its own thread, all else happens on the event loop.

The loop sleeps when there is nothing to do: code that adds work calls :meth:`EngineLoop.wake`. All work that becomes
known in one turn of the event loop enters the same step."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import get_logger
from services.worker.engines.protocol import Engine, StepLogprobs, StepResult
from services.worker.instance.step_members import EngineStep, StepMembers, StepOutcome
from services.worker.instance.watchdog import Watchdog

_log = get_logger("engine")

Observer = Callable[[EngineStep, StepOutcome, int], None]


class EngineLoop:
    """The loop of one engine: ``start`` it on a running event loop; ``close`` waits for the step in flight.

    A step that takes longer than ``step_timeout_s`` seconds *hangs* until it ends after all."""

    def __init__(
        self,
        engine: Engine,
        members: StepMembers,
        clock: Clock,
        observe: Observer | None = None,
        step_timeout_s: float = 60.0,
    ) -> None:
        self._engine = engine
        self._members = members
        self._clock = clock
        self._observe = observe
        self._steps: queue.SimpleQueue[EngineStep | None] = queue.SimpleQueue()
        # Not _thread: in compiled code, __thread would be a word of C.
        self._computing = threading.Thread(target=self._work, name="pinyon-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stepping = False
        self._scheduled = False
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []
        """The futures of tasks that wait for the present step's end."""
        self._step_timeout_s = step_timeout_s
        self._computations = 0
        self._watchdog = Watchdog(lambda: self._computations if self._stepping else None, step_timeout_s, self._late)
        self.hangs = False
        """True while the present step takes too long: it may never end."""
        self.on_hang: Callable[[], None] = lambda: None
        """The callback for changes of ``hangs``."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._computing.start()
        self._watchdog.start()

    def wake(self) -> None:
        """Schedules a step, as there may be something to compute."""
        if self._loop is not None and not (self._stepping or self._scheduled or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    async def step_over(self) -> None:
        """Waits until the engine's thread no longer touches anything that was removed from the members before."""
        if self._stepping:
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(over)
            await over

    async def close(self) -> None:
        """Ends the steps, and waits for the present one unless it hangs. This is for the end of the process.

        A step that hangs is abandoned, and tasks that wait for its end go on, though the engine may still touch the
        pool."""
        self._closed = True
        if self._stepping and not self.hangs:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.step_over(), self._step_timeout_s)
        self._watchdog.close()
        self._steps.put(None)
        if self._stepping:
            _log.error("a step that does not end is given up")
            self._end_step()
        elif self._computing.is_alive():
            await asyncio.to_thread(self._computing.join)

    # -- on the event loop

    def _turn(self) -> None:
        self._scheduled = False
        if self._stepping or self._closed:
            return
        step = self._members.decide(self._clock())
        if step is not None:
            self._stepping = True
            self._computations += 1
            self._steps.put(step)

    def _hang(self, computation: int) -> None:
        """Announces a hang found by the watchdog, unless the step has ended since."""
        if self._stepping and self._computations == computation and not self._closed:
            self.hangs = True
            self.on_hang()

    def _done(self, step: EngineStep, outcome: StepOutcome) -> None:
        if not self._stepping:
            return  # this step was abandoned
        self._stepping = False
        if self.hangs:
            self.hangs = False
            _log.warning("the step that did not end has ended: serving again")
            self.on_hang()
        try:
            sampled = self._members.fold(step, outcome)
            if self._observe is not None:
                self._observe(step, outcome, sampled)
        except Exception:  # a defect in one member's callback must not stop the others' engine
            _log.exception("folding a step failed")
        finally:
            self._end_step()
        # Not at once: effects of this step's results (a finished prefill enters the batch) belong to the next step.
        self.wake()

    def _end_step(self) -> None:
        self._stepping = False
        waiting, self._waiting = self._waiting, []
        for over in waiting:
            if not over.done():
                over.set_result(None)

    # -- in the watchdog's thread

    def _late(self, computation: int) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._hang, computation)

    # -- in the engine's thread

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            outcome = self._step(step)
            if self._loop is None or self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._done, step, outcome)

    def _step(self, step: EngineStep) -> StepOutcome:
        start = time.perf_counter()
        try:
            _settle(step)
            result = self._compute(step.chunks, step.slots)
            seconds = time.perf_counter() - start
            tokens = result.prefill_tokens, result.decode_tokens
            return StepOutcome(*tokens, seconds, True, result.logprobs, result.decode_share * seconds)
        except Exception as error:
            if len(step.chunks) + len(step.slots) == 1:
                _report(error)
                one: list[int | Exception | None] = [error]
                return StepOutcome(one if step.chunks else [], [error] if step.slots else [], 0.0)
        # A failed step has advanced no request. It is repeated for each member alone, so that only faulty ones fail.
        told = StepLogprobs()
        prefills = [self._prefill_alone(chunk, place, told) for place, chunk in enumerate(step.chunks)]
        decodes = [self._decode_alone(step, place, told) for place in range(len(step.slots))]
        return StepOutcome(prefills, decodes, time.perf_counter() - start, logprobs=told)

    def _compute(self, chunks: Sequence[PrefillChunk], slots: Sequence[DecodeSlot]) -> StepResult:
        self._computations += 1
        return self._engine.step(chunks, slots)

    def _prefill_alone(self, chunk: PrefillChunk, place: int, told: StepLogprobs) -> int | Exception | None:
        try:
            result = self._compute([chunk], [])
        except Exception as error:
            _report(error)
            return error
        if (own := result.logprobs) is not None:
            told.prefills.update((place, logprob) for logprob in own.prefills.values())
            told.prompts.update((place, rows) for rows in own.prompts.values())
        return result.prefill_tokens[0]

    def _decode_alone(self, step: EngineStep, place: int, told: StepLogprobs) -> int | Exception:
        try:
            _settle(step)
            result = self._compute([], [step.slots[place]])
        except Exception as error:
            _report(error)
            return error
        if result.logprobs is not None:
            told.decodes.update((place, logprob) for logprob in result.logprobs.decodes.values())
        return result.decode_tokens[0]


def _settle(step: EngineStep) -> None:
    """Waits until the blocks of decoded requests are in place, in all layers."""
    if step.swapping is not None:
        step.swapping.wait_all()


def _report(error: Exception) -> None:
    if isinstance(error, PinyonError):
        _log.warning("an engine step failed for one request: %s", error.message)
    else:
        _log.error("an engine step failed for one request", exc_info=error)
