"""The blocks of a node that are read most, by the reads of a short while (Mooncake §4.2). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from pinyon.core.block_keys import BlockKey

WINDOW_S = 5.0
HOT_READS = 8
"""The reads within a window that make a block hot: a copy costs one read and one write."""
HOT_MAX = 1024
COUNTED_MAX = 32_768
"""The number of blocks that end a window early."""


class HotReads:
    """A counter of reads, window by window."""

    def __init__(self, now_s: float, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.hot: list[tuple[BlockKey, int]] = []
        """The blocks that were hot in the last window, each with its reads, the hottest first."""
        self._since_s = now_s
        self._counts: Counter[BlockKey] = Counter()
        self._over: tuple[float, int] | None = None

    def add(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """Counts one read of each of these blocks. Of two windows that nobody took, the later is kept."""
        self._counts.update(keys)
        if len(self._counts) >= COUNTED_MAX:
            self._end(now_s)

    def take(self, now_s: float) -> tuple[float, int] | None:
        """Returns the seconds and reads of the last window, once it is over.

        A window that nobody took for as long again is dropped: few reads in a long time make nothing hot."""
        late = now_s >= self._since_s + 2 * self.window_s
        if now_s >= self._since_s + self.window_s:
            self._end(now_s)
        over, self._over = self._over, None
        return None if late else over

    def _end(self, now_s: float) -> None:
        counts, self._counts = self._counts, Counter()
        self._over, self._since_s = (max(now_s - self._since_s, 1e-3), counts.total()), now_s
        # Among equals the order of the first reads stays, in which blocks follow their ancestors.
        hot = sorted([each for each in counts.items() if each[1] >= HOT_READS], key=lambda each: -each[1])
        self.hot = hot[:HOT_MAX]


def to_copy(
    hot: Sequence[tuple[BlockKey, int]], holders: Sequence[Collection[str]], target: str, reads: int
) -> list[BlockKey]:
    """Returns which hot blocks to copy to the node ``target`` so that it takes over so many of their ``reads``.

    A new copy takes as large a share of a block's reads as each of its ``holders`` keeps. Blocks that the target has
    are passed over, so that the next order continues where this one ends, in the middle of a prefix as well."""
    keys: list[BlockKey] = []
    moved = 0.0
    for (key, count), those in zip(hot, holders, strict=True):
        if moved >= reads:
            break
        if target not in those:
            keys.append(key)
            moved += count / (len(those) + 1)
    return keys
