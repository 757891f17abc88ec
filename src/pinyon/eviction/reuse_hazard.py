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

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from pinyon.eviction.hazard_table import HazardTable, Sample
from pinyon.eviction.policy import Belief, Key, Traits
from pinyon.eviction.prefix_tree import PrefixTree, Run
from pinyon.eviction.request_classes import RequestClasses
from pinyon.eviction.run_note import RunNote
from pinyon.eviction.run_queues import RunQueues
from pinyon.eviction.tenant_shares import TenantShares

__all__ = ["ReuseHazard", "ReuseHazardSettings"]

STALE_MIN = 1024


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


class ReuseHazard(Generic[Key]):
    """Worth: uses to be expected per second of one block's room."""

    def __init__(self, settings: ReuseHazardSettings) -> None:
        self._settings = settings
        self._tree: PrefixTree[Key] = PrefixTree()
        self._table = HazardTable(settings.window_s)
        self._pinned: set[Key] = set()
        self._classes = RequestClasses(self._table)
        self._queues: RunQueues[Key] = RunQueues(self._table)
        self._ghosts: OrderedDict[Key, tuple[Sample, RunNote]] = OrderedDict()
        self._beliefs: Mapping[str, Belief] = {}
        self._waiting: list[Key] = []
        """See :meth:`_next_of_anything`."""
        self._refit_at_s = -math.inf
        self._shares = TenantShares() if settings.fair else None
        self._parked: dict[int, dict[Run[Key], None]] = {}
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
        note = RunNote(now_s, self._table.root)
        note.kind, turn = _kind_and_turn(traits.category)
        self._whose(note, traits.tenant)
        if came_back is not None:
            note.turn, note.gap_s = came_back.turn + 1, now_s - came_back.last_s
        if parent is not None:
            before: RunNote = parent.note
            if before.pending:  # by the request that these are of
                note.turn, note.gap_s = before.turn, before.gap_s
                before.pending = False
                self._classes.forget(before)
            elif before.branches:
                pass
            elif before.last_s == now_s:
                note.turn, note.gap_s = before.turn + 1, before.gap_s
            elif not parent.children:
                note.turn, note.gap_s = before.turn + 1, now_s - before.last_s
            else:
                self._branched(before, now_s)
            self._queues.leave(before)
        note.turn = turn or note.turn or 1
        note.growing = True
        run = self._tree.add(keys, offsets[0], parent)
        run.note = note
        self._count(run, len(keys))
        self._classes.tip(note, run.first + len(run.keys), now_s)
        self._enter(run, now_s)

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
                self._queues.leave(last.note)
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
            self._queues.leave(note)
        self._pinned.update(keys)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._pinned.difference_update(keys)
        for key in keys:
            run = self._tree.run_of(key)
            run.note.pins -= 1
            self._enter(run, now_s)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            run = self._tree.remove(key)
            self._count(run, -1)
            if key in self._pinned:
                self._pinned.discard(key)
                run.note.pins -= 1
            if not run.keys:
                self._classes.forget(run.note)
                self._gone(run, now_s)
            else:
                self._enter(run, now_s)

    # -- what a request tells of those before

    def _returned(self, keys: Sequence[Key], now_s: float) -> RunNote | None:
        """What was evicted is wanted again."""
        found = None
        ghosts = self._ghosts
        for key in [key for key in keys if key in ghosts]:
            sample, note = ghosts.pop(key)
            self._classes.again(sample, note, now_s)
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
        note: RunNote = run.note
        return note.growing and not run.children and note.pins == len(run.keys)

    def _cut(self, run: Run[Key], at: int, now_s: float) -> Run[Key]:
        """A request uses the keys before ``at`` and goes on differently."""
        note: RunNote = run.note
        note.growing = False
        left = len(run.keys) - at
        head = self._tree.cut(run, at)
        head.note = mine = RunNote(now_s, note.of)
        mine.kind, mine.turn, mine.tenant, mine.group = note.kind, note.turn, note.tenant, note.group
        mine.gap_s = now_s - note.last_s
        if note.pins:
            mine.pins = sum(key in self._pinned for key in head.keys)
            note.pins -= mine.pins
        if not note.branches and not run.children and left == 1:
            self._classes.left(note, now_s)  # of the next turn
            self._queues.leave(note)
        else:
            mine.branches = note.branches
            self._branched(mine, now_s)
        self._enter(run, now_s)  # it may have been kept by what was pinned before it
        return head

    def _branched(self, note: RunNote, now_s: float) -> None:
        """One more request goes on differently at the end of this run."""
        note.branches += 1
        note.turn = 0
        self._classes.shared(note, now_s)

    def _whole(self, run: Run[Key], now_s: float) -> None:
        """A request uses all of it."""
        note: RunNote = run.note
        note.growing = False
        gap_s = now_s - note.last_s
        if note.sample is not None:
            self._classes.again(note.sample, note, now_s)
            note.sample = None
        note.last_s = now_s
        if note.branches:
            note.gap_s += (gap_s - note.gap_s) * 0.3
            self._classes.shared(note, now_s)
        else:
            note.gap_s = gap_s
        self._queues.leave(note)
        self._enter(run, now_s)

    def _used_up_to(self, run: Run[Key], now_s: float, traits: Traits | None) -> None:
        """The last run that a request uses: where it goes on, and if it does not, its end."""
        note: RunNote = run.note
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
        self._classes.tip(note, run.first + len(run.keys), now_s)
        self._queues.leave(note)
        self._enter(run, now_s)

    def _whose(self, note: RunNote, tenant: str) -> None:
        note.tenant = tenant
        if self._shares is not None:
            note.group = self._shares.group(tenant)

    # -- who is next

    def _enter(self, run: Run[Key], now_s: float) -> None:
        """If it may go."""
        if not run.note.pins and not run.children and run.keys:
            self._queues.enter(run, now_s)

    def victims(self, count: int, now_s: float) -> list[Key]:
        self._table.advance(now_s)
        self._queues.advance(now_s)
        gone: list[Key] = []
        fair = self._shares
        if fair is not None:
            for group in [group for group in self._parked if fair.above(group)]:
                self._unpark(group, now_s)
        while len(gone) < count:
            found = self._queues.first()
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
                    self._unpark(group, now_s)
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
            note: RunNote = run.note
            if not note.turn and not note.branches:  # left behind
                self._classes.forget(note)
            elif note.sample is not None and not self._inherits(run):
                self._ghosts[first] = (note.sample, note)
                while len(self._ghosts) > len(self._tree) + STALE_MIN:
                    _, (sample, _) = self._ghosts.popitem(last=False)
                    self._table.give_up(sample)
            self._gone(run, now_s)
        return gone

    def _gone(self, run: Run[Key], now_s: float) -> None:
        """Nothing is left of it: what it extended may be next."""
        note: RunNote = run.note
        self._queues.leave(note)
        self._parked.get(note.group, {}).pop(run, None)
        parent = run.parent
        if parent is None or parent.children or not parent.keys:
            return
        if self._inherits(run):
            before: RunNote = parent.note
            self._classes.forget(before)
            before.of, before.last_s, before.sample = note.of, note.last_s, note.sample
            before.turn, before.kind, before.gap_s = note.turn, note.kind, note.gap_s
        self._enter(parent, now_s)

    @staticmethod
    def _inherits(run: Run[Key]) -> bool:
        """What it extended is of the same conversation alone: that is what the next turn will use."""
        parent = run.parent
        if parent is None or not run.note.turn:
            return False
        return bool(parent.keys) and not parent.children and not parent.note.branches

    def _anything(self, count: int, now_s: float) -> list[Key]:
        """What is pinned holds what is before it: that goes as well, if there is nothing else."""
        gone: list[Key] = []
        while len(gone) < count and (key := self._next_of_anything()) is not None:
            run = self._tree.remove(key)
            self._count(run, -1)
            gone.append(key)
            if not run.keys:
                self._classes.forget(run.note)
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
        self._queues.advance(now_s)
        found = self._queues.first()
        if found is None and self._parked:
            for group in list(self._parked):
                self._unpark(group, now_s)
            found = self._queues.first()
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
        note: RunNote = run.note
        self._queues.leave(note)
        self._parked.setdefault(note.group, {})[run] = None

    def _unpark(self, group: int, now_s: float) -> None:
        for run in self._parked.pop(group):
            self._enter(run, now_s)

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
        self._queues.reorder()

    def beliefs(self) -> Mapping[str, Belief]:
        return self._beliefs


def _kind_and_turn(category: str) -> tuple[str, int]:
    """Of ``text/3``."""
    kind, _, turn = category.rpartition("/")
    return (kind, int(turn)) if turn.isdecimal() and len(turn) < 10 else (category, 0)
