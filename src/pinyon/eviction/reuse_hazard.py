"""pinyon's own policy: it evicts first the run that is least likely to be used again per second of its room.

The policy looks at requests, not at blocks. A request adds a run of keys to a prompt, and all of these keys have one
fate: either the next turn uses the whole run, or no request does. The policy learns how likely that is, and when
(:mod:`pinyon.eviction.hazard_table`). The likelihood depends on the request's kind and turn, on how often this tenant's
conversations went on so far, and on the pace of this one. Runs that several conversations share (instructions of a
program) are judged by how often they themselves were used. Runs that are left behind when a request goes on differently
are a class of their own.

A run is evicted from its end, and only after all runs that extend it: a prefix is worth at least as much as its
extensions. Nothing is known of the future; if the workload shifts, old counts fade.

Tenants share the room (:mod:`pinyon.eviction.tenant_shares`). Where LRU would serve better, the policy follows LRU for
a while (:mod:`pinyon.eviction.lru_guard`)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic

from pinyon.core.policies import check_bounds
from pinyon.eviction.fair_queues import FairQueues
from pinyon.eviction.fit import Fit
from pinyon.eviction.hazard_table import HazardTable, bin_of
from pinyon.eviction.interface import Key, Traits, kind_and_turn
from pinyon.eviction.lru_guard import LruGuard
from pinyon.eviction.prefix_tree import PrefixTree, RunPins, TreeRun
from pinyon.eviction.request_classes import RequestClasses

STALE_MIN = 1024
LATER_MAX = 64
"""The number of keys that the guard offers and the policy examines before worth alone decides."""


@dataclass(frozen=True, slots=True)
class ReuseHazardSettings:
    """The policy's options.

    Observations fade to 1/e in ``window_s``; beliefs are renewed every ``refit_s``. With ``fair``, no tenant may have
    all of the pool. With ``guard``, LRU is followed where it would serve better."""

    window_s: float = 3600.0
    refit_s: float = 10.0
    fair: bool = True
    guard: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, window_s=(1e-3, 1e9), refit_s=(1e-3, 1e9))


class ReuseHazard(Generic[Key]):
    """The policy; a block's worth is the expected number of uses per second of its room."""

    def __init__(self, settings: ReuseHazardSettings) -> None:
        self._settings = settings
        self._tree: PrefixTree[Key] = PrefixTree()
        self._table = HazardTable(settings.window_s)
        self._pins = RunPins(self._tree)
        self._classes = RequestClasses(self._table)
        self._queues: FairQueues[Key] = FairQueues(self._table, settings.fair)
        self._guard: LruGuard[Key] | None = LruGuard() if settings.guard else None
        self._ghosts: OrderedDict[Key, TreeRun[Key]] = OrderedDict()
        """Evicted runs that are still observed, by their first keys."""
        self._beliefs: Mapping[str, Fit] = {}
        self._refit_at_s = -math.inf

    # -- events

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        if not keys:
            return
        if self._guard is not None:
            self._guard.asked(keys, held=False)
        came_back = self._returned(keys, now_s)
        parent = self._end_at(after, now_s)
        if parent is not None and self._goes_on(parent):
            self._tree.extend(parent, keys)
            self._queues.count(parent, len(keys))
            self._queues.place(parent, now_s)
            return
        turn, gap_s = 0, 0.0
        if came_back is not None:
            turn, gap_s = came_back.turn + 1, now_s - came_back.last_s
        if parent is not None:
            if parent.pending:  # the parent was just used by the request that stores these keys
                turn, gap_s = parent.turn, parent.gap_s
                parent.pending = False
                self._classes.forget(parent)
            elif parent.branches:
                pass
            elif parent.last_s == now_s:
                turn, gap_s = parent.turn + 1, parent.gap_s
            elif not parent.children:
                turn, gap_s = parent.turn + 1, now_s - parent.last_s
            else:
                self._branched(parent, now_s)
            self._queues.leave(parent)
        run = self._tree.add(keys, offsets[0], parent, now_s, self._table.root)
        run.kind, said = kind_and_turn(traits.category)
        run.turn, run.gap_s = said or turn or 1, gap_s
        run.growing = True
        self._queues.whose(run, traits.tenant)
        self._queues.count(run, len(keys))
        self._classes.tip(run, run.first + len(run.keys), now_s)
        self._queues.place(run, now_s)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        tree = self._tree
        if self._guard is not None:
            self._guard.asked(keys, held=True)
        at, last = 0, None
        while at < len(keys):
            run = tree.run_of(keys[at])
            end, count = tree.match(run, keys, at)
            at += count
            if traits is None or traits.tenant == run.tenant:
                self._queues.again(run, now_s)
            if end < len(run.keys):
                run = self._cut(run, end, now_s)
            else:
                self._whole(run, now_s)
            if last is not None and (run.parent is None or not run.parent.keys):
                tree.follow(run, last)
                self._queues.leave(last)
            if traits is not None and run.tenant != traits.tenant:
                self._queues.hand(run, traits.tenant, now_s)
            last = run
        if last is not None:
            self._used_up_to(last, now_s, traits)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for run in self._pins.add(keys):
            self._queues.place(run, now_s)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        if self._guard is not None:
            self._guard.touched(keys)
        for run in self._pins.remove(keys):
            self._queues.place(run, now_s)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        if self._guard is not None:
            self._guard.dropped(keys)
        for run, some in self._tree.by_run(keys).items():
            self._remove(run, some, now_s)

    def _remove(self, run: TreeRun[Key], keys: Sequence[Key], now_s: float) -> None:
        """Removes keys from any place of a run."""
        self._tree.remove(run, keys)
        self._pins.lost(run, keys)
        self._queues.count(run, -len(keys))
        if run.keys:
            self._queues.place(run, now_s)
        else:
            self._classes.forget(run)
            self._gone(run, now_s)

    def follows(self, key: Key, after: Key, now_s: float) -> None:
        run, parent = self._tree.run_of(key), self._tree.run_of(after)
        if parent.children:
            self._branched(parent, now_s)
        self._tree.follow(run, parent)
        self._queues.leave(parent)

    # -- learning from the return of earlier keys

    def _returned(self, keys: Sequence[Key], now_s: float) -> TreeRun[Key] | None:
        """Counts the return of evicted runs, and returns the last one, if any."""
        found = None
        ghosts = self._ghosts
        for key in [key for key in keys if key in ghosts]:
            found = ghosts.pop(key)
            self._classes.again(found, now_s)
        return found

    def _end_at(self, key: Key | None, now_s: float) -> TreeRun[Key] | None:
        """Returns the run that ends with this key, cut there if it was longer; None if the key is not held."""
        run = self._tree.get(key)
        if run is None or run.keys[-1] == key:
            return run
        return self._cut(run, run.keys.index(key) + 1, now_s)  # type: ignore[arg-type]

    @staticmethod
    def _goes_on(run: TreeRun[Key]) -> bool:
        """Returns whether the run belongs to a request that is still being computed, chunk by chunk."""
        return run.growing and not run.children and run.pins == len(run.keys)

    def _cut(self, run: TreeRun[Key], at: int, now_s: float) -> TreeRun[Key]:
        """Cuts a run before ``at``, where a request that used it goes on differently, and returns the first part."""
        run.growing = False
        left = len(run.keys) - at
        head = self._tree.cut(run, at, now_s)
        head.kind, head.turn, head.tenant, head.group = run.kind, run.turn, run.tenant, run.group
        head.gap_s = now_s - run.last_s
        if run.pins:
            self._pins.cut(run, head)
        if not run.branches and not run.children and left == 1:
            self._classes.left(run, now_s)  # the next turn does not use it
            self._queues.leave(run)
        else:
            head.branches = run.branches
            self._branched(head, now_s)
        self._queues.place(run, now_s)  # pinned keys in its first part may have kept it out of the queue
        return head

    def _branched(self, run: TreeRun[Key], now_s: float) -> None:
        """Counts one more request that goes on differently at the end of this run."""
        run.branches += 1
        run.turn = 0
        self._classes.shared(run, now_s)

    def _whole(self, run: TreeRun[Key], now_s: float) -> None:
        """Notes that a request uses the whole run."""
        run.growing = False
        gap_s = now_s - run.last_s
        self._classes.again(run, now_s)
        run.sample = None
        run.last_s = now_s
        if run.branches:
            run.gap_s += (gap_s - run.gap_s) * 0.3
            self._classes.shared(run, now_s)
        else:
            run.gap_s = gap_s
        self._queues.leave(run)
        self._queues.place(run, now_s)

    def _used_up_to(self, run: TreeRun[Key], now_s: float, traits: Traits | None) -> None:
        """Notes the last run that a request uses, which is the end of the request unless other runs extend it."""
        turn = 0
        if traits is not None:
            kind, turn = kind_and_turn(traits.category)
            run.kind = kind or run.kind
        if not run.branches:
            run.turn = turn or run.turn + 1
        if run.children or run.branches:
            return
        run.pending = True
        self._classes.tip(run, run.first + len(run.keys), now_s)
        self._queues.leave(run)
        self._queues.place(run, now_s)

    # -- the next victim

    def victims(self, count: int, now_s: float) -> list[Key]:
        self._table.advance(now_s)
        self._queues.advance(now_s)
        gone: list[Key] = []
        while len(gone) < count and (found := self._first(count - len(gone))) is not None:
            gone.extend(self._evict(*found, now_s))
        gone.extend(self._anything(count - len(gone), now_s))
        return gone

    def _first(self, count: int) -> tuple[TreeRun[Key], int] | None:
        """Returns the run whose last keys should go next, and how many of them, at most ``count``."""
        guard = self._guard
        if guard is not None:
            guard.shrink(max(0, len(self._tree) - count), self._group_of)
            if guard.on and (found := self._left_by_lru(guard, count)) is not None:
                return found
        run = self._queues.first()
        return None if run is None else (run, min(self._queues.most(run), count))

    def _left_by_lru(self, guard: LruGuard[Key], count: int) -> tuple[TreeRun[Key], int] | None:
        """Returns the same as :meth:`_first`, but considers only keys that LRU would not hold."""
        later: list[Key] = []
        found = None
        for key in islice(guard.order(self._queues.above), LATER_MAX):
            run = self._tree.run_of(key)
            many = min(guard.beyond(reversed(run.keys)), self._queues.most(run), count)
            if many and not run.children:
                found = run, many
                break
            later.append(key)  # pinned, protected by its tenant's share, or extended by a key that LRU would keep
        for key in later:
            guard.later(key)
        return found

    def _group_of(self, key: Key) -> int | None:
        """Returns the tenant group of a held key."""
        run = self._tree.get(key)
        return None if run is None else run.group

    def _evict(self, run: TreeRun[Key], count: int, now_s: float) -> list[Key]:
        """Evicts the last ``count`` keys of a run, and returns them."""
        first = run.keys[0]
        gone = self._tree.drop_end(run, count)
        if self._guard is not None:
            self._guard.gone(gone)
        self._queues.count(run, -len(gone))
        if not run.keys:
            if not run.turn and not run.branches:  # the next turn has left this run behind
                self._classes.forget(run)
            elif run.sample is not None and not self._inherits(run):
                self._ghosts[first] = run
                while len(self._ghosts) > len(self._tree) + STALE_MIN:
                    self._classes.forget(self._ghosts.popitem(last=False)[1])
            self._gone(run, now_s)
        else:
            self._queues.place(run, now_s)
        return gone

    def _gone(self, run: TreeRun[Key], now_s: float) -> None:
        """Takes an empty run out of the queues; its parent may inherit its sample and be the next victim."""
        self._queues.leave(run)
        parent = run.parent
        if parent is None:
            return
        if self._inherits(run):
            self._classes.forget(parent)
            parent.of, parent.last_s, parent.sample = run.of, run.last_s, run.sample
            parent.turn, parent.kind, parent.gap_s = run.turn, run.kind, run.gap_s
        self._queues.place(parent, now_s)
        run.parent = None  # longer runs may live on, and must not keep all former parents in memory

    @staticmethod
    def _inherits(run: TreeRun[Key]) -> bool:
        """Returns whether only the same conversation uses the parent, so that its next turn will use the parent."""
        parent = run.parent
        if parent is None or not run.turn:
            return False
        return bool(parent.keys) and not parent.children and not parent.branches

    def _anything(self, count: int, now_s: float) -> list[Key]:
        """Evicts keys that only later, pinned keys protect, as there is nothing else to evict."""
        gone: list[Key] = []
        while len(gone) < count and (run := self._pins.deepest()) is not None:
            some = self._pins.free_of(run)[: count - len(gone)]
            if self._guard is not None:
                self._guard.gone(some)
            self._remove(run, some, now_s)
            gone.extend(some)
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        self._queues.advance(now_s)
        found = self._first(1)
        if found is not None:
            run = found[0]
            return self._table.value(run.of.number, bin_of(now_s - run.last_s)), run.keys[-1]
        deepest = self._pins.deepest()
        return None if deepest is None else (math.inf, self._pins.free_of(deepest)[0])

    def __len__(self) -> int:
        return len(self._tree) - len(self._pins)

    def __contains__(self, key: object) -> bool:
        return key in self._tree and key not in self._pins

    # -- learning

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

    def beliefs(self) -> Mapping[str, Fit]:
        return self._beliefs
