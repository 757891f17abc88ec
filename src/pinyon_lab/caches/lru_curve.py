"""Hits of LRU at every capacity, from one pass over the requests.

Whatever its capacity, an LRU cache holds the top of one stack. The reason is that LRU orders by last use, and all
blocks of a request are used, the deepest first, before any eviction (:mod:`pinyon_lab.caches.replay`). So a block is
resident if its place in the stack is at most the capacity (Mattson et al., "Evaluation techniques for storage
hierarchies", 1970). It is a hit if this also holds for all blocks before it: that is, if the capacity is at least the
greatest of their places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class LruCurve:
    """The hits of LRU by capacity, for requests with n blocks in prompt order. O(n log n) time and O(n) memory."""

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        uses: list[int] = []  # by number of use: the number of the same block's previous use, plus 1; 0: none
        last: dict[int, int] = {}
        begun, before = [], []  # by requested block: the uses before its request, and that block's last one among them
        for blocks in requests:
            begun += [len(uses)] * len(blocks)
            before += [last.get(block, 0) for block in blocks]
            for block in reversed(dict.fromkeys(blocks)):
                uses.append(last.get(block, 0))
                last[block] = len(uses)
        self.blocks = len(before)
        self.unique_blocks = len(last)
        ends, least = np.array(begun, np.int64), np.array(before, np.int64)
        followed = _count_at_least(np.array(uses, np.int64), ends, least)
        # from 1, the top of the stack: after the different blocks used since then; blocks never used are below all
        places = np.where(least > 0, ends - least + 1 - followed, len(uses) + 1)
        request = np.repeat(np.arange(len(requests)), [len(blocks) for blocks in requests])
        apart = request * (len(uses) + 2)
        needed = np.maximum.accumulate(places + apart) - apart if self.blocks else places
        self._needed = np.sort(needed[needed <= len(uses)])

    @property
    def ideal_hits(self) -> int:
        """The hits of a cache with room for all blocks."""
        return len(self._needed)

    def hits(self, capacity: int) -> int:
        """Returns how many requested blocks a cache of ``capacity`` blocks holds."""
        return int(np.searchsorted(self._needed, capacity, side="right"))


def _count_at_least(values: Ints, ends: Ints, least: Ints) -> Ints:
    """Returns, for each pair of ``ends`` and ``least``, how many of the first ``ends`` values are at least ``least``.

    It goes from the highest bit on and separates the values by each bit in turn: a wavelet matrix, of which one level
    is in memory at a time."""
    count = np.zeros(len(ends), np.int64)
    low, high = np.zeros(len(ends), np.int64), ends
    for bit in range(int(max(values.max(initial=0), least.max(initial=0))).bit_length() - 1, -1, -1):
        ones = (values >> bit & 1).astype(bool)
        ones_before = np.concatenate(([0], np.cumsum(ones)))
        zeros = len(values) - ones_before[-1]
        low_ones, high_ones = ones_before[low], ones_before[high]
        wants_one = (least >> bit & 1).astype(bool)
        count += np.where(wants_one, 0, high_ones - low_ones)
        low = np.where(wants_one, zeros + low_ones, low - low_ones)
        high = np.where(wants_one, zeros + high_ones, high - high_ones)
        values = np.concatenate((values[~ones], values[ones]))
    return count + high - low
