"""The prompts this instance computes: a bounded FCFS queue, and a few at once on their way.

A prompt whose next block is being computed by another one waits for it, since a prefix is never computed twice;
prompts behind it that share nothing go first meanwhile.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from pinyon.core.block_keys import BlockKey
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from services.worker.kv.cache import Reservation
from services.worker.orders import PrefillOrder, PushTarget
from services.worker.parts import Core
from services.worker.prefill.job import PrefillJob

__all__ = ["Prefills"]

LOOK_AHEAD = 32
"""Queued prompts that are looked at for one that does not wait for another."""


class Prefills:
    """Owned by the event loop's thread."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._queue: dict[PrefillJob, None] = {}
        self._active: dict[PrefillJob, asyncio.Task[None]] = {}
        self._computing: dict[BlockKey, PrefillJob] = {}
        self._pending_tokens = 0
        self._scheduled = False
        self._roomless = 0
        self.pushing = 0
        """Prompts being sent to a decode instance."""

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def foreign(self) -> int:
        """Prompts computed for other instances, queued ones included."""
        return sum(not job.owns_blocks for job in (*self._queue, *self._active))

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens accepted and neither computed nor reused yet."""
        return self._pending_tokens

    def submit(
        self, order: PrefillOrder, *, target: PushTarget | None = None, owned: Reservation | None = None
    ) -> PrefillJob:
        """
        Raises:
            ResourceExhausted: the queue is full.
            Unavailable: draining, and the request is not this instance's own.
        """
        if self.core.draining and target is not None:
            raise Unavailable(f"{self.core.served.instance_id} is draining", field="prefill_instance")
        if len(self._queue) + len(self._active) >= self.core.settings.max_prefills:
            raise ResourceExhausted("the prefill queue is full", field="prefill_instance", retry_after_s=1.0)
        job = PrefillJob(self, order, target, owned)
        self._queue[job] = None
        self._pending_tokens += job.left
        self._schedule()
        return job

    def cancel(self, job: PrefillJob, error: PinyonError) -> None:
        """Stop a job in whatever phase it is; its ``done`` follows when nothing of it is left."""
        if not job.abort.fire(error):
            return
        if job in self._queue:
            del self._queue[job]
            self._ended(job)
            job.finish(None, error)

    def published(self, job: PrefillJob, keys: list[BlockKey]) -> None:
        """The job's blocks with these keys can be reused now."""
        for key in keys:
            if self._computing.get(key) is job:
                del self._computing[key]
        if self._queue:
            self._schedule()

    def advanced(self, job: PrefillJob, tokens: int) -> None:
        """The job needs to compute ``tokens`` tokens less."""
        job.left -= tokens
        self._pending_tokens -= tokens

    async def drained(self, timeout_s: float) -> bool:
        """Whether all prompts ended by themselves within the time."""
        jobs = [*self._queue, *self._active]
        if jobs:
            await asyncio.wait([job.done for job in jobs], timeout=timeout_s)
        return not (self._queue or self._active)

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for job in (*self._queue, *self._active):
            self.cancel(job, Unavailable(f"{self.core.served.instance_id} is stopping", field="prefill_instance"))
        if self._active:
            await asyncio.wait(list(self._active.values()))

    # -- what a job says about itself

    def waits_for_room(self, job: PrefillJob) -> None:
        """It gives its place to others meanwhile: they may hold the room it needs, and must not wait for it."""
        self._roomless += 1
        self._unclaim(job)
        self._schedule()

    def has_room(self, job: PrefillJob) -> None:
        self._roomless -= 1
        self._claim(job)

    def _claim(self, job: PrefillJob) -> None:
        """What the job will compute (or fetch) others need not."""
        if job.order.no_reuse:
            return
        for key in job.order.keys[self.core.cache.pool.match_prefix(job.order.keys) :]:
            self._computing.setdefault(key, job)

    def _unclaim(self, job: PrefillJob) -> None:
        for key in job.order.keys:
            if self._computing.get(key) is job:
                del self._computing[key]

    # -- starting

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start_ready)

    def _start_ready(self) -> None:
        self._scheduled = False
        room = self.core.settings.active_prefills - (len(self._active) - self._roomless)
        if room <= 0 or not self._queue:
            return
        for job in list(islice(self._queue, LOOK_AHEAD)):
            if self._start(job):
                room -= 1
                if not room:
                    return

    def _start(self, job: PrefillJob) -> bool:
        """False: what it needs next is being computed by another job, or others wait for KV memory before it."""
        if self._roomless and not job.owns_blocks:
            return False
        held = self.core.cache.pool.match_prefix(job.reusable)
        if held < len(job.reusable) and job.reusable[held] in self._computing:
            return False
        self._claim(job)
        del self._queue[job]
        task = asyncio.get_running_loop().create_task(job.run(), name="prefill")
        self._active[job] = task
        task.add_done_callback(lambda _: self._finished(job))
        return True

    def _finished(self, job: PrefillJob) -> None:
        del self._active[job]
        if job.done.exception() is None:
            self.core.journal.prefill_measured(job.done.result())
        self._ended(job)
        self._unclaim(job)
        if self._queue:
            self._schedule()

    def _ended(self, job: PrefillJob) -> None:
        self._pending_tokens -= job.left
        job.left = 0
        self.core.journal.prefill_ended(job.order.request_id)
