"""How likely what was used is used again, by what is known of it and by how long ago that was; learned from what happens.

Time since the last use is cut into bins. Of each class it is counted how many came through a bin unused and how many were
used again in it: a life table, faded, so that old days count less. A part is taken to be like what contains it but for
its level, as if :data:`LEVEL_PRIOR` uses had been seen as expected, and, bin by bin, :data:`PRIOR` blocks.

A block that is worth holding is worth it until some time: the value is the greatest, over all times to hold it until, of
(probability that it is used until then) / (expected time that it is held until then or until its use): uses per second of
a block's room. (With a falling hazard that is the hazard; where a use becomes likelier with time it looks ahead. It is
Gittins' index of a job that may be given up, and the "hit density" of Beckmann et al., "LHD", NSDI '18, at its best.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinyon.eviction.policy import Belief

__all__ = ["BINS", "EDGES_S", "HazardClass", "HazardTable", "Sample", "bin_of"]

EDGES_S = (0.0, *(2.0**step for step in range(17)))
"""Of the bins, the last one open: 1 s to 65,536 s (18 h), doubling."""
BINS = len(EDGES_S)
WIDTHS_S = np.array([*np.diff(EDGES_S), EDGES_S[-1]])
PRIOR = 100.0
CLASSES_MAX = 4096
LEVEL_PRIOR = 40.0
FIRST_RATE = 1e-3
"""Uses per second, before anything was seen."""
FALL = 0.7
"""Of them, in the next bin, as long as nobody got there."""


def bin_of(age_s: float) -> int:
    return bisect_right(EDGES_S, age_s) - 1 if age_s > 0 else 0


class HazardClass:
    """Those that are alike in what is known of them."""

    __slots__ = ("again", "name", "number", "parent", "through", "values")

    def __init__(self, name: Hashable, number: int, parent: HazardClass | None) -> None:
        self.name = name
        self.number = number
        self.parent = parent
        self.again = [0.0] * BINS
        """Used again, by bin."""
        self.through = [0.0] * BINS
        """Not used again in that bin."""
        self.values: list[float] = parent.values if parent is not None else [FIRST_RATE * FALL**bin for bin in range(BINS)]
        """Uses per second of holding one block, by bin."""


class Sample:
    """One that may be used again."""

    __slots__ = ("last_s", "of", "over")

    def __init__(self, of: HazardClass, last_s: float) -> None:
        self.of = of
        self.last_s = last_s
        self.over = False


class _Snapshot(NamedTuple):
    parents: NDArray[np.int64]
    again: NDArray[np.float64]
    through: NDArray[np.float64]


class HazardTable:
    """``window_s``: what is older by that counts 1/e."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._classes: dict[Hashable, HazardClass] = {}
        self._waiting: list[deque[Sample]] = [deque() for _ in range(BINS)]
        self._faded_s: float | None = None
        self.root = self.of((), None)
        self.samples = 0
        """Not over yet."""

    def of(self, name: Hashable, parent: HazardClass | None) -> HazardClass:
        """The class of that name, which is a part of ``parent``; that one itself where there are too many."""
        found = self._classes.get(name)
        if found is None:
            if len(self._classes) >= CLASSES_MAX and parent is not None:
                return parent
            found = self._classes[name] = HazardClass(name, len(self._classes), parent)
        return found

    def begin(self, of: HazardClass, now_s: float) -> Sample:
        """One was used or stored."""
        sample = Sample(of, now_s)
        self._waiting[0].append(sample)
        self.samples += 1
        return sample

    def again(self, sample: Sample, now_s: float) -> None:
        """It was used again."""
        if not sample.over:
            self._end(sample)
            sample.of.again[bin_of(now_s - sample.last_s)] += 1.0

    def give_up(self, sample: Sample) -> None:
        """Nothing more is to be learned of it."""
        if not sample.over:
            self._end(sample)

    def _end(self, sample: Sample) -> None:
        sample.over = True
        self.samples -= 1

    def advance(self, now_s: float) -> None:
        """Those that came through a bin are counted."""
        for bin in range(BINS - 1):
            waiting, until_s = self._waiting[bin], now_s - EDGES_S[bin + 1]
            after = self._waiting[bin + 1]
            while waiting and (waiting[0].over or waiting[0].last_s <= until_s):
                sample = waiting.popleft()
                if not sample.over:
                    sample.of.through[bin] += 1.0
                    after.append(sample)
        last = self._waiting[-1]
        while last and (last[0].over or last[0].last_s <= now_s - 2 * EDGES_S[-1]):
            sample = last.popleft()
            if not sample.over:
                sample.of.through[-1] += 1.0
                self._end(sample)

    def fit(self, now_s: float) -> Callable[[], NDArray[np.float64]]:
        """Work for any thread: the values, by class and bin, for :meth:`adopt`."""
        classes = list(self._classes.values())
        if self._faded_s is not None and now_s > self._faded_s:
            fade = float(np.exp((self._faded_s - now_s) / self._window_s))
            for each in classes:
                each.again = [count * fade for count in each.again]
                each.through = [count * fade for count in each.through]
        self._faded_s = now_s
        through = np.array([each.through for each in classes])
        for bin, waiting in enumerate(self._waiting):  # who is still in a bin went through half of it
            for sample in waiting:
                if not sample.over:
                    through[sample.of.number, bin] += 0.5
        snapshot = _Snapshot(
            np.array([-1 if each.parent is None else each.parent.number for each in classes]),
            np.array([each.again for each in classes]),
            through,
        )
        return lambda: values_of(hazards_of(snapshot))

    def adopt(self, values: NDArray[np.float64]) -> None:
        """Of the classes that there were; those that came since have their parents'."""
        rows = values.tolist()
        for number, each in enumerate(self._classes.values()):
            each.values = rows[number] if number < len(rows) else (each.parent or self.root).values

    def beliefs(self) -> dict[str, Belief]:
        """Of the classes with a name that is a text."""
        found = {}
        for each in self._classes.values():
            if isinstance(each.name, str):
                again, through = np.array(each.again), np.array(each.through)
                seen = again + through
                passed = np.divide(through, seen, out=np.ones(BINS), where=seen > 0)
                alive = np.concatenate([[1.0], np.cumprod(passed)])
                uses = alive[:-1] - alive[1:]
                share = float(uses.sum())
                middle = np.array(EDGES_S) + WIDTHS_S / 2
                found[each.name] = Belief(share, float((uses * middle).sum() / share) if share > 0 else 0.0)
        return found


