"""How likely what was used is used again, by what is known of it and by how long ago that was; learned by watching.

Time since the last use is cut into bins. Of each class it is counted how many came through a bin unused and how many
were used again in it: a life table, faded, so that old days count less. A part is taken to be like what contains it but
for its level, as if :data:`LEVEL_PRIOR` uses had been seen as expected, and, bin by bin, :data:`PRIOR` blocks.

A block that is worth holding is worth it until some time: the value is the greatest, over all times to hold it until,
of (probability that it is used until then) / (expected time that it is held until then or until its use): uses per
second of a block's room. (With a falling hazard that is the hazard; where a use becomes likelier with time it looks
ahead. It is Gittins' index of a job that may be given up; Beckmann et al., "LHD", NSDI '18, call it hit density.)
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
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
CLASSES_MAX = 2048
OVER_MIN = 1024
"""Samples that are over are kept until they are met, but never more than of others and so many."""
LEVEL_PRIOR = 50.0
FIRST_RATE = 1e-3
"""Uses per second, before anything was seen."""
FALL = 0.7
"""Of them, in the next bin, as long as nobody got there."""


def bin_of(age_s: float) -> int:
    return bisect_right(EDGES_S, age_s) - 1 if age_s > 0 else 0


class HazardClass:
    """Those that are alike in what is known of them."""

    __slots__ = ("depth", "name", "number", "parent")

    def __init__(self, name: Hashable, number: int, parent: HazardClass | None) -> None:
        self.name = name
        self.number = number
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1


class Sample:
    """One that may be used again; ``of``: its class's number."""

    __slots__ = ("bin", "last_s", "of", "over")

    def __init__(self, of: int, last_s: float) -> None:
        self.of = of
        self.last_s = last_s
        self.bin = 0
        self.over = False


class _Snapshot(NamedTuple):
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    again: NDArray[np.float64]
    seen: NDArray[np.float64]


