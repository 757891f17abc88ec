"""The runs that may go, in order: by the worth of their class and age and, where tenants share the room, by shares."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Generic

from pinyon.eviction.hazard_table import BINS, EDGES_S, HazardTable, bin_of
from pinyon.eviction.interface import Key
from pinyon.eviction.prefix_tree import TreeRun
from pinyon.eviction.tenant_shares import TenantShares

STALE_MIN = 1024
MANY = 1 << 62
FADED = 64.0
"""The factor by which a run's worth must have fallen since its use before shares stop protecting it.

Before :meth:`TenantShares.protects_s`, shares protect it in any case."""


class RunQueues(Generic[Key]):
    """A queue for each class and age bin, oldest run first, and a heap of these queues by worth.

    Entries of runs that left stay until they are met, but never more of them than of others and :data:`STALE_MIN`."""

    def __init__(self, table: HazardTable) -> None:
        self._table = table
        self._queues: dict[tuple[int, int], list[tuple[float, int, TreeRun[Key], int]]] = {}
        """Heaps by last use, as a run may enter long after its last use."""
        self._number = itertools.count()
        self._order: list[tuple[float, int, int]] = []
        self._timers: list[tuple[float, int, int]] = []
        self._due_s: dict[tuple[int, int], float] = {}
        """The valid timer of each queue."""
        self.due_s = math.inf
        """The time before which :meth:`advance` has nothing to do."""
        self._inside = 0
        self._entries = 0
        self._first: tuple[tuple[float, int, int], TreeRun[Key]] | None = None
        self._known = False
        """True while ``_first`` is valid."""

    def enter(self, run: TreeRun[Key], now_s: float) -> None:
        """Adds a run that may go, if it is not there already."""
        if not run.stamp & 1:
            run.stamp += 1
            self._inside += 1
            self._known = False
            run.bin = bin_of(now_s - run.last_s)
            self._append(run)
            if self._entries > 2 * self._inside + STALE_MIN:
                self._sweep()

    def leave(self, run: TreeRun[Key]) -> None:
        """Takes out a run that may not go or no longer exists."""
        if run.stamp & 1:
            run.stamp += 1
            self._inside -= 1
            if self._first is not None and self._first[1] is run:
                self._known = False

    def _append(self, run: TreeRun[Key]) -> None:
        name = (run.of.number, run.bin)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = []
        if run.bin < BINS - 1:
            self._look(name, run.last_s + EDGES_S[run.bin + 1])
        if not queue:
            heapq.heappush(self._order, (self._table.value(*name), *name))
        heapq.heappush(queue, (run.last_s, next(self._number), run, run.stamp))
        self._entries += 1

    def _look(self, name: tuple[int, int], at_s: float) -> None:
        """Sets a timer for when the first run of a queue grows older than its bin, at ``at_s``."""
        if at_s < self._due_s.get(name, math.inf):
            self._due_s[name] = at_s
            heapq.heappush(self._timers, (at_s, *name))
            self.due_s = self._timers[0][0]

    def _sweep(self) -> None:
        """Removes all outdated entries."""
        for queue in self._queues.values():
            queue[:] = [entry for entry in queue if entry[2].stamp == entry[3]]
            heapq.heapify(queue)
        self._entries = self._inside
        self.reorder()

    def advance(self, now_s: float) -> None:
        """Moves runs that grew older into the queues of their age."""
        timers, queues = self._timers, self._queues
        while timers and timers[0][0] <= now_s:
            self._known = False
            at_s, number, bin = heapq.heappop(timers)
            if self._due_s.get((number, bin)) != at_s:
                continue
            del self._due_s[number, bin]
            queue = queues[number, bin]
            edge_s = EDGES_S[bin + 1]
            while queue:
                _, _, run, stamp = queue[0]
                if run.stamp == stamp:
                    if run.last_s + edge_s > now_s:
                        break
                    run.bin = max(bin + 1, bin_of(now_s - run.last_s))  # also if rounding says less
                    self._append(run)
                heapq.heappop(queue)
                self._entries -= 1
            if queue:
                self._look((number, bin), queue[0][0] + edge_s)
            else:
                del queues[number, bin]
        self.due_s = timers[0][0] if timers else math.inf

    def first(self) -> tuple[tuple[float, int, int], TreeRun[Key]] | None:
        """Returns ((worth, class, bin), run) of the run that is worth least, or None."""
        if not self._known:
            self._first, self._known = self._look_for_first(), True
        return self._first

    def _look_for_first(self) -> tuple[tuple[float, int, int], TreeRun[Key]] | None:
        order = self._order
        while order:
            _, number, bin = order[0]
            queue = self._queues.get((number, bin))
            while queue and queue[0][2].stamp != queue[0][3]:
                heapq.heappop(queue)
                self._entries -= 1
            if not queue:
                heapq.heappop(order)
                if queue is not None and bin == BINS - 1:
                    del self._queues[number, bin]
                continue
            return order[0], queue[0][2]
        return None

    def reorder(self) -> None:
        """Sorts the queues again after a change of values."""
        self._known = False
        self._order = [(self._table.value(*name), *name) for name in self._queues]
        heapq.heapify(self._order)


class FairQueues(Generic[Key]):
    """The runs that may go, in queues per group of tenants.

    If ``fair``, nothing is taken from a tenant within its share while another holds more than its own. Runs that are
    old and all but worthless are not protected. If not ``fair``, all tenants are one group, and worth alone decides."""

    def __init__(self, table: HazardTable, fair: bool) -> None:
        self._table = table
        self._queues: dict[int, RunQueues[Key]] = {}
        """The queues by group of tenants."""
        self._now_s = 0.0
        self._fair = fair
        self._shares = TenantShares()
        self._nobody_above = False
        """True if shares let no run go since :meth:`advance`; then they decide nothing."""

    def whose(self, run: TreeRun[Key], tenant: str) -> None:
        """Sets the tenant of a run whose keys are not counted yet."""
        run.tenant = tenant
        run.group = self._shares.group(tenant) if self._fair else 0

    def hand(self, run: TreeRun[Key], tenant: str, now_s: float) -> None:
        """Hands a run over to another tenant."""
        self.leave(run)
        self.count(run, -len(run.keys))
        self.whose(run, tenant)
        self.count(run, len(run.keys))
        self.place(run, now_s)

    def count(self, run: TreeRun[Key], more: int) -> None:
        """Counts ``more`` keys for the tenant of this run."""
        self._shares.add(run.group, more)

    def again(self, run: TreeRun[Key], now_s: float) -> None:
        """Counts a reuse of a run by its tenant, before its last use is updated."""
        self._shares.again(run.group, now_s - run.last_s)

    def most(self, run: TreeRun[Key]) -> int:
        """Returns how many of the run's keys may be taken now."""
        free = len(run.keys) - run.fixed
        return free if self._faded(run) else min(free, self.above(run.group))

    def _faded(self, run: TreeRun[Key]) -> bool:
        if self._now_s - run.last_s < self._shares.protects_s(run.group):
            return False
        return FADED * self._table.value(run.of.number, run.bin) <= self._table.value(run.of.number, 0)

    def above(self, group: int) -> int:
        """Returns how many keys may be taken from a group of tenants now."""
        return MANY if self._nobody_above else self._shares.above(group)

    def place(self, run: TreeRun[Key], now_s: float) -> None:
        """Queues a run if its end may go, else takes it out: another run extends it, or its end is pinned."""
        if len(run.keys) == run.fixed or run.children:
            self.leave(run)
            return
        queues = self._queues.get(run.group)
        if queues is None:
            queues = self._queues[run.group] = RunQueues(self._table)
        queues.enter(run, now_s)

    def leave(self, run: TreeRun[Key]) -> None:
        """Takes a run out of its queue, if it is in one."""
        queues = self._queues.get(run.group)
        if queues is not None:
            queues.leave(run)

    def advance(self, now_s: float) -> None:
        """Moves on to ``now_s``; to be called before victims are asked for."""
        for queues in self._queues.values():
            if queues.due_s <= now_s:
                queues.advance(now_s)
        self._now_s = now_s
        self._nobody_above = False

    def first(self) -> TreeRun[Key] | None:
        """Returns the run that is worth least of those that may go, or None.

        Of a group within its share, only the run that is worth least is looked at: it may have faded."""
        least = self._least()
        if least is None:
            self._nobody_above = True
            least = self._least()
        return least

    def _least(self) -> TreeRun[Key] | None:
        least = None
        for queues in self._queues.values():
            found = queues.first()
            if found is not None and (least is None or found[0] < least[0]) and self.most(found[1]):
                least = found
        return None if least is None else least[1]

    def reorder(self) -> None:
        """Sorts the queues again after a change of values."""
        for queues in self._queues.values():
            queues.reorder()
