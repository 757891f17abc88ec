"""pinyon's own policy: what is least likely to be used again per second of its room goes first.

It looks at requests, not at blocks. What a request adds to a prompt is a run of keys with one fate: either the next
turn uses all of it, or nobody does. How likely that is, and when, is learned (:mod:`pinyon.eviction.hazard_table`) by
kind and turn of the request, by how often this tenant's conversations went on so far and by the pace of this one. Runs
that several conversations share (instructions of a program) are judged by how often they themselves were used. What
others leave behind when they go on differently is a class of its own.

A run goes from its end, and only after everything that extends it: a prefix is worth at least as much as its
extensions. Nothing is known of the future; if the workload shifts, old counts fade.

Tenants share the room (:mod:`pinyon.eviction.tenant_shares`).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from pinyon.eviction.hazard_table import BINS, EDGES_S, HazardClass, HazardTable, Sample, bin_of
from pinyon.eviction.policy import Belief, Key, Traits
from pinyon.eviction.prefix_tree import PrefixTree, Run
from pinyon.eviction.tenant_shares import TenantShares

__all__ = ["ReuseHazard", "ReuseHazardSettings"]

TENANTS_MAX = 65_536
STALE_MIN = 1024
TURNS = (1, 2, 3, 4, 5, 7, 10, 15, 23, 1 << 62)
"""Turns are told apart up to the next of these."""
GAPS_S = (4.0, 16.0, 64.0, 256.0, 1024.0)
TENANT_PRIOR = 3.0


@dataclass(frozen=True, slots=True)
class ReuseHazardSettings:
    """What happened ``window_s`` ago counts 1/e; beliefs are renewed every ``refit_s``. ``fair``: nobody may have it
    all."""

    window_s: float = 3600.0
    refit_s: float = 10.0
    fair: bool = True

    def __post_init__(self) -> None:
        for name in ("window_s", "refit_s"):
            if not 1e-3 <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name} must be from 0.001 to 1e9, got {getattr(self, name)}")


class _Tenant:
    """How often conversations of one tenant went on, after the first turn and after later ones."""

    __slots__ = ("again", "began")

    def __init__(self) -> None:
        self.began = [0.0, 0.0]
        self.again = [0.0, 0.0]


class _Note:
    """What the policy knows of a run."""

    __slots__ = (
        "bin",
        "branches",
        "gap_s",
        "group",
        "growing",
        "kind",
        "last_s",
        "of",
        "pending",
        "pins",
        "sample",
        "stamp",
        "tenant",
        "turn",
    )

    def __init__(self, now_s: float, of: HazardClass) -> None:
        self.last_s = now_s
        self.of = of
        self.bin = 0
        self.stamp = 0
        """Counts up when a place in a queue is not valid any more; odd: it is in one."""
        self.pins = 0
        self.sample: Sample | None = None
        self.kind = ""
        self.turn = 0
        self.tenant = ""
        self.group = 0
        """Of tenants."""
        self.gap_s = 0.0
        """Between the uses before: the last one, for what is shared their mean."""
        self.branches = 0
        """Times that a request went on differently at its end."""
        self.pending = False
        """It was used by a request of which nothing else is known yet."""
        self.growing = False
        """It was stored, and not used since."""


def _bucket(value: float, edges: Sequence[float]) -> int:
    for number, edge in enumerate(edges):
        if value <= edge:
            return number
    return len(edges)


class ReuseHazard(Generic[Key]):
    """Worth: uses to be expected per second of one block's room."""

    def __init__(self, settings: ReuseHazardSettings) -> None:
        self._settings = settings
        self._tree: PrefixTree[Key] = PrefixTree()
        self._table = HazardTable(settings.window_s)
        self._pinned: set[Key] = set()
        self._queues: dict[tuple[int, int], deque[tuple[Run[Key], int]]] = {}
        self._order: list[tuple[float, int, int]] = []
        self._timers: list[tuple[float, int, int]] = []
        self._ghosts: OrderedDict[Key, tuple[Sample, _Note]] = OrderedDict()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._all = _Tenant()
        self._beliefs: Mapping[str, Belief] = {}
        self._waiting: list[Key] = []
        """See :meth:`_next_of_anything`."""
        self._refit_at_s = -math.inf
        self._shares = TenantShares() if settings.fair else None
        self._parked: dict[int, list[tuple[Run[Key], int]]] = {}
        """By group of tenants, what would go if they had not less than their share."""

    # -- what happens

    def stored(
        self,
        keys: Sequence[Key],
        now_s: float,
        traits: Traits,
        offsets: Sequence[int],
        after: Key | None = None,
    ) -> None:
        if not keys:
            return
        came_back = self._returned(keys, now_s)
        parent = self._end_at(after, now_s)
        if parent is not None and self._goes_on(parent):
            self._tree.extend(parent, keys)
            self._count(parent, len(keys))
            return
        note = _Note(now_s, self._table.root)
        note.kind, turn = _kind_and_turn(traits.category)
        self._whose(note, traits.tenant)
        if came_back is not None:
            note.turn, note.gap_s = came_back.turn + 1, now_s - came_back.last_s
        if parent is not None:
            before: _Note = parent.note
            if before.pending:  # by the request that these are of
                note.turn, note.gap_s = before.turn, before.gap_s
                before.pending = False
                self._forget(before)
            elif before.branches:
                pass
            elif before.last_s == now_s:
                note.turn, note.gap_s = before.turn + 1, before.gap_s
            elif not parent.children:
                note.turn, note.gap_s = before.turn + 1, now_s - before.last_s
            else:
                self._branched(before, now_s)
            self._leave_queue(before)
        note.turn = turn or note.turn or 1
        note.growing = True
        run = self._tree.add(keys, offsets[0], parent)
        run.note = note
        self._count(run, len(keys))
        self._tip(note, run.first + len(run.keys), now_s)
        self._enter_queue(run, now_s)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        tree = self._tree
        at, last = 0, None
        while at < len(keys):
            run = tree.run_of(keys[at])
            end, count = tree.match(run, keys, at)
            at += count
            if end < len(run.keys):
                run = self._cut(run, end, now_s)
            else:
                self._whole(run, now_s)
            if last is not None and run.parent is None:
                tree.follow(run, last)
                self._leave_queue(last.note)
            if traits is not None and run.note.tenant != traits.tenant:
                self._count(run, -len(run.keys))
                self._whose(run.note, traits.tenant)
                self._count(run, len(run.keys))
            last = run
        if last is not None:
            self._used_up_to(last, now_s, traits)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            note = self._tree.run_of(key).note
            note.pins += 1
            self._leave_queue(note)
        self._pinned.update(keys)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._pinned.difference_update(keys)
        for key in keys:
            run = self._tree.run_of(key)
            run.note.pins -= 1
            self._enter_queue(run, now_s)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            run = self._tree.remove(key)
            self._count(run, -1)
            if key in self._pinned:
                self._pinned.discard(key)
                run.note.pins -= 1
            if not run.keys:
                self._forget(run.note)
                self._gone(run, now_s)
            else:
                self._enter_queue(run, now_s)

    # -- what a request tells of those before

    def _returned(self, keys: Sequence[Key], now_s: float) -> _Note | None:
        """What was evicted is wanted again."""
        found = None
        ghosts = self._ghosts
        for key in [key for key in keys if key in ghosts]:
            sample, note = ghosts.pop(key)
            self._again(sample, note, now_s)
            found = note
        return found

    def _end_at(self, key: Key | None, now_s: float) -> Run[Key] | None:
        """The run that ends with this key, cut there if it went on."""
        run = self._tree.get(key)
        if run is None or run.keys[-1] == key:
            return run
        return self._cut(run, run.keys.index(key) + 1, now_s)  # type: ignore[arg-type]

    @staticmethod
    def _goes_on(run: Run[Key]) -> bool:
        """It is of a request that is still being computed, chunk by chunk."""
        note: _Note = run.note
        return note.growing and not run.children and note.pins == len(run.keys)

    def _cut(self, run: Run[Key], at: int, now_s: float) -> Run[Key]:
        """A request uses the keys before ``at`` and goes on differently."""
        note: _Note = run.note
        note.growing = False
        left = len(run.keys) - at
        head = self._tree.cut(run, at)
        head.note = mine = _Note(now_s, note.of)
        mine.kind, mine.turn, mine.tenant, mine.group = note.kind, note.turn, note.tenant, note.group
        mine.gap_s = now_s - note.last_s
        if note.pins:
            mine.pins = sum(key in self._pinned for key in head.keys)
            note.pins -= mine.pins
        if not note.branches and not run.children and left == 1:
            if note.sample is not None:  # the next turn: what it does not use is left behind
                self._again(note.sample, note, now_s)
            note.of = self._table.of("left", self._table.root)
            note.sample = self._table.begin(note.of, note.last_s)
            note.turn = 0
            self._leave_queue(note)
        else:
            mine.branches = note.branches
            self._branched(mine, now_s)
        self._enter_queue(run, now_s)  # it may have been kept by what was pinned before it
        return head

    def _branched(self, note: _Note, now_s: float) -> None:
        """One more request goes on differently at the end of this run."""
        note.branches += 1
        note.turn = 0
        self._shared(note, now_s)

    def _shared(self, note: _Note, now_s: float) -> None:
        """It is judged by its own uses from now on."""
        self._forget(note)
        table = self._table
        common = table.of("shared", table.root)
        pace = _bucket(note.gap_s, GAPS_S)
        paced = table.of(("shared", pace), common)
        note.of = table.of(("shared", pace, min(4, note.branches.bit_length())), paced)
        note.sample = table.begin(note.of, now_s)

    def _whole(self, run: Run[Key], now_s: float) -> None:
        """A request uses all of it."""
        note: _Note = run.note
        note.growing = False
        gap_s = now_s - note.last_s
        if note.sample is not None:
            self._again(note.sample, note, now_s)
            note.sample = None
        note.last_s = now_s
        if note.branches:
            note.gap_s += (gap_s - note.gap_s) * 0.3
            self._shared(note, now_s)
        else:
            note.gap_s = gap_s
        self._leave_queue(note)
        self._enter_queue(run, now_s)

    def _used_up_to(self, run: Run[Key], now_s: float, traits: Traits | None) -> None:
        """The last run that a request uses: where it goes on, and if it does not, its end."""
        note: _Note = run.note
        if traits is not None:
            kind, turn = _kind_and_turn(traits.category)
            note.kind = kind or note.kind
            if not note.branches:
                note.turn = turn or note.turn + 1
        elif not note.branches:
            note.turn += 1
        if run.children or note.branches:
            return
        note.pending = True
        self._tip(note, run.first + len(run.keys), now_s)
        self._leave_queue(note)
        self._enter_queue(run, now_s)

    def _tip(self, note: _Note, depth: int, now_s: float) -> None:
        """A request ends here."""
        later = note.turn > 1
        tenant = self._tenant(note.tenant)
        for each in (tenant, self._all):
            each.began[later] += 1.0
            if each.began[later] > 64.0:
                each.began[later] /= 2
                each.again[later] /= 2
        table = self._table
        kind = table.of(note.kind or "any", table.root)
        stage = table.of((kind.name, later), kind)
        turn = table.of(f"{note.kind or 'any'}/{_bucket(note.turn, TURNS)}", stage)
        usual = (self._all.again[later] + 1.0) / (self._all.began[later] + 2.0)
        rate = (tenant.again[later] + TENANT_PRIOR * usual) / (tenant.began[later] - 1.0 + TENANT_PRIOR)
        of = turn
        if later:
            of = table.of((of.name, "gap", _bucket(note.gap_s, GAPS_S)), of)
        if note.tenant:
            of = table.of((of.name, "tenant", min(7, int(rate * 8))), of)
        of = table.of((of.name, "blocks", depth.bit_length()), of)
        note.of = of
        note.sample = table.begin(of, now_s)

    def _again(self, sample: Sample, note: _Note, now_s: float) -> None:
        if sample.over:
            return
        self._table.again(sample, now_s)
        if note.turn:
            for each in (self._tenant(note.tenant), self._all):
                each.again[note.turn > 1] += 1.0

    def _forget(self, note: _Note) -> None:
        if note.sample is not None:
            self._table.give_up(note.sample)
            note.sample = None

    def _whose(self, note: _Note, tenant: str) -> None:
        note.tenant = tenant
        if self._shares is not None:
            note.group = self._shares.group(tenant)

    def _tenant(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = _Tenant()
            if len(self._tenants) > TENANTS_MAX:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(name)
        return found

    # -- who is next

    def _enter_queue(self, run: Run[Key], now_s: float) -> None:
        """If it may go."""
        note: _Note = run.note
        if note.stamp & 1 or note.pins or run.children or not run.keys:
            return
        note.stamp += 1
        note.bin = bin_of(now_s - note.last_s)
        self._append(run, note)

    def _append(self, run: Run[Key], note: _Note) -> None:
        name = (note.of.number, note.bin)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
            if note.bin < BINS - 1:
                heapq.heappush(self._timers, (note.last_s + EDGES_S[note.bin + 1], *name))
        if not queue:
            heapq.heappush(self._order, (self._table.value(*name), *name))
        queue.append((run, note.stamp))

    @staticmethod
    def _leave_queue(note: _Note) -> None:
        note.stamp += note.stamp & 1

    def _advance(self, now_s: float) -> None:
        """What grew older is where it belongs."""
        timers, queues = self._timers, self._queues
        while timers and timers[0][0] <= now_s:
            _, number, bin = heapq.heappop(timers)
            queue = queues[number, bin]
            edge_s = EDGES_S[bin + 1]
            while queue:
                run, stamp = queue[0]
                note: _Note = run.note
                if note.stamp == stamp:
                    if note.last_s + edge_s > now_s:
                        break
                    note.bin = max(bin + 1, bin_of(now_s - note.last_s))  # whatever rounding says
                    self._append(run, note)
                queue.popleft()
            if queue:
                heapq.heappush(timers, (max(now_s, queue[0][0].note.last_s + edge_s), number, bin))
            else:
                del queues[number, bin]

    def _coldest(self) -> tuple[float, Run[Key]] | None:
        order = self._order
        while order:
            value, number, bin = order[0]
            queue = self._queues.get((number, bin))
            while queue and queue[0][0].note.stamp != queue[0][1]:
                queue.popleft()
            if not queue:
                heapq.heappop(order)
                if queue is not None and bin == BINS - 1:
                    del self._queues[number, bin]
                continue
            return value, queue[0][0]
        return None

    def victims(self, count: int, now_s: float) -> list[Key]:
        self._table.advance(now_s)
        self._advance(now_s)
        gone: list[Key] = []
        fair = self._shares
        if fair is not None:
            for group in [group for group in self._parked if fair.above(group)]:
                self._unpark(group)
        while len(gone) < count:
            found = self._coldest()
            if found is not None:
                run, most = found[1], count - len(gone)
                if fair is not None:
                    above = fair.above(run.note.group)
                    if not above:
                        self._park(run)
                        continue
                    most = min(most, above)
                gone.extend(self._evict(run, most, now_s))
            elif self._parked:  # nobody has more than a share
                fair = None
                for group in list(self._parked):
                    self._unpark(group)
            else:
                gone.extend(self._anything(count - len(gone), now_s))
                break
        return gone

    def _evict(self, run: Run[Key], count: int, now_s: float) -> list[Key]:
        """From its end."""
        first = run.keys[0]
        gone = self._tree.drop_end(run, min(count, len(run.keys)))
        self._count(run, -len(gone))
        if not run.keys:
            note: _Note = run.note
            if note.sample is not None and (run.parent is None or run.parent.note.branches or run.parent.children):
                self._ghosts[first] = (note.sample, note)
                while len(self._ghosts) > len(self._tree) + STALE_MIN:
                    _, (sample, _) = self._ghosts.popitem(last=False)
                    self._table.give_up(sample)
            self._gone(run, now_s)
        return gone

    def _gone(self, run: Run[Key], now_s: float) -> None:
        """Nothing is left of it: what it extended may be next."""
        note: _Note = run.note
        self._leave_queue(note)
        parent = run.parent
        if parent is None or parent.children or not parent.keys:
            return
        before: _Note = parent.note
        if not before.branches and note.turn:
            before.of, before.last_s, before.sample = note.of, note.last_s, note.sample
            before.turn, before.kind, before.gap_s = note.turn, note.kind, note.gap_s
        self._enter_queue(parent, now_s)

    def _anything(self, count: int, now_s: float) -> list[Key]:
        """What is pinned holds what is before it: that goes as well, if there is nothing else."""
        gone: list[Key] = []
        while len(gone) < count and (key := self._next_of_anything()) is not None:
            run = self._tree.remove(key)
            self._count(run, -1)
            gone.append(key)
            if not run.keys:
                self._forget(run.note)
                self._gone(run, now_s)
        return gone

    def _next_of_anything(self) -> Key | None:
        """The deepest that is not pinned. Looked for among all, but then for many calls."""
        waiting = self._waiting
        for again in (False, True):
            while waiting and waiting[-1] not in self:
                waiting.pop()
            if waiting or again or not len(self):
                break
            runs = sorted(self._tree.runs().values(), key=lambda run: run.first)
            waiting.extend(key for run in runs for key in run.keys)
        return waiting[-1] if waiting else None

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        self._advance(now_s)
        found = self._coldest()
        if found is None and self._parked:
            for group in list(self._parked):
                self._unpark(group)
            found = self._coldest()
        if found is not None:
            return found[0], found[1].keys[-1]
        key = self._next_of_anything()
        return None if key is None else (math.inf, key)

    def __len__(self) -> int:
        return len(self._tree) - len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._tree and key not in self._pinned

    def _count(self, run: Run[Key], more: int) -> None:
        """The tenant of this run has so many more keys."""
        shares = self._shares
        if shares is not None:
            group = run.note.group
            shares.add(group, more)

    def _park(self, run: Run[Key]) -> None:
        note: _Note = run.note
        self._leave_queue(note)
        self._parked.setdefault(note.group, []).append((run, note.stamp))

    def _unpark(self, group: int) -> None:
        for run, stamp in self._parked.pop(group):
            note: _Note = run.note
            if note.stamp == stamp and run.keys and not note.pins and not run.children:
                note.stamp += 1
                self._append(run, note)

    # -- what is learned

    def refit(self, now_s: float) -> Callable[[], Any] | None:
        if now_s < self._refit_at_s:
            return None
        self._refit_at_s = now_s + self._settings.refit_s
        self._table.advance(now_s)
        return self._table.fit(now_s)

    def adopt(self, fit: Any) -> None:
        self._table.adopt(fit)
        self._beliefs = self._table.beliefs()
        order = [(self._table.value(*name), *name) for name in self._queues]
        heapq.heapify(order)
        self._order = order

    def beliefs(self) -> Mapping[str, Belief]:
        return self._beliefs


def _kind_and_turn(category: str) -> tuple[str, int]:
    """Of ``text/3``."""
    kind, _, turn = category.rpartition("/")
    return (kind, int(turn)) if turn.isdecimal() and len(turn) < 10 else (category, 0)
