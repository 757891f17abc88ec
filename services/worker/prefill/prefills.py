"""The prompts that an instance computes: a :class:`pinyon.batching.PromptQueue`, and a task per prompt that left it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Iterable

from pinyon.batching import Prompt, PromptQueue
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.core.orders import PrefillOrder
from pinyon.messages.orders import PushTarget
from pinyon.paging import Reservation
from services.worker.instance.parts import Parts
from services.worker.prefill.job import PrefillJob


class Prefills:
    """The prompts of this instance, owned by the event loop's thread."""

    def __init__(self, parts: Parts, queue: PromptQueue) -> None:
        self.parts = parts
        self.queue = queue
        self._numbers = itertools.count(1)
        self._jobs: dict[int, PrefillJob] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._scheduled = False
        self._idle: asyncio.Future[None] | None = None

    @property
    def pushing(self) -> int:
        """Prompts being sent to a decode instance."""
        return sum(job.pushing for job in list(self._jobs.values()))

    def submit(
        self, order: PrefillOrder, *, target: PushTarget | None = None, owned: Reservation | None = None
    ) -> PrefillJob:
        """Queues a prompt and returns its job. Raises :class:`ResourceExhausted` if the queue is full.

        Raises :class:`Unavailable` for another instance's request if this instance drains or its engine hangs."""
        parts = self.parts
        if target is not None:
            parts.check_serving("prefill_instance")
        now_s = parts.clock()
        # Whatever is reused, the last token is computed, as its logits are needed.
        full = (len(order.tokens) - 1) // parts.served.layout.block_tokens
        prompt = Prompt(
            number=next(self._numbers),
            tokens=len(order.tokens),
            keys=tuple(order.keys),
            reusable=0 if order.no_reuse or order.tells_prompt else min(full, len(order.keys)),
            owned=owned is not None,
            arrived_s=now_s,
            shared=order.shares,
            seconds=order.prefill_s,
            deadline_s=0.0 if order.ttft_left_s == math.inf else now_s + order.ttft_left_s,
        )
        self.queue.add(prompt, now_s)
        job = self._jobs[prompt.number] = PrefillJob(parts, self.queue, self._wake, prompt, order, target, owned)
        self._wake()
        return job

    def drop_queued(self, jobs: Iterable[PrefillJob], error: PinyonError) -> None:
        """Ends those of the jobs that still wait in the queue."""
        for job in jobs:
            if job.prompt.number not in self._tasks:
                self.cancel(job, error)

    def cancel(self, job: PrefillJob, error: PinyonError) -> None:
        """Stops a job in any phase; its ``done`` follows when nothing of the job is left."""
        number = job.prompt.number
        if job.abort.fire(error) and number in self._jobs and number not in self._tasks:
            self._end(job)
            job.finish(None, error)

    async def drained(self, timeout_s: float) -> bool:
        """Returns whether all prompts ended by themselves within the time."""
        if self._jobs:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=timeout_s)
        return not self._jobs

    def give_up(self, why: str) -> None:
        """Ends all prompts with UNAVAILABLE; their requesters are told at once."""
        error = Unavailable(f"{self.parts.served.instance_id} {why}", field="prefill_instance")
        for job in list(self._jobs.values()):
            self.cancel(job, error)

    async def close(self) -> None:
        """Cancels the remaining prompts and waits for their ends."""
        self.give_up("is stopping")
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def _wake(self) -> None:
        """Schedules one look at the queue in this turn of the event loop, as prompts may be able to leave it."""
        if (self.queue.queued or self.queue.waiting_for_others) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._scheduled = False
        for number in self.queue.start(self.parts.clock()):
            job = self._jobs[number]
            if number in self._tasks:
                job.go_on()
                continue
            task = asyncio.get_running_loop().create_task(job.run(), name="prefill")
            self._tasks[number] = task
            task.add_done_callback(functools.partial(self._finished, job))

    def _finished(self, job: PrefillJob, _: object) -> None:
        del self._tasks[job.prompt.number]
        self._end(job)

    def _end(self, job: PrefillJob) -> None:
        self.queue.end(job.prompt.number)
        del self._jobs[job.prompt.number]
        self.parts.ledger.prefill_ended(job.order.request_id)
        if not self._jobs and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        self._wake()
