"""Decide, act, fold: the engine computes in a thread of its own, everything else happens on the event loop.

The loop sleeps when there is nothing to do: whoever adds work calls :meth:`EngineLoop.wake`. All that becomes known in
one turn of the event loop enters the same step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import get_logger
from services.worker.engines.protocol import Engine
from services.worker.step_members import EngineStep, StepMembers, StepOutcome

__all__ = ["EngineLoop"]

_log = get_logger("engine")

Observer = Callable[[EngineStep, StepOutcome, int], None]


class EngineLoop:
    """``start`` on a running event loop; ``close`` waits for the step in flight."""

    def __init__(self, engine: Engine, members: StepMembers, clock: Clock, observe: Observer | None = None) -> None:
        self._engine = engine
        self._members = members
        self._clock = clock
        self._observe = observe
        self._steps: queue.SimpleQueue[EngineStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pinyon-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stepping = False
        self._scheduled = False
        self._closed = False
        self._idle: asyncio.Future[None] | None = None
        self._after: list[Callable[[], None]] = []
        self.after_fold: Callable[[], None] | None = None
        """Called when all results of a step are folded: the time to send them, in one message."""

    @property
    def stepping(self) -> bool:
        return self._stepping

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def wake(self) -> None:
        """There may be something to compute."""
        if self._loop is not None and not (self._stepping or self._scheduled or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def after_step(self, callback: Callable[[], None]) -> None:
        """Call when the engine does not touch the pool for what was removed before: now, or after the present step."""
        if self._stepping:
            self._after.append(callback)
        else:
            callback()

    async def close(self) -> None:
        """No more steps. Bounded by one step's length."""
        self._closed = True
        if self._stepping:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        if self._thread.is_alive():
            self._steps.put(None)
            await asyncio.to_thread(self._thread.join)

    # -- on the event loop

    def _turn(self) -> None:
        self._scheduled = False
        if self._stepping or self._closed:
            return
        step = self._members.decide(self._clock())
        if step is not None:
            self._stepping = True
            self._steps.put(step)

    def _done(self, step: EngineStep, outcome: StepOutcome) -> None:
        self._stepping = False
        try:
            sampled = self._members.fold(step, outcome)
            if self._observe is not None:
                self._observe(step, outcome, sampled)
            if self.after_fold is not None:
                self.after_fold()
        except Exception:  # a defect in one member's callback must not stop the others' engine
            _log.exception("folding a step failed")
        finally:
            callbacks, self._after = self._after, []
            for callback in callbacks:
                callback()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        # Not at once: what this step's results set off (a finished prefill enters the batch) belongs into the next.
        self.wake()

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
            result = self._engine.step(step.chunks, step.slots)
            return StepOutcome(result.prefill_tokens, result.decode_tokens, time.perf_counter() - start, whole=True)
        except Exception as error:
            if len(step.chunks) + len(step.slots) == 1:
                _report(error)
                one: list[int | Exception | None] = [error]
                return StepOutcome(one if step.chunks else [], [error] if step.slots else [], 0.0)
        # A step that failed has advanced nobody and can be repeated: each member alone, so that only the guilty pay.
        prefills = [self._prefill_alone(chunk) for chunk in step.chunks]
        decodes = [self._decode_alone(slot) for slot in step.slots]
        return StepOutcome(prefills, decodes, time.perf_counter() - start)

    def _prefill_alone(self, chunk: PrefillChunk) -> int | Exception | None:
        try:
            return self._engine.step([chunk], []).prefill_tokens[0]
        except Exception as error:
            _report(error)
            return error

    def _decode_alone(self, slot: DecodeSlot) -> int | Exception:
        try:
            return self._engine.step([], [slot]).decode_tokens[0]
        except Exception as error:
            _report(error)
            return error


def _report(error: Exception) -> None:
    if isinstance(error, PinyonError):
        _log.warning("an engine step failed for one request: %s", error.message)
    else:
        _log.error("an engine step failed for one request", exc_info=error)
