"""A second tier under a block pool: what the pool has no room for is demoted instead of lost ("KVCache cache in the
wild" §4.1).

A key is in one tier at a time. Two policies hear what happens: one of the pool's keys says which are *demoted*, one of
the keys of both tiers says which are *lost*, wherever they are. So both tiers together hit as often as one pool of
their sum would, and a demotion costs no history.

The books change at once and name the copies that this takes, as :class:`Swap`; whoever has the memory makes them *in
this order*. Then a slot may be given away while a copy into it or out of it is still waiting, and what is promoted is
at once a block like others, whose content arrives soon. Nobody touches a block before its copies are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pinyon.eviction.evictor import Evictor
from pinyon.eviction.policy import EvictionPolicy, Known, Refit, at_once

NO_SLOT = -1
SWAPS_OUT_MAX = 1024
"""Blocks demoted whose copy is not over: beyond, they are lost. So long others wait for the copies at most."""


class Swap(NamedTuple):
    """The block's content goes to the slot ``out``, then that of the slot ``into`` comes; :data:`NO_SLOT`: it does not.

    Both may be the same slot: the contents change places.
    """

    block: int
    out: int
    into: int


class _Below(NamedTuple):
    slot: int
    known: Known


class SecondTier:
    """Slots ``0 .. slots - 1``. Owned by one :class:`pinyon.paging.BlockPool`."""

    def __init__(
        self,
        slots: int,
        eviction: EvictionPolicy[bytes],
        refit: Refit = at_once,
        *,
        swaps_out_max: int = SWAPS_OUT_MAX,
    ) -> None:
        """``eviction``: of the keys of both tiers."""
        if slots <= 0:
            raise ValueError(f"slots must be positive, got {slots}")
        if len(eviction):
            raise ValueError("the eviction policy belongs to another pool")
        self.eviction = Evictor(eviction, refit)
        self._slots = slots
        self._free = deque(range(slots - 1, -1, -1))
        self._held: dict[bytes, _Below] = {}
        self._swaps: list[Swap] = []
        self._swaps_out_max = swaps_out_max
        self._leaving = 0
        self.swapped_out = 0
        """Blocks demoted so far."""
        self.swapped_in = 0
        """Blocks promoted so far."""
        self.lost = 0
        """Blocks that were to be demoted while too many others were."""

    # -- for the pool

    def demote(self, block: int, key: bytes, known: Known, now_s: float) -> bool:
        """The key, whose content is in the block, is here from now on. There is a free slot. False: it is lost."""
        return self._move(block, NO_SLOT, key, known, now_s)

    def promote(self, key: bytes, block: int) -> Known:
        """The key is in this block from now on, which has no content."""
        below = self._take(key)
        self._swaps.append(Swap(block, NO_SLOT, below.slot))
        self._free.append(below.slot)
        return below.known

    def exchange(self, key: bytes, block: int, demoted: bytes, known: Known, now_s: float) -> tuple[Known, bool]:
        """The key is in this block from now on; ``demoted``, which was, is here. What is known of the key; whether the
        other one is not lost."""
        below = self._take(key)
        self._free.appendleft(below.slot)  # used only if there is no other one: that copies less
        kept = self._move(block, below.slot, demoted, known, now_s)
        if not kept:
            self._swaps.append(Swap(block, NO_SLOT, below.slot))
        return below.known, kept

    def _take(self, key: bytes) -> _Below:
        self.swapped_in += 1
        return self._held.pop(key)

    def _move(self, block: int, into: int, key: bytes, known: Known, now_s: float) -> bool:
        if self._leaving >= self._swaps_out_max:
            self.eviction.evict((key,), now_s)
            self.lost += 1
            return False
        slot = self._free.pop()
        self._held[key] = _Below(slot, known)
        self._swaps.append(Swap(block, slot, into))
        self._leaving += 1
        self.swapped_out += 1
        return True

    def forget(self, key: bytes) -> bool:
        """Whether it was here."""
        below = self._held.pop(key, None)
        if below is None:
            return False
        self._free.append(below.slot)
        return True

    def known_of(self, key: bytes) -> Known:
        return self._held[key].known

    # -- for whoever has the memory

    def take_swaps(self) -> list[Swap]:
        """Copies to be made, in this order, after those of the last call."""
        swaps, self._swaps = self._swaps, []
        return swaps

    def swapped(self, out: int) -> None:
        """So many copies out of blocks are over."""
        if not 0 <= out <= self._leaving:
            raise ValueError(f"{out} copies are over, {self._leaving} were under way")
        self._leaving -= out

    # -- reading

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> Iterable[bytes]:
        return self._held.keys()

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def pending(self) -> bool:
        """:meth:`take_swaps` has some."""
        return bool(self._swaps)

    def faults(self) -> list[str]:
        """What is wrong with the books. O(slots)."""
        taken = [below.slot for below in self._held.values()]
        wrong = [] if sorted([*taken, *self._free]) == list(range(self._slots)) else ["slots are neither held nor free"]
        return wrong + (["keys that may not be lost"] if any(key not in self.eviction for key in self._held) else [])
