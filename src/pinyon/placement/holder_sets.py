"""The sets of holders that keys have: each stored once, known by a number, with how many keys have it.

Ten million keys have some thousands of different sets, for the keys of one prompt are held by the same few. A set is a
mask, an ``int`` with a bit per *row*; a row stands for content that one holder reported, and belongs to the index. A
set never changes: a key that gets one more holder gets another set. Number 0 is the empty set."""

from __future__ import annotations

from collections import Counter

import numpy as np
from librt.vecs import append, vec
from mypy_extensions import i64
from numpy.typing import NDArray

SETS_MAX = 1 << 18
"""The limit of sets, up to ~100 MB with a thousand holders. Beyond it a key's set is not extended. Beyond twice as
many, a key that would need another set is forgotten."""
_UNUSED_MAX = 8192
"""The number of new sets after which unused ones are looked for; at most twice as many are freed then, in ~5 ms."""
_STEPS_MAX = 1 << 16


class HolderSets:
    def __init__(self, sets_max: int = SETS_MAX) -> None:
        self._sets_max = sets_max
        self.masks: list[int] = [0]
        """Masks by number; -1 where the number is free."""
        self._numbers: dict[int, int] = {0: 0}
        self._free: list[int] = []
        self._rows: list[NDArray[np.intp] | None] = [None]
        self._made = 0
        self._steps: dict[int, int] = {}
        self.keys = vec[i64]([0])
        """Keys that have the set, by its number; -1 where there is no such set."""
        self.held = vec[i64]()
        """Keys that have the row in their sets, by row; it means nothing for hidden rows."""

    def __len__(self) -> int:
        return len(self.masks) - len(self._free)

    def add_row(self, row: int) -> None:
        while row >= len(self.held):
            self.held = append(self.held, 0)
        self.held[row] = 0

    def number(self, mask: int, limit: int) -> int:
        """Returns the number of the set ``mask``; 0 if it is new and there are ``limit`` sets already."""
        number = self._numbers.get(mask)
        if number is None:
            if len(self) >= limit:
                return 0
            number = self._new(mask)
        return number

    def alone(self, row: int) -> int:
        """Returns the number of the set with this row only, which is never refused."""
        return self.number(1 << row, len(self) + 1)

    def extended(self, number: int, row: int) -> int:
        """Returns the number of the set with this row added; the same number if there are too many sets."""
        step = number << 16 | row << 1
        after = self._steps.get(step)
        if after is None:
            more = self.number(self.masks[number] | 1 << row, self._sets_max)
            after = self._step(step, more or number)
        return after

    def reduced(self, number: int, row: int) -> int:
        """Returns the number of the set without this row; 0 if that is empty, or there are too many sets."""
        step = number << 16 | row << 1 | 1
        after = self._steps.get(step)
        if after is None:
            after = self._step(step, self.without(number, 1 << row))
        return after

    def without(self, number: int, rows: int) -> int:
        """Returns the number of the set without these rows (a mask); 0 if that is empty, or there are too many sets."""
        mask = self.masks[number]
        return self.number(mask & ~rows, 2 * self._sets_max) if mask & rows else number

    def rows(self, number: int) -> NDArray[np.intp]:
        rows = self._rows[number]
        if rows is None:
            mask = self.masks[number]
            packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
            rows = self._rows[number] = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        return rows

    def forget(self, numbers: NDArray[np.int32]) -> Counter[int]:
        """Subtracts keys that are gone, given the sets that they had; returns how many had each set."""
        gone = Counter(numbers.tolist())
        for number, count in gone.items():
            self.keys[number] -= count
            self._lose(number, count)
        return gone

    def extend(self, number: int, after: int, row: int, keys: int) -> None:
        """Counts ``keys`` keys that got this row: their set was ``number``, or none (0), and is ``after`` now."""
        if keys:
            if number:
                self.keys[number] -= keys
            self.keys[after] += keys
            self.held[row] += keys

    def reduce(self, number: int, after: int, row: int, keys: int) -> None:
        """Counts ``keys`` keys that lost this row and have the set ``after`` now. With 0 the keys are gone, mostly as
        nobody else held them, but also where there are too many sets."""
        if not keys:
            return
        self.keys[number] -= keys
        if after:
            self.keys[after] += keys
        elif self.masks[number] != 1 << row:
            self._lose(number, keys)
            return
        self.held[row] -= keys

    def drop_unused(self) -> bool:
        """Frees the numbers of sets that no key has, a portion of them, if many sets were made since the last time.
        Returns whether it did: numbers that were read from here before may mean other sets then."""
        if self._made < _UNUSED_MAX:
            return False
        self._made = 0
        self._steps.clear()
        unused = np.flatnonzero(np.frombuffer(memoryview(self.keys), np.int64)[1:] == 0)[: 2 * _UNUSED_MAX] + 1
        for number in unused.tolist():
            del self._numbers[self.masks[number]]
            self.masks[number], self._rows[number], self.keys[number] = -1, None, -1
            self._free.append(number)
        return True

    def _new(self, mask: int) -> int:
        if self._free:
            number = self._free.pop()
            self.masks[number], self.keys[number] = mask, 0
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._rows.append(None)
            self.keys = append(self.keys, 0)
        self._numbers[mask] = number
        self._made += 1
        return number

    def _lose(self, number: int, keys: i64) -> None:
        held = self.held
        for row in self.rows(number).tolist():
            held[row] -= keys

    def _step(self, step: int, after: int) -> int:
        if len(self._steps) >= _STEPS_MAX:
            self._steps.clear()
        self._steps[step] = after
        return after
