"""How old keys are, in 64ths of what the index may hold: a stamp of 8 bits each, and how many keys have it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STAMPS = 256
EPOCHS = 64
"""In which as many keys come as there may be."""
_OLDEST = 160
"""Epochs that are told apart. Keys that are older count as that old, and there are as many stamps more for new ones."""
_PART_SLOTS = 1 << 16


class KeyAges:
    """The present epoch, and the stamps of the keys: ``stamps`` has one per slot, and is not this class's own."""

    def __init__(self, keys_max: int) -> None:
        self.epoch_keys = -(-keys_max // EPOCHS)
        """Keys that come in one epoch."""
        self._came = 0
        self.stamp = 0
        """Of what comes now."""
        self.counts = np.zeros(STAMPS, np.int64)
        """Keys by stamp."""
        self.counts_one = self.counts.data

    @property
    def before_present(self) -> int:
        """Keys that are older than the present epoch."""
        return int(self.counts.sum()) - self.counts_one[self.stamp]

    def came(self, keys: int) -> None:
        """So many new ones have the present stamp."""
        self.counts_one[self.stamp] += keys
        self._came += keys

    def begins(self, keys: int, older: int, stamps: NDArray[np.uint8]) -> None:
        """So many keys come, and up to ``older`` have to go: these are older than the new ones."""
        full = self._came and self._came + keys > self.epoch_keys
        if full or (older and self.before_present < older):
            self._came = 0
            if self.counts[self._by_age()[_OLDEST:]].any():
                self._merge(stamps)
            self.stamp = (self.stamp + 1) % STAMPS

    def renew(self, before: NDArray[np.uint8]) -> None:
        """Keys with these stamps get the present one."""
        self.counts -= np.bincount(before, minlength=STAMPS)
        self.counts_one[self.stamp] += len(before)

    def renewed(self, before: int, keys: int) -> None:
        """So many keys with this stamp have the present one now."""
        if keys:
            self.counts_one[before] -= keys
            self.counts_one[self.stamp] += keys

    def gone(self, before: int, keys: int) -> None:
        """So many keys with this stamp are."""
        if keys:
            self.counts_one[before] -= keys

    def forget(self, stamps: NDArray[np.uint8]) -> None:
        """Keys with these stamps are gone."""
        self.counts -= np.bincount(stamps, minlength=STAMPS)

    def oldest(self) -> int:
        """Epochs ago: the keys that are at least so old are a 64th of what there may be, or somewhat more; all keys
        where there are fewer."""
        older = self.counts[self._by_age()[::-1]].cumsum()
        enough = min(self.epoch_keys, int(older[-1]))
        return STAMPS - 1 - int(np.searchsorted(older, np.int64(enough)))

    def older(self, stamps: NDArray[np.uint8], age: int) -> NDArray[np.bool_]:
        """Which of them are from so many epochs ago, or before."""
        old: NDArray[np.bool_] = np.uint8(self.stamp) - stamps >= age
        return old

    def _by_age(self) -> NDArray[np.int64]:
        """Stamps, the present one first."""
        by_age: NDArray[np.int64] = (self.stamp - np.arange(STAMPS)) % STAMPS
        return by_age

    def _merge(self, stamps: NDArray[np.uint8]) -> None:
        """What is very old counts as half as old: ~3 ms for ten million keys, once in a hundred epochs."""
        kept, now = _OLDEST // 2, np.uint8(self.stamp)
        limit = np.full(_PART_SLOTS, kept, np.uint8)  # a number instead costs five times as much
        for start in range(0, len(stamps), _PART_SLOTS):  # parts that stay in the processor's cache
            part = stamps[start : start + _PART_SLOTS]
            np.subtract(now, np.minimum(now - part, limit[: len(part)]), out=part)
        by_age = self._by_age()
        self.counts[by_age[kept]] = self.counts[by_age[kept:]].sum()
        self.counts[by_age[kept + 1 :]] = 0
