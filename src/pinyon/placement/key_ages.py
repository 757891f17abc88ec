"""The ages of keys in epochs: an 8-bit stamp per key, and the number of keys with each stamp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STAMPS = 256
EPOCHS = 64
"""The number of epochs in which as many new keys arrive as the index may hold."""
_OLDEST = 160
"""The number of epochs that are told apart. Older keys count as this old; the other stamps are for new keys."""
_PART_SLOTS = 1 << 16


class KeyAges:
    """The present epoch, and the number of keys with each stamp. The caller owns ``stamps``, which has one per slot."""

    def __init__(self, keys_max: int) -> None:
        self.epoch_keys = -(-keys_max // EPOCHS)
        """The number of new keys that make up one epoch."""
        self._came = 0
        self.stamp = 0
        """The stamp of the present epoch's new keys."""
        self.counts = np.zeros(STAMPS, np.int64)
        """The number of keys by stamp."""
        self.counts_one = self.counts.data

    @property
    def before_present(self) -> int:
        """The number of keys that are older than the present epoch."""
        return int(self.counts.sum()) - self.counts_one[self.stamp]

    def came(self, keys: int) -> None:
        """Counts new keys, which have the present stamp."""
        self.counts_one[self.stamp] += keys
        self._came += keys

    def begins(self, keys: int, older: int, stamps: NDArray[np.uint8]) -> None:
        """Begins an epoch if the present one is full or has too few older keys. ``keys`` keys are about to come, and up
        to ``older`` keys from earlier epochs must go."""
        full = self._came and self._came + keys > self.epoch_keys
        if full or (older and self.before_present < older):
            self._came = 0
            if self.counts[self._by_age()[_OLDEST:]].any():
                self._merge(stamps)
            self.stamp = (self.stamp + 1) % STAMPS

    def renew(self, before: NDArray[np.uint8]) -> None:
        """Counts that keys with these stamps receive the present one."""
        self.counts -= np.bincount(before, minlength=STAMPS)
        self.counts_one[self.stamp] += len(before)

    def renewed(self, before: int, keys: int) -> None:
        """Counts that so many keys with the stamp ``before`` have received the present one."""
        if keys:
            self.counts_one[before] -= keys
            self.counts_one[self.stamp] += keys

    def gone(self, before: int, keys: int) -> None:
        """Subtracts so many removed keys with the stamp ``before``."""
        if keys:
            self.counts_one[before] -= keys

    def forget(self, stamps: NDArray[np.uint8]) -> None:
        """Subtracts removed keys with these stamps."""
        self.counts -= np.bincount(stamps, minlength=STAMPS)

    def oldest(self) -> int:
        """Returns the greatest age, in epochs, that enough keys have reached: a 64th of what the index may hold, or
        somewhat more. If there are fewer keys, all have reached it."""
        older = self.counts[self._by_age()[::-1]].cumsum()
        enough = min(self.epoch_keys, int(older[-1]))
        return STAMPS - 1 - int(np.searchsorted(older, np.int64(enough)))

    def older(self, stamps: NDArray[np.uint8], age: int) -> NDArray[np.bool_]:
        """Returns for each stamp whether it is at least ``age`` epochs old."""
        old: NDArray[np.bool_] = np.uint8(self.stamp) - stamps >= age
        return old

    def _by_age(self) -> NDArray[np.int64]:
        """Returns the stamps, the present one first."""
        by_age: NDArray[np.int64] = (self.stamp - np.arange(STAMPS)) % STAMPS
        return by_age

    def _merge(self, stamps: NDArray[np.uint8]) -> None:
        """Limits the age of keys to half of :data:`_OLDEST`: ~3 ms for ten million keys, once in a hundred epochs."""
        kept, now = _OLDEST // 2, np.uint8(self.stamp)
        limit = np.full(_PART_SLOTS, kept, np.uint8)  # a scalar instead costs five times as much
        for start in range(0, len(stamps), _PART_SLOTS):  # parts that stay in the processor's cache
            part = stamps[start : start + _PART_SLOTS]
            np.subtract(now, np.minimum(now - part, limit[: len(part)]), out=part)
        by_age = self._by_age()
        self.counts[by_age[kept]] = self.counts[by_age[kept:]].sum()
        self.counts[by_age[kept + 1 :]] = 0
