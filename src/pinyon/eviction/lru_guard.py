"""LRU beside another policy: whether it would have served better lately, and what it would have kept.

It watches what is used and stored, and so knows what LRU would hold in the same room; that costs one key for each that
is held. What LRU has answered more than the other one is a debt. If it grows too large, nothing goes for a while that
LRU would have kept, until what is held is what LRU would hold and what there is room for besides. So a policy that is
wrong about a workload, or about its change, costs little more than that debt: for each time that it is tried again, and
after each failure that is twice as late. The debt may be as large as what the policy has gained over LRU so far, within
bounds: one that knows nothing yet has little to lose.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Generic

from pinyon.eviction.policy import Key

ALLOWED = 0.005
"""Of what is asked for: so much less than LRU is no debt."""
LIMIT_MIN, LIMIT_MAX = 0.03, 0.5
"""Of the room: a debt of so many keys. One request may have as many as there is room for."""
HOLD = 8
"""How long the first time, in keys used or stored: so often the debt."""
HOLD_MAX = 256
"""So often the room."""
FORGIVEN = 8
"""So often that long without a debt, and the next time is a first one."""


class LruGuard(Generic[Key]):
    def __init__(self) -> None:
        self._kept: OrderedDict[Key, None] = OrderedDict()
        """By LRU, what is next first."""
        self._beyond: dict[int, OrderedDict[Key, int]] = {}
        """What is held and LRU would not, the longest first, by group: when it was that."""
        self._group_of: dict[Key, int] = {}
        self.on = False
        """Nothing should go that LRU would have kept."""
        self._room = 0
        self._debt = 0.0
        self._gained = 0
        """Keys that LRU would not have answered, less those that it alone would have."""
        self._asked = 0
        """Keys."""
        self._turned = 0
        """When it was turned on or off, in keys."""
        self._hold = 0.0
        """In rooms."""
        self._left = 0
        """So many have left what LRU would hold."""

    def __len__(self) -> int:
        """Keys that it remembers."""
        return len(self._kept) + len(self._group_of)

    def asked(self, keys: Sequence[Key], held: bool) -> None:
        """A request uses these, in the order of its prompt. ``held``: they were there."""
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
        """Of the debt, in rooms."""
        return min(LIMIT_MAX, max(LIMIT_MIN, self._gained / self._room))

    def touched(self, keys: Sequence[Key]) -> int:
        """They are those used last, without having been asked for; how many of them LRU would hold."""
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
        """There is room for so many keys. ``group_of`` those that are held; None: it is not."""
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
        """They are not held any more: LRU may have kept them."""
        beyond = self._group_of
        for key in keys:
            if key in beyond:
                self._leave(key)

    def dropped(self, keys: Sequence[Key]) -> None:
        """Nor would LRU hold them."""
        self.gone(keys)
        for key in keys:
            self._kept.pop(key, None)

    def order(self, may: Callable[[int], int]) -> Iterator[Key]:
        """What LRU would not hold, the longest first, of the groups that ``may`` give."""
        groups = [keys.items() for group, keys in self._beyond.items() if may(group)]
        return (key for key, _ in heapq.merge(*groups, key=itemgetter(1)))

    def later(self, key: Key) -> None:
        """That one cannot go now: it is next after all the others of its group."""
        self._left += 1
        keys = self._beyond[self._group_of[key]]
        keys[key] = self._left
        keys.move_to_end(key)

    def beyond(self, keys: Iterable[Key]) -> int:
        """How many of the first of these LRU would not hold."""
        return sum(1 for _ in takewhile(self._group_of.__contains__, keys))
