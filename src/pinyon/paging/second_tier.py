"""A second tier under a block pool: evicted blocks are demoted to it, not lost ("KVCache cache in the wild" §4.1).

A key is in one tier at a time. Two policies are told of events: one for the pool's keys chooses those to *demote*, and
one for the keys of both tiers chooses those to *lose*, whatever their tier. So both tiers together hit as often as one
pool of their total size would, and a demotion costs no history.

The books change at once, and list the copies that the change needs, as :class:`Swap`. The owner of the memory makes the
copies *in this order*. So a slot may be given away while a copy into or out of it is still waiting. A promoted block
counts as a normal block at once, and its content arrives soon. Nobody touches a block before its copies are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pinyon.eviction.evictor import Evictor
from pinyon.eviction.interface import EvictionPolicy, Known, Refit, at_once

NO_SLOT = -1
SWAPS_OUT_MAX = 1024
"""The maximum number of demoted blocks with pending copies; more are lost. This bounds the wait for copies, too."""


class Swap(NamedTuple):
    """A copy of a block's content to the slot ``out``, then of the content of the slot ``into`` to the block.

    :data:`NO_SLOT` leaves out one of the copies. Both slots may be the same: then the contents change places."""

    block: int
    out: int
    into: int


class _Below(NamedTuple):
    slot: int
    known: Known


class SecondTier:
    """The slots ``0 .. slots - 1`` of one :class:`pinyon.paging.BlockPool`; ``eviction`` knows both tiers' keys."""

    def __init__(
        self, slots: int, eviction: EvictionPolicy[bytes], refit: Refit = at_once, *, swaps_out_max: int = SWAPS_OUT_MAX
    ) -> None:
        if slots <= 0:
            raise ValueError(f"slots must be positive, got {slots}")
        if len(eviction):
            raise ValueError("the eviction policy belongs to another pool")
        self.eviction = Evictor(eviction, refit)
        self.slots = slots
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
        """Blocks that were lost because too many demotions were pending."""

    # -- for the pool

    def demote(self, block: int, key: bytes, known: Known, now_s: float, into: int = NO_SLOT) -> bool:
        """Moves the block's content, which is that of ``key``, to a free slot. Returns False if it is lost instead.

        Then copies the content of the slot ``into`` to the block, if such a slot is named."""
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

    def promote(self, key: bytes, block: int) -> Known:
        """Moves the content of ``key`` to this block, which has no content. Returns what is known of the key."""
        below = self._take(key)
        self._swaps.append(Swap(block, NO_SLOT, below.slot))
        self._free.append(below.slot)
        return below.known

    def exchange(self, key: bytes, block: int, demoted: bytes, known: Known, now_s: float) -> tuple[Known, bool]:
        """Moves the content of ``key`` to this block, and the block's content, that of ``demoted``, to a slot.

        Returns what is known of ``key``, and False if ``demoted`` is lost instead."""
        below = self._take(key)
        # last in line: an exchange within one slot copies more, so this slot is taken only if no other is free
        self._free.appendleft(below.slot)
        kept = self.demote(block, demoted, known, now_s, below.slot)
        if not kept:
            self._swaps.append(Swap(block, NO_SLOT, below.slot))
        return below.known, kept

    def _take(self, key: bytes) -> _Below:
        self.swapped_in += 1
        return self._held.pop(key)

    def forget(self, key: bytes) -> bool:
        """Drops a key and returns whether it was in this tier."""
        below = self._held.pop(key, None)
        if below is None:
            return False
        self._free.append(below.slot)
        return True

    def known_of(self, key: bytes) -> Known:
        return self._held[key].known

    # -- for the owner of the memory

    def take_swaps(self) -> list[Swap]:
        """Returns the copies to be made since the last call, in order; they follow the copies returned earlier."""
        swaps, self._swaps = self._swaps, []
        return swaps

    def swapped(self, out: int) -> None:
        """Reports that ``out`` copies out of blocks have finished."""
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
    def free(self) -> int:
        return len(self._free)

    @property
    def pending(self) -> bool:
        """True if copies are waiting for :meth:`take_swaps`."""
        return bool(self._swaps)