class HazardTable:
    """``window_s``: what is older by that counts 1/e."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._classes: dict[Hashable, HazardClass] = {}
        shape = (CLASSES_MAX, BINS)
        self._again = np.zeros(shape)
        """Used again, by class and bin."""
        self._through = np.zeros(shape)
        """Not used again in that bin."""
        self._waiting = np.zeros(shape)
        """In it now."""
        self._values = np.zeros(shape)
        """Uses per second of holding one block."""
        self._values[0] = FIRST_RATE * FALL ** np.arange(BINS)
        self._samples: list[list[tuple[float, int, Sample]]] = [[] for _ in range(BINS)]
        """Heaps, by last use: a sample may begin long after it."""
        self._number = itertools.count()
        self._alive = self._entries = 0
        self._faded_s: float | None = None
        self.root = self.of("", None)

    def of(self, name: Hashable, parent: HazardClass | None) -> HazardClass:
        """The class of that name, which is a part of ``parent``; that one itself where there are too many."""
        found = self._classes.get(name)
        if found is None:
            if len(self._classes) >= CLASSES_MAX and parent is not None:
                return parent
            found = self._classes[name] = HazardClass(name, len(self._classes), parent)
            if parent is not None:
                self._values[found.number] = self._values[parent.number]
        return found

    def value(self, number: int, bin: int) -> float:
        """Of a class, by its number: uses per second of holding one block."""
        return float(self._values[number, bin])

    def begin(self, of: HazardClass, now_s: float) -> Sample:
        """One was used or stored."""
        sample = Sample(of.number, now_s)
        heapq.heappush(self._samples[0], (now_s, next(self._number), sample))
        self._waiting[of.number, 0] += 1
        self._alive += 1
        self._entries += 1
        if self._entries > 2 * self._alive + OVER_MIN:
            for samples in self._samples:
                samples[:] = [each for each in samples if not each[2].over]
                heapq.heapify(samples)
            self._entries = self._alive
        return sample

    def again(self, sample: Sample, now_s: float) -> None:
        """It was used again."""
        if not sample.over:
            self.give_up(sample)
            last = bin_of(now_s - sample.last_s)
            self._through[sample.of, sample.bin : last] += 1  # since :meth:`advance`
            self._again[sample.of, last] += 1

    def give_up(self, sample: Sample) -> None:
        """Nothing more is to be learned of it."""
        if not sample.over:
            sample.over = True
            self._alive -= 1
            self._waiting[sample.of, sample.bin] -= 1

    def advance(self, now_s: float) -> None:
        """Those that came through a bin are counted."""
        for bin, samples in enumerate(self._samples):
            last = bin == BINS - 1
            until_s = now_s - (2 * EDGES_S[-1] if last else EDGES_S[bin + 1])
            while samples and (samples[0][2].over or samples[0][0] <= until_s):
                sample = heapq.heappop(samples)[2]
                self._entries -= 1
                if sample.over:
                    continue
                self._through[sample.of, bin] += 1
                if last:
                    self.give_up(sample)
                else:
                    self._waiting[sample.of, bin] -= 1
                    self._waiting[sample.of, bin + 1] += 1
                    sample.bin = bin + 1
                    heapq.heappush(self._samples[bin + 1], (sample.last_s, next(self._number), sample))
                    self._entries += 1

    def fit(self, now_s: float) -> Callable[[], NDArray[np.float64]]:
        """Work for any thread: the values, by class and bin, for :meth:`adopt`."""
        count = len(self._classes)
        if self._faded_s is not None and now_s > self._faded_s:
            fade = math.exp((self._faded_s - now_s) / self._window_s)
            self._again[:count] *= fade
            self._through[:count] *= fade
        self._faded_s = now_s
        again = self._again[:count].copy()
        seen = (
            again + self._through[:count] + 0.5 * self._waiting[:count]
        )  # who is still in a bin went through half of it
        snapshot = _Snapshot(*self._tree(), again, seen)
        return lambda: values_of(hazards_of(snapshot))

    def _tree(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each class the number of what it is a part of, and how often that is one itself."""
        classes = self._classes.values()
        parents = np.array([0 if each.parent is None else each.parent.number for each in classes])
        return parents, np.array([each.depth for each in classes])

    def adopt(self, values: NDArray[np.float64]) -> None:
        """Of the classes that there were; those that came since have their parents'."""
        self._values[: len(values)] = values
        for each in list(self._classes.values())[len(values) :]:
            if each.parent is not None:
                self._values[each.number] = self._values[each.parent.number]

    def beliefs(self) -> dict[str, Belief]:
        """Of the classes whose name is a text."""
        classes = list(self._classes.values())
        again, through = self._again[: len(classes)].copy(), self._through[: len(classes)].copy()
        _add_parts(*self._tree(), again, through)
        seen = again + through
        unused = np.cumprod(np.divide(through, seen, out=np.ones_like(seen), where=seen > 0), axis=1)
        uses = -np.diff(unused, axis=1, prepend=1.0)
        shares = uses.sum(1)
        means_s = uses @ (EDGES_S + WIDTHS_S / 2) / np.maximum(shares, 1e-12)
        found = {}
        for each in classes:
            if isinstance(each.name, str):
                found[each.name] = Belief(float(shares[each.number]), float(means_s[each.number]))
        return found


def _add_parts(parents: NDArray[np.int64], depths: NDArray[np.int64], *counts: NDArray[np.float64]) -> None:
    """What a part saw, the whole saw."""
    for depth in range(depths.max(), 0, -1):
        parts = np.flatnonzero(depths == depth)
        for each in counts:
            np.add.at(each, parents[parts], each[parts])


def hazards_of(snapshot: _Snapshot) -> NDArray[np.float64]:
    """Probability, by class and bin, that one which came so far is used in this bin."""
    parents, depths, again, seen = snapshot
    _add_parts(parents, depths, again, seen)
    hazards = np.empty_like(seen)
    rate = FIRST_RATE
    for bin in range(BINS):  # nothing was seen of what is older than the table: uses per second go on falling
        usual = 1.0 - np.exp(-rate * WIDTHS_S[bin])
        hazards[0, bin] = (again[0, bin] + usual) / (seen[0, bin] + 1.0)
        rate = -np.log1p(-min(0.999, hazards[0, bin])) / WIDTHS_S[bin] * FALL
    for depth in range(1, depths.max() + 1):
        parts = np.flatnonzero(depths == depth)
        expected = hazards[parents[parts]]
        level = (again[parts].sum(1) + LEVEL_PRIOR) / ((seen[parts] * expected).sum(1) + LEVEL_PRIOR)
        expected = np.minimum(expected * level[:, None], 0.999)
        hazards[parts] = (again[parts] + PRIOR * expected) / (seen[parts] + PRIOR)
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
