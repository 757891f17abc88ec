"""The uses of a trace's blocks against an unlimited cache: who used a block before, and who stored it.

One walk visits all uses, and keeps what the figures need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinyon_lab.traces.analysis.columns import Ints, TraceColumns

STEP_IDS = 1 << 20
PARTS = 10
"""The number of parts of a prompt, by which a block's place in it is told."""


class HitRuns(NamedTuple):
    """Hits as arrays; neighbouring blocks of one request with one history are one element. A hit is a block of the
    longest leading run of blocks that earlier requests used."""

    row: Ints
    before: Ints
    """The row that used these blocks last."""
    stored: Ints
    """The row that used them first."""
    blocks: Ints
    """The number of blocks."""


class Step(NamedTuple):
    """Some successive requests, from ``first`` to ``end``."""

    first: int
    end: int
    hits: Ints
    """The hit blocks of each request."""
    runs: HitRuns
    cached: NDArray[np.uint16] | None
    """The tenths in which earlier requests had each block of these, hit or not: bit ``p`` is set for tenth ``p``."""


class Blocks:
    """The state of each block; all -1 or 0 for a number that does not occur."""

    def __init__(self, numbers: int, *, parts: bool) -> None:
        self.first = np.full(numbers, -1, np.int32)
        """The row that used the block first."""
        self.last = np.full(numbers, -1, np.int32)
        self.uses = np.zeros(numbers, np.int32)
        """The number of requests that used the block."""
        self.parts = np.zeros(numbers if parts else 0, np.uint16)


def walk(columns: TraceColumns, blocks: Blocks) -> Iterator[Step]:
    """Yields the steps in order of time. At the end ``blocks`` is complete, with tenths if it was made for them."""
    starts, first = columns.starts, 0
    while first < len(columns):
        end = max(first + 1, int(np.searchsorted(starts, starts[first] + STEP_IDS, side="right")) - 1)
        yield _step(columns, blocks, first, end)
        first = end


def _step(columns: TraceColumns, blocks: Blocks, first: int, end: int) -> Step:
    at = columns.starts[first : end + 1] - columns.starts[first]
    lengths = np.diff(at)
    ids = columns.blocks[columns.starts[first] : columns.starts[end]]
    row = np.repeat(np.arange(first, end, dtype=np.int32), lengths)
    count = len(ids)
    if not count:
        empty = np.zeros(0, np.int32)
        return Step(first, end, np.zeros(end - first, np.int32), HitRuns(empty, empty, empty, empty), None)
    groups = _Groups(ids, row)
    before, stored = groups.history(blocks)
    cached = None
    if len(blocks.parts):
        place = np.arange(count) - np.repeat(at[:-1], lengths)
        tenth = place * PARTS // np.repeat(lengths, lengths)
        cached = groups.cached(blocks, np.left_shift(1, tenth).astype(np.uint16))
    misses = np.concatenate(([0], np.cumsum(before < 0)))
    hit = misses[1:] == np.repeat(misses[at[:-1]], lengths)
    change = np.ones(count, bool)
    change[1:] = (row[1:] != row[:-1]) | (before[1:] != before[:-1]) | (stored[1:] != stored[:-1])
    heads = np.flatnonzero(change & hit)
    hit_until = np.concatenate(([0], np.cumsum(hit)))
    run_hits = np.diff(hit_until[np.append(heads, count)]).astype(np.int32)
    hits = (hit_until[at[1:]] - hit_until[at[:-1]]).astype(np.int32)
    return Step(first, end, hits, HitRuns(row[heads], before[heads], stored[heads], run_hits), cached)


class _Groups:
    """The uses of one step sorted by block, then row. A block that a request has twice is one group, used once."""

    def __init__(self, ids: Ints, row: Ints) -> None:
        order = np.sort((ids.astype(np.int64) << 32) | np.arange(len(ids)))
        self._at = order & 0xFFFFFFFF
        block, rows = (order >> 32).astype(np.int32), row[self._at]
        new_block = np.ones(len(ids), bool)
        new_block[1:] = block[1:] != block[:-1]
        new = new_block.copy()
        new[1:] |= rows[1:] != rows[:-1]
        self._heads = np.flatnonzero(new)
        self._sizes = np.diff(np.append(self._heads, len(ids)))
        self._row = rows[self._heads]
        self._firsts = np.flatnonzero(new_block[self._heads])
        """The first group of each block."""
        self._block = block[self._heads][self._firsts]
        self._groups = np.diff(np.append(self._firsts, len(self._heads)))
        """The number of groups of each block."""

    def _spread(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Returns an array with each group's value where its blocks are in the requests."""
        out = np.empty(len(self._at), values.dtype)
        out[self._at] = np.repeat(values, self._sizes)
        return out

    def history(self, blocks: Blocks) -> tuple[Ints, Ints]:
        """Returns for each use the row before and the row that stored the block; -1: none. Updates ``blocks``."""
        block = self._block
        before = np.empty_like(self._row)
        before[1:] = self._row[:-1]
        before[self._firsts] = blocks.last[block]
        known = blocks.first[block]
        first = np.where(known >= 0, known, self._row[self._firsts])
        stored = np.repeat(first, self._groups)
        stored[self._firsts] = known
        blocks.first[block] = first
        blocks.last[block] = self._row[self._firsts + self._groups - 1]
        blocks.uses[block] += self._groups.astype(np.int32)
        return self._spread(before), self._spread(stored)  # type: ignore[return-value]

    def cached(self, blocks: Blocks, bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Returns for each use the bits of the block's earlier uses in other requests. Updates ``blocks``."""
        own = np.bitwise_or.reduceat(bits[self._at], self._heads)
        earlier = np.repeat(blocks.parts[self._block], self._groups)
        for part in range(PARTS):
            has = own >> part & 1
            before = np.cumsum(has, dtype=np.int32) - has
            earlier |= (before > np.repeat(before[self._firsts], self._groups)).astype(np.uint16) << part
        blocks.parts[self._block] |= np.bitwise_or.reduceat(own, self._firsts)
        return self._spread(earlier)  # type: ignore[return-value]


class Survey:
    """A walk over all uses. ``hits`` has the hit blocks of each request, ``blocks`` the state at the end."""

    def __init__(self, columns: TraceColumns, *, parts: bool) -> None:
        self.columns = columns
        self.hits = np.zeros(len(columns), np.int32)
        self.blocks = Blocks(columns.numbers, parts=parts)

    def run(self, takers: Iterable[Callable[[Step], None]], progress: Callable[[int], None]) -> None:
        """Runs the walk; ``takers`` note what their figures need, ``progress`` the number of requests that are done."""
        for step in walk(self.columns, self.blocks):
            self.hits[step.first : step.end] = step.hits
            for take in takers:
                take(step)
            progress(step.end)
