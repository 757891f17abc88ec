"""The room of an instance: the requests that wait for a place, and how many more would find one (SkyWalker §3.3).

A pending request "has not been scheduled to the continuous batch yet, which indicates that the current batch is full
and cannot admit more requests, as constrained by GPU memory." So a request waits for room

- while it has no KV memory: it came or gave way, and there is neither memory for it nor a place of those that
  :class:`pinyon.decisions.Admission` gives out;
- while it is one too many for the batch. Chunks of prompts are computed beside the decoded requests. So a request has
  its place in the batch if its prompt is computed here, or is to be later. Requests beyond ``max_batch`` have no place
  yet. A request whose prompt is computed elsewhere takes a place when the prompt's KV has come.

A prompt that is computed for another instance needs memory alone. It waits for room while it has none, and so do the
prompts that may not leave the prompt queue because of it. A request does not wait for room if it only waits until the
engine has computed others' prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pinyon.batching import PromptQueue
from pinyon.decisions.admission import Admission


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The load in requests: those of this instance, and prompts that it computes for others. Each is counted once."""

    waiting: int = 0
    """Requests and prompts that wait for room."""
    running: int = 0
    """Requests and prompts that do not wait for room."""
    room: int = 0
    """The number of further requests that would have room at once: an estimate, see :meth:`BatchRoom.look`."""


class BatchRoom:
    """A view of an instance's parts. It changes nothing, so any thread may ask."""

    def __init__(self, admission: Admission, prompts: PromptQueue, max_batch: int, shared_blocks: int) -> None:
        """Takes the parts. ``shared_blocks``: blocks of the pool, without those that are left to running requests."""
        self._admission = admission
        self._prompts = prompts
        self._max_batch = max_batch
        self._share = shared_blocks // max_batch
        """The blocks of the pool per place."""

    def look(self, owned: int, elsewhere: int) -> BatchLoad:
        """Returns the load. ``owned``: requests that came to be decoded here and are not gone, including those that
        have not asked for KV memory yet. ``elsewhere``: those that have memory while another instance computes their
        prompt.

        ``room`` is 0 while any request waits. Otherwise, it is the number of requests for which the batch has places
        and the pool has free or cached blocks, at most ``max_batch``. Requests that are here and have not asked yet are
        subtracted. A further request is assumed to need as many blocks as the last admitted ones did, beyond blocks
        that were in use (:attr:`Admission.next_blocks`). If there was none yet, it is a place's share of the pool."""
        admission, prompts = self._admission, self._prompts
        asking = admission.waiting - admission.waiting_prompts
        with_memory = max(0, owned - asking)
        in_batch = max(0, with_memory - elsewhere)
        waiting = admission.waiting + prompts.held_up + max(0, in_batch - self._max_batch)
        admitted_prompts = admission.admitted - admission.decoded
        here = owned + admission.waiting_prompts + admitted_prompts + prompts.foreign_queued
        running = max(0, here - waiting)
        if waiting:
            return BatchLoad(waiting, running, 0)
        coming = max(0, with_memory - admission.decoded)
        places = min(self._max_batch - in_batch, admission.free_slots - coming)
        each = max(1, math.ceil(admission.next_blocks or self._share))
        by_memory = admission.room_for(each) - coming - prompts.foreign_queued
        return BatchLoad(0, running, max(0, min(places, by_memory)))
