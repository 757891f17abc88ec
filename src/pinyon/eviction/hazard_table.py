"""How likely what was used is used again, by what is known of it and by how long ago that was; learned by watching.

Time since the last use is cut into bins. Of each class it is counted how many came through a bin unused and how many
were used again in it: a life table, faded, so that old days count less. A part is taken to be like what contains it but
for its level, as if :data:`LEVEL_PRIOR` uses had been seen as expected, and, bin by bin, :data:`PRIOR` blocks. A part
of which nothing is known any more is forgotten.

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

EDGES_S = (0.0, *(2.0**step for step in range(17)))
"""Of the bins, the last one open: 1 s to 65,536 s (18 h), doubling."""
BINS = len(EDGES_S)
WIDTHS_S = np.array([*np.diff(EDGES_S), EDGES_S[-1]])
PRIOR = 100.0
CLASSES_MAX = 2048
GROUPS_MAX = 20
"""Classes that are parts of the root itself."""
GROUP_CLASSES = 64
"""Each of them, with its parts, can have so many, whatever others have."""
FORGOTTEN = 0.5
"""A class is, when it has seen less and nothing of it is waited for."""
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

    __slots__ = ("group", "kept", "name", "number", "parent", "parts", "size")

    def __init__(self, name: Hashable, number: int, parent: HazardClass | None) -> None:
        self.name = name
        self.number = number
        """The root's, 0, once it is forgotten."""
        self.parent = parent
        self.group: HazardClass = self if parent is None or parent.parent is None else parent.group
        """What it is a part of below the root."""
        self.parts = 0
        self.size = 0
        """Classes of the group that it is."""
        self.kept = False
        """It is never forgotten."""


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
        self._parents = np.zeros(CLASSES_MAX, np.int64)
        self._depths = np.ones(CLASSES_MAX, np.int64)
        """Where there is no class, nothing was seen of a part of the root."""
        self._free = list(range(CLASSES_MAX - 1, -1, -1))
        self._rows = 0
        """There were never classes behind so many."""
        self._promised = GROUPS_MAX * GROUP_CLASSES
        """To groups that have fewer classes than they can."""
        self._samples: list[list[tuple[float, int, Sample]]] = [[] for _ in range(BINS)]
        """Heaps, by last use: a sample may begin long after it."""
        self._number = itertools.count()
        self._alive = self._entries = 0
        self._faded_s: float | None = None
        self.root = self._add("", None)
        self._depths[self.root.number] = 0

    def of(self, name: Hashable, parent: HazardClass) -> HazardClass:
        """The class of that name, which is a part of ``parent``; that one itself where there are too many."""
        found = self._classes.get(name)
        if found is not None:
            return found
        return self._add(name, parent) if self._may_have_more(parent) else parent

    def keep(self, name: Hashable) -> HazardClass:
        """A part of the root, for ever."""
        found = self.of(name, self.root)
        found.kept = True
        return found

    def _may_have_more(self, parent: HazardClass) -> bool:
        if parent is self.root:
            return parent.parts < GROUPS_MAX
        return parent.group.size < GROUP_CLASSES or len(self._free) > self._promised

    def _add(self, name: Hashable, parent: HazardClass | None) -> HazardClass:
        number = self._free.pop()
        self._rows = max(self._rows, number + 1)
        each = self._classes[name] = HazardClass(name, number, parent)
        if parent is not None:
            parent.parts += 1
            each.group.size += 1
            self._promised -= each.group.size <= GROUP_CLASSES
            self._parents[number], self._depths[number] = parent.number, self._depths[parent.number] + 1
            self._values[number] = self._values[parent.number]
        return each

    def _forget(self) -> None:
        """Parts of which nothing is known any more: what they saw remains what the whole saw."""
        known = self._again.sum(1) + self._through.sum(1)
        waiting = self._waiting.sum(1)
        for each in reversed(list(self._classes.values())):  # parts came later than the whole
            number, parent = each.number, each.parent
            if parent is None or each.kept or each.parts or waiting[number] > 0 or known[number] >= FORGOTTEN:
                continue
            for counts in (self._again, self._through):
                counts[parent.number] += counts[number]
                counts[number] = 0.0
            known[parent.number] += known[number]
            self._parents[number], self._depths[number] = 0, 1
            self._free.append(number)
            self._promised += each.group.size <= GROUP_CLASSES
            each.group.size -= 1
            parent.parts -= 1
            del self._classes[each.name]
            each.number = self.root.number

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
                age_s = now_s - sample.last_s
                if last or age_s >= 2 * EDGES_S[-1]:
                    self._through[sample.of, bin:] += 1
                    self.give_up(sample)
                    continue
                to = max(bin + 1, bin_of(age_s))  # whatever rounding says
                self._through[sample.of, bin:to] += 1
                self._waiting[sample.of, bin] -= 1
                self._waiting[sample.of, to] += 1
                sample.bin = to
                heapq.heappush(self._samples[to], (sample.last_s, next(self._number), sample))
                self._entries += 1

    def fit(self, now_s: float) -> Callable[[], NDArray[np.float64]]:
        """Work for any thread: the values, by class and bin, for :meth:`adopt`."""
        if self._faded_s is not None and now_s > self._faded_s:
            fade = math.exp((self._faded_s - now_s) / self._window_s)
            self._again[: self._rows] *= fade
            self._through[: self._rows] *= fade
        self._faded_s = now_s
        self._forget()
        count = self._rows
        again = self._again[:count].copy()
        seen = (
            again + self._through[:count] + 0.5 * self._waiting[:count]
        )  # who is still in a bin went through half of it
        snapshot = _Snapshot(self._parents[:count].copy(), self._depths[:count].copy(), again, seen)
        unused = [number for number in self._free if number < count]

        def work() -> NDArray[np.float64]:
            values = values_of(hazards_of(snapshot))
            values[unused] = 0.0
            return values

        return work

    def adopt(self, values: NDArray[np.float64]) -> None:
        """Of the classes that there were (others' are 0); those that came since have their parents'."""
        there_was = values[:, 0] > 0.0
        self._values[: len(values)][there_was] = values[there_was]
        for each in self._classes.values():
            if each.parent is not None and not (each.number < len(values) and there_was[each.number]):
                self._values[each.number] = self._values[each.parent.number]

    def beliefs(self) -> dict[str, Belief]:
        """Of the classes whose name is a text."""
        count = self._rows
        again, through = self._again[:count].copy(), self._through[:count].copy()
        _add_parts(self._parents[:count], self._depths[:count], again, through)
        seen = again + through
        unused = np.cumprod(np.divide(through, seen, out=np.ones_like(seen), where=seen > 0), axis=1)
        uses = -np.diff(unused, axis=1, prepend=1.0)
        shares = uses.sum(1)
        means_s = uses @ (EDGES_S + WIDTHS_S / 2) / np.maximum(shares, 1e-12)
        found = {}
        for each in self._classes.values():
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
