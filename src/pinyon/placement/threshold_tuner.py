"""A balancing threshold that follows measurements, which Mooncake §4.2 leaves to the future (footnote 1).

Most requests are placed by the threshold in force, some by the next lower and the next higher one, drawn by lot, so
that all three meet the same load. They are judged by how long it took until a prompt was computed, as a multiple of how
long that takes alone and without reuse. A neighbour that has clearly done better is in force from then on."""

from __future__ import annotations

from math import sqrt
from random import Random

THRESHOLDS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
TRIED = 0.1
"""The share of the requests that each neighbour places."""
LOOKS = (32, 64, 128, 256)
"""Numbers of samples at which a neighbour is judged: judged at every one, it would sooner or later win by chance."""
SAMPLES_MAX = 2500
"""The limit of samples of the threshold in force; a neighbour has some 310 then. All counts begin anew, as another
threshold may be the best by now."""
CLEAR = 3.0
"""Standard errors of the difference: by chance, it is exceeded once in some twenty runs of ten thousand requests where
all thresholds are equal."""
COST_MAX = 100.0
"""The bound of a cost, as a multiple of the time alone: a stall says nothing of a threshold."""


class _Costs:
    __slots__ = ("count", "mean", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = 0.0

    def add(self, cost: float) -> None:
        """Adds a cost by Welford's method."""
        self.count += 1
        off = cost - self.mean
        self.mean += off / self.count
        self.squares += off * (cost - self.mean)

    @property
    def variance(self) -> float:
        return self.squares / max(1, self.count - 1)


class ThresholdTuner:
    """The choice of thresholds: ``draw`` gives one for each request, and ``learn`` takes what came of it."""

    def __init__(self, start: float) -> None:
        """Begins with the one of :data:`THRESHOLDS` that is nearest to ``start``."""
        self._at = min(range(len(THRESHOLDS)), key=lambda at: abs(THRESHOLDS[at] - start))
        self._costs: dict[float, _Costs] = {}

    @property
    def threshold(self) -> float:
        return THRESHOLDS[self._at]

    def draw(self, rng: Random) -> float:
        lot = rng.random()
        step = -1 if lot < TRIED else 1 if lot < 2 * TRIED else 0
        return THRESHOLDS[min(max(self._at + step, 0), len(THRESHOLDS) - 1)]

    def learn(self, threshold: float, seconds: float, alone_s: float) -> None:
        """Learns that a prompt placed by ``threshold`` was computed after ``seconds``. It takes ``alone_s`` alone,
        without reuse of a prefix."""
        if alone_s <= 0:
            return
        costs = self._costs.setdefault(threshold, _Costs())
        costs.add(min(seconds / alone_s, COST_MAX))
        mine = self._costs.setdefault(self.threshold, _Costs())
        if costs is mine:
            if mine.count >= SAMPLES_MAX:
                self._costs.clear()
        elif costs.count in LOOKS and mine.count >= LOOKS[0] and self._better(costs, mine):
            at = THRESHOLDS.index(threshold)
            if abs(at - self._at) == 1:  # else the prompt was placed before the last move
                self._at = at
                self._costs.clear()

    @staticmethod
    def _better(other: _Costs, mine: _Costs) -> bool:
        """Returns whether ``other`` is clearly better. The larger variance of the two counts: few samples without a
        rare long one vary little."""
        error = sqrt(max(other.variance, mine.variance) * (1 / other.count + 1 / mine.count))
        return other.mean + CLEAR * error < mine.mean
