"""The probability of reuse by class and by time since the last use, learned by watching.

Time since the last use is divided into bins. For each class, the table counts how many samples passed a bin unused and
how many were used again in it. This life table fades, so that old days count less. A class is assumed to be like the
class that contains it, but for its level. That weighs like :data:`LEVEL_PRIOR` uses seen as expected, and in each bin
like :data:`PRIOR` blocks. A class of which nothing is known any more is forgotten.

A block that is worth holding is worth it until some time. Its value is the greatest quotient over all such times, in
uses per second of a block's room:

- (probability of a use until then) / (expected time that the block is held, until then or until the use).

With a falling hazard, the value is the hazard; where a use becomes likelier with time, it looks ahead. It is Gittins'
index of a job that may be given up; Beckmann et al., "LHD", NSDI '18, call it hit density."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from pinyon.eviction.fit import Fit

EDGES_S = (0.0, *(2.0**step for step in range(17)))
"""The lower edges of the bins: 0, then 1 s to 65,536 s (18 h), doubling; the last bin is open."""
BINS = len(EDGES_S)
WIDTHS_S = np.array([*np.diff(EDGES_S), EDGES_S[-1]])
PRIOR = 100.0
CLASSES_MAX = 2048
GROUPS_MAX = 20
"""The greatest number of groups: classes directly below the root."""
GROUP_CLASSES = 64
"""The number of classes that each group is sure of, itself among them, however many others have."""
FORGOTTEN = 0.5
"""A class is forgotten when it has seen less than this, faded, and none of its samples waits."""
OVER_MIN = 1024
"""Ended samples stay in the heaps until they are met, but never more of them than of others and this many."""
LEVEL_PRIOR = 50.0
FIRST_RATE = 1e-3
"""The assumed uses per second before anything was seen."""
FALL = 0.7
"""The factor from one bin's rate to the next bin's, as long as no sample got there."""


def bin_of(age_s: float) -> int:
    return bisect_right(EDGES_S, age_s) - 1 if age_s > 0 else 0


class HazardClass:
    """A class of samples that are alike in what is known of them."""

    __slots__ = ("group", "kept", "name", "number", "parent", "parts", "size")

    def __init__(self, name: Hashable, number: int, parent: HazardClass | None) -> None:
        self.name = name
        self.number = number
        """The row in the table; the root's, 0, once the class is forgotten."""
        self.parent = parent
        self.group: HazardClass = self if parent is None or parent.parent is None else parent.group
        """The class directly below the root that contains this one."""
        self.parts = 0
        self.size = 0
        """The number of classes in the group, if this class is a group."""
        self.kept = False
        """True if the class is never forgotten."""


class Sample:
    """A run that was used or stored and may be used again; ``of`` is the number of its class."""

    __slots__ = ("bin", "last_s", "of", "over")

    def __init__(self, of: int, last_s: float) -> None:
        self.of = of
        self.last_s = last_s
        self.bin = 0
        self.over = False


