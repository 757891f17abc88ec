"""The simulation's event loop: one thread, virtual time, and processes that can freeze or die between two steps.

Each handle of the loop belongs to the process in whose context it was made. A frozen process's handles wait until it
goes on; those of a dead one never run again. Handles of no process are those of the world: network, faults, checks."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from random import Random
from typing import Any

from pinyon.runtime.deadlines import Deadlines

WORLD = Context()
"""The context of what belongs to no process."""
STEPS_MAX = 2_000_000
"""The handles after which a run counts as going round in circles."""


class Process:
    """A process of the simulation: its clock, its tasks, and whether it runs, is frozen or is dead."""

    def __init__(self, loop: SimLoop, name: str, random: Random) -> None:
        self.loop, self.name = loop, name
        self.frozen = self.dead = False
        self.frozen_s = 0.0
        """The seconds for which it was frozen, all together."""
        self._since_s = 0.0
        self._offset_s = random.uniform(10, 1e5)
        self._parked: list[asyncio.Handle] = []
        self._thawed: asyncio.Future[None] | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        """Every task that is not over: a dead process's tasks must not be collected, which would run their ends."""
        self._deadlines: Deadlines | None = None
        self.context = Context()
        self.context.run(PROCESS.set, self)

    @property
    def running(self) -> bool:
        return not (self.frozen or self.dead)

    @property
    def deadlines(self) -> Deadlines:
        if self._deadlines is None:
            self._deadlines = Deadlines(self.loop)
        return self._deadlines

    def clock(self) -> float:
        """Returns monotonic seconds, which differ from process to process."""
        return self.loop.time() + self._offset_s

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Starts a task of this process."""
        return self.loop.create_task(work, name=name, context=self.context.copy())

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)

    def freeze(self) -> None:
        if self.running:
            self.frozen, self._since_s = True, self.loop.time()

    def thaw(self) -> None:
        if self.frozen and not self.dead:
            self.frozen = False
            self.frozen_s += self.loop.time() - self._since_s
            parked, self._parked = self._parked, []
            self.loop.resume(parked)
            self._tell()

    def kill(self) -> None:
        self.dead = True
        self._tell()

    def _tell(self) -> None:
        if self._thawed is not None and not self._thawed.done():
            self._thawed.set_result(None)
        self._thawed = None

    async def thawed(self) -> None:
        """Waits, in another process, until this one is frozen no more."""
        if self.frozen and not self.dead:
            if self._thawed is None:
                self._thawed = self.loop.create_future()
            await asyncio.shield(self._thawed)

    def kept(self, task: asyncio.Task[Any]) -> None:
        self.tasks.append(task)
        if len(self.tasks) > 256:
            self.tasks = [each for each in self.tasks if not each.done()]


PROCESS: ContextVar[Process] = ContextVar("process")


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """A task that sets order by its number and not by its address, so that a seed always does the same."""

    def __hash__(self) -> int:
        return self._number

    def numbered(self, number: int) -> None:
        self._number = number


class SimLoop(asyncio.BaseEventLoop):
    """The loop. Its time jumps to the next timer when nothing is ready."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._now_s, self._random = 0.0, random
        self._clock_resolution = 0.0
        self._numbers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self.steps = 0
        self.job_delay: Callable[[Any], float] = lambda executor: random.uniform(1e-4, 2e-3)
        """The seconds that a job of an executor (None: the default one) takes from now."""

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = SimTask.__new__(SimTask)
        self._numbers += 1
        task.numbered(self._numbers)
        task.__init__(coro, loop=self, name=name or "task", context=context)
        process = PROCESS.get(None) if context is None else context.get(PROCESS)
        if process is not None:
            process.kept(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs a job in one go, some time from now: nothing can be seen half done, but for torn writes."""
        done = self.create_future()

        def job() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_later(self.job_delay(executor), job)
        return done

    def resume(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1

    def _write_to_self(self) -> None:
        """Does nothing: there is no other thread."""

    def _process_events(self, events: Any) -> None:
        """Does nothing: there are no sockets."""

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, timer))
        return timer

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if self._cancelled_timers > 200 and self._cancelled_timers * 2 > len(timers):
            timers[:] = [each for each in timers if not each[2]._cancelled]
            heapq.heapify(timers)
            self._cancelled_timers = 0
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise RuntimeError("nothing is left to be done, and somebody waits")
            self._now_s = max(self._now_s, timers[0][0])
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            ready.append(heapq.heappop(timers)[2])
        self.steps += len(ready)
        if self.steps > STEPS_MAX:
            raise RuntimeError("going round in circles")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or not (process.frozen or process.dead):
                handle._run()
            elif not process.dead:
                process.park(handle)