def hazards_of(snapshot: _Snapshot) -> NDArray[np.float64]:
    """Probability, by class and bin, that one which came so far is used in this bin. Parents come before their parts."""
    parents, again, through = snapshot
    whole_again, whole_through = again.copy(), through.copy()
    for number in range(len(parents) - 1, 0, -1):  # what a part saw, the whole saw
        whole_again[parents[number]] += whole_again[number]
        whole_through[parents[number]] += whole_through[number]
    seen = whole_again + whole_through
    hazards = np.empty_like(seen)
    rate = FIRST_RATE
    for bin in range(BINS):  # nothing was seen of what is older than the table: uses per second go on falling
        usual = 1.0 - np.exp(-rate * WIDTHS_S[bin])
        hazards[0, bin] = (whole_again[0, bin] + usual) / (seen[0, bin] + 1.0)
        rate = -np.log1p(-min(0.999, hazards[0, bin])) / WIDTHS_S[bin] * FALL
    for number in range(1, len(parents)):
        expected = hazards[parents[number]]
        level = (whole_again[number].sum() + LEVEL_PRIOR) / ((seen[number] * expected).sum() + LEVEL_PRIOR)
        expected = np.minimum(expected * level, 0.999)
        hazards[number] = (whole_again[number] + PRIOR * expected) / (seen[number] + PRIOR)
    return hazards


def values_of(hazards: NDArray[np.float64]) -> NDArray[np.float64]:
    """See the module: for each bin the best time to hold until. Shape of both: classes by bins."""
    best = np.zeros_like(hazards)
    for start in range(BINS):
        alive = np.ones(len(hazards))
        uses = np.zeros(len(hazards))
        held_s = np.zeros(len(hazards))
        for end in range(start, BINS):
            hazard = hazards[:, end]
            uses += alive * hazard
            held_s += alive * WIDTHS_S[end] * (1.0 - hazard / 2)
            alive = alive * (1.0 - hazard)
            np.maximum(best[:, start], uses / held_s, out=best[:, start])
    return best