class HazardTable:
    """The life table of all classes; counts fade to 1/e within ``window_s``."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._classes: dict[Hashable, HazardClass] = {}
        shape = (CLASSES_MAX, BINS)
        self._again = np.zeros(shape)
        """Samples used again, by class and bin."""
        self._through = np.zeros(shape)
        """Samples that passed the bin unused."""
        self._waiting = np.zeros(shape)
        """Samples that are in the bin now."""
        self._values = np.zeros(shape)
        """Values: uses per second of holding one block."""
        self._values[0] = FIRST_RATE * FALL ** np.arange(BINS)
        self._parents = np.zeros(CLASSES_MAX, np.int64)
        self._depths = np.ones(CLASSES_MAX, np.int64)
        """The depth below the root; a row without a class counts as a class below the root that saw nothing."""
        self._free = list(range(CLASSES_MAX - 1, -1, -1))
        self._rows = 0
        """The number of first rows beyond which there never was a class."""
        self._promised = GROUPS_MAX * GROUP_CLASSES
        """The rows that groups are still sure of, by :data:`GROUP_CLASSES`."""
        self._samples: list[list[tuple[float, int, Sample]]] = [[] for _ in range(BINS)]
        """A heap per bin, by last use, as a sample may begin long after its last use."""
        self._number = itertools.count()
        self._alive = self._entries = 0
        self._faded_s: float | None = None
        self.root = self._add("", None)
        self._depths[self.root.number] = 0

    def of(self, name: Hashable, parent: HazardClass) -> HazardClass:
        """Returns the class of that name within ``parent``; ``parent`` itself if there are too many classes."""
        found = self._classes.get(name)
        if found is not None:
            return found
        return self._add(name, parent) if self._may_have_more(parent) else parent

    def keep(self, name: Hashable) -> HazardClass:
        """Returns the class of that name below the root, which is never forgotten."""
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
        """Forgets classes of which nothing is known any more; their counts pass to the class that contains them."""
        known = self._again.sum(1) + self._through.sum(1)
        waiting = self._waiting.sum(1)
        for each in reversed(list(self._classes.values())):  # a class is made after the one that contains it
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
        """Returns the value of a class, by its number: uses per second of holding one block."""
        return float(self._values[number, bin])

    def begin(self, of: HazardClass, now_s: float) -> Sample:
        """Begins a sample of a run that was last used or stored at ``now_s``."""
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
        """Ends a sample whose run was used again."""
        if not sample.over:
            self.give_up(sample)
            last = bin_of(now_s - sample.last_s)
            self._through[sample.of, sample.bin : last] += 1  # bins passed since :meth:`advance`
            self._again[sample.of, last] += 1

    def give_up(self, sample: Sample) -> None:
        """Ends a sample of which nothing more is to be learned."""
        if not sample.over:
            sample.over = True
            self._alive -= 1
            self._waiting[sample.of, sample.bin] -= 1

    def advance(self, now_s: float) -> None:
        """Moves samples on to the bins of their present age, and counts the bins that they passed."""
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
                to = max(bin + 1, bin_of(age_s))  # also if rounding says less
                self._through[sample.of, bin:to] += 1
                self._waiting[sample.of, bin] -= 1
                self._waiting[sample.of, to] += 1
                sample.bin = to
                heapq.heappush(self._samples[to], (sample.last_s, next(self._number), sample))
                self._entries += 1

    def fit(self, now_s: float) -> Callable[[], NDArray[np.float64]]:
        """Lets counts fade, and returns work for any thread that computes values by class and bin for :meth:`adopt`."""
        if self._faded_s is not None and now_s > self._faded_s:
            fade = math.exp((self._faded_s - now_s) / self._window_s)
            self._again[: self._rows] *= fade
            self._through[: self._rows] *= fade
        self._faded_s = now_s
        self._forget()
        count = self._rows
        parents, depths, again = self._parents[:count].copy(), self._depths[:count].copy(), self._again[:count].copy()
        # A sample that is still in a bin counts as half.
        seen = again + self._through[:count] + 0.5 * self._waiting[:count]
        unused = [number for number in self._free if number < count]

        def work() -> NDArray[np.float64]:
            values = values_of(hazards_of(parents, depths, again, seen))
            values[unused] = 0.0
            return values

        return work

    def adopt(self, values: NDArray[np.float64]) -> None:
        """Applies the values of classes that existed at the fit (others are 0); newer classes get their parents'."""
        there_was = values[:, 0] > 0.0
        self._values[: len(values)][there_was] = values[there_was]
        for each in self._classes.values():
            if each.parent is not None and not (each.number < len(values) and there_was[each.number]):
                self._values[each.number] = self._values[each.parent.number]

    def beliefs(self) -> dict[str, Fit]:
        """Returns the beliefs of the classes whose name is a string."""
        count = self._rows
        again, through = self._again[:count].copy(), self._through[:count].copy()
        _add_parts(self._parents[:count], self._depths[:count], again, through)
        seen = again + through
        unused = np.cumprod(np.divide(through, seen, out=np.ones_like(seen), where=seen > 0), axis=1)
        uses = -np.diff(unused, axis=1, prepend=1.0)
        shares = uses.sum(1)
        means_s = uses @ (EDGES_S + WIDTHS_S / 2) / np.maximum(shares, 1e-12)
        return {
            each.name: Fit(float(shares[each.number]), float(means_s[each.number]))
            for each in self._classes.values()
            if isinstance(each.name, str)
        }


def _add_parts(parents: NDArray[np.int64], depths: NDArray[np.int64], *counts: NDArray[np.float64]) -> None:
    """Adds the counts of each class to those of the class that contains it."""
    for depth in range(depths.max(), 0, -1):
        parts = np.flatnonzero(depths == depth)
        for each in counts:
            np.add.at(each, parents[parts], each[parts])


def hazards_of(
    parents: NDArray[np.int64], depths: NDArray[np.int64], again: NDArray[np.float64], seen: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the probability, by class and bin, that a sample which reached the bin is used in it.

    ``again`` and ``seen`` are those of each class without its parts; they are changed."""
    _add_parts(parents, depths, again, seen)
    hazards = np.empty_like(seen)
    rate = FIRST_RATE
    for bin in range(BINS):  # in bins that no sample has reached, uses per second go on falling
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
    """Returns the values (see the module), with the best time to hold for each bin. Both shapes: classes by bins."""
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
