"""The runs that may go, in the order in which they should: by what one of their class and age is worth."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic

from pinyon.eviction.hazard_table import BINS, EDGES_S, HazardTable, bin_of
from pinyon.eviction.policy import Key
from pinyon.eviction.prefix_tree import Run
from pinyon.eviction.run_note import RunNote

__all__ = ["RunQueues"]

STALE_MIN = 1024


class RunQueues(Generic[Key]):
    """A queue for each class and bin of age, the oldest first; a heap of queues by worth. Entries of runs that left
    stay until they are met, but never more of them than of others and :data:`STALE_MIN`."""

    def __init__(self, table: HazardTable) -> None:
        self._table = table
        self._queues: dict[tuple[int, int], deque[tuple[Run[Key], int]]] = {}
        self._order: list[tuple[float, int, int]] = []
        self._timers: list[tuple[float, int, int]] = []
        self._inside = 0
        self._entries = 0

    def enter(self, run: Run[Key], now_s: float) -> None:
        """It may go."""
        note: RunNote = run.note
        if not note.stamp & 1:
            note.stamp += 1
            self._inside += 1
            note.bin = bin_of(now_s - note.last_s)
            self._append(run, note)
            if self._entries > 2 * self._inside + STALE_MIN:
                self._sweep()

    def leave(self, note: RunNote) -> None:
        """It may not, or is not there any more."""
        if note.stamp & 1:
            note.stamp += 1
            self._inside -= 1

    def _append(self, run: Run[Key], note: RunNote) -> None:
        name = (note.of.number, note.bin)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
            if note.bin < BINS - 1:
                heapq.heappush(self._timers, (note.last_s + EDGES_S[note.bin + 1], *name))
        if not queue:
            heapq.heappush(self._order, (self._table.value(*name), *name))
        queue.append((run, note.stamp))
        self._entries += 1

    def _sweep(self) -> None:
        """Only what is valid stays."""
        for name, queue in self._queues.items():
            self._queues[name] = deque(entry for entry in queue if entry[0].note.stamp == entry[1])
        self._entries = self._inside
        self.reorder()

    def advance(self, now_s: float) -> None:
        """What grew older is where it belongs."""
        timers, queues = self._timers, self._queues
        while timers and timers[0][0] <= now_s:
            _, number, bin = heapq.heappop(timers)
            queue = queues[number, bin]
            edge_s = EDGES_S[bin + 1]
            while queue:
                run, stamp = queue[0]
                note: RunNote = run.note
                if note.stamp == stamp:
                    if note.last_s + edge_s > now_s:
                        break
                    note.bin = max(bin + 1, bin_of(now_s - note.last_s))  # whatever rounding says
                    self._append(run, note)
                queue.popleft()
                self._entries -= 1
            if queue:
                heapq.heappush(timers, (max(now_s, queue[0][0].note.last_s + edge_s), number, bin))
            else:
                del queues[number, bin]

    def first(self) -> Run[Key] | None:
        """What is worth least."""
        order = self._order
        while order:
            _, number, bin = order[0]
            queue = self._queues.get((number, bin))
            while queue and queue[0][0].note.stamp != queue[0][1]:
                queue.popleft()
                self._entries -= 1
            if not queue:
                heapq.heappop(order)
                if queue is not None and bin == BINS - 1:
                    del self._queues[number, bin]
                continue
            return queue[0][0]
        return None

    def reorder(self) -> None:
        """Worths have changed."""
        self._order = [(self._table.value(*name), *name) for name in self._queues]
        heapq.heapify(self._order)
