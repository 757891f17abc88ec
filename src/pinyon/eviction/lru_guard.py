"""A guard beside another policy: it knows what LRU would have kept, and whether LRU would have served better lately.

The guard watches uses and stores, and so knows what LRU would hold in the same room, at the cost of one key for each
held key. The hits by which LRU is ahead of the policy are a debt. If it grows too large, a *hold* begins: nothing
goes that LRU would have kept, until the pool holds what LRU would hold and whatever else there is room for.

So a policy that is wrong about a workload, or about its change, costs little more than that debt each time that it is
tried. After each failure, the next try comes after twice the time. The limit of the debt is the policy's gain over LRU
so far, within bounds: a policy that knows nothing yet has little to lose."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Generic

from pinyon.eviction.interface import Key

ALLOWED = 0.005
"""The share of all keys asked for by which the policy may have fewer hits than LRU without a debt."""
LIMIT_MIN, LIMIT_MAX = 0.03, 0.5
"""Bounds of the debt limit, as shares of the room. One request may have as many keys as there is room for."""
HOLD = 8
"""The length of the first hold, in keys used or stored, as a multiple of the debt limit."""
HOLD_MAX = 256
"""The greatest length of a hold, as a multiple of the room."""
FORGIVEN = 8
"""The multiple of the last hold's length after which a new hold is as short as the first."""


class LruGuard(Generic[Key]):
    def __init__(self) -> None:
        self._kept: OrderedDict[Key, None] = OrderedDict()
        """The keys that LRU would hold, the next victim first."""
        self._beyond: dict[int, OrderedDict[Key, int]] = {}
        """The held keys that LRU would not hold, by group, in order of leaving, each with its number in that order."""
        self._group_of: dict[Key, int] = {}
        self.on = False
        """True during a hold: nothing should go that LRU would have kept."""
        self._room = 0
        self._debt = 0.0
        self._gained = 0
        """The policy's hits that LRU would not have had, less those that LRU alone would have had."""
        self._asked = 0
        """The number of keys asked for."""
        self._turned = 0
        """The value of ``_asked`` when a hold last began or ended."""
        self._hold = 0.0
        """The length of the hold, as a multiple of the room."""
        self._left = 0
        """A counter of the keys that have left what LRU would hold."""

    def __len__(self) -> int:
        """Returns the number of remembered keys."""
        return len(self._kept) + len(self._group_of)

    def asked(self, keys: Sequence[Key], held: bool) -> None:
        """Counts keys that a request uses, in the order of its prompt; ``held`` says whether the pool held them."""
        found = self.touched(keys)
        self._asked += len(keys)
        if not self._room:
            return
        more = found - (len(keys) if held else 0)
        self._gained -= more
        self._debt = max(0.0, self._debt + more - ALLOWED * len(keys))
        since = self._asked - self._turned
        if self.on:
            if since > self._hold * self._room:
                self._turn(False)
        elif self._debt > (limit := self.limit()) * self._room:
            forgiven = since > FORGIVEN * self._hold * self._room
            self._hold = HOLD * limit if forgiven else min(HOLD_MAX, 2 * self._hold)
            self._turn(True)

    def limit(self) -> float:
        """Returns the limit of the debt, as a share of the room."""
        return min(LIMIT_MAX, max(LIMIT_MIN, self._gained / self._room))

    def touched(self, keys: Sequence[Key]) -> int:
        """Marks keys as used last without counting them as asked for; returns how many of them LRU would hold."""
        kept, beyond = self._kept, self._group_of
        found = 0
        for key in reversed(keys):
            if key in kept:
                kept.move_to_end(key)
                found += 1
            else:
                kept[key] = None
                if key in beyond:
                    self._leave(key)
        return found

    def _turn(self, on: bool) -> None:
        self.on = on
        self._debt = 0.0
        self._turned = self._asked

    def _leave(self, key: Key) -> None:
        group = self._group_of.pop(key)
        del self._beyond[group][key]
        if not self._beyond[group]:
            del self._beyond[group]

    def shrink(self, room: int, group_of: Callable[[Key], int | None]) -> None:
        """Sets the room, in keys. ``group_of`` returns the group of a held key, and None for a key that is not held."""
        self._room = room
        kept = self._kept
        while len(kept) > room:
            key, _ = kept.popitem(last=False)
            group = group_of(key)
            if group is not None:
                self._left += 1
                self._group_of[key] = group
                self._beyond.setdefault(group, OrderedDict())[key] = self._left

    def gone(self, keys: Sequence[Key]) -> None:
        """Notes that keys were evicted; LRU may have kept them."""
        beyond = self._group_of
        for key in keys:
            if key in beyond:
                self._leave(key)

    def dropped(self, keys: Sequence[Key]) -> None:
        """Notes that keys are gone for another reason, so that LRU would not hold them either."""
        self.gone(keys)
        for key in keys:
            self._kept.pop(key, None)

    def order(self, may: Callable[[int], int]) -> Iterator[Key]:
        """Returns the held keys that LRU would not hold, first to leave first, of groups where ``may`` is above 0."""
        groups = [keys.items() for group, keys in self._beyond.items() if may(group)]
        return (key for key, _ in heapq.merge(*groups, key=itemgetter(1)))

    def later(self, key: Key) -> None:
        """Puts a key that cannot go now behind all others of its group."""
        self._left += 1
        keys = self._beyond[self._group_of[key]]
        keys[key] = self._left
        keys.move_to_end(key)

    def beyond(self, keys: Iterable[Key]) -> int:
        """Returns how many keys at the beginning of ``keys`` LRU would not hold."""
        return sum(1 for _ in takewhile(self._group_of.__contains__, keys))
