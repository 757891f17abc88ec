"""Cost models of prefills and of decode steps: small polynomials that follow measurements.

Mooncake §4.1 predicts the prefill time from request length and prefix length by polynomial regression. The terms here
are those of its formula (1): computing ``n`` prompt tokens of which ``p`` are reused costs

    t(n, p) = k0 + k1 (n - p) + k2 (n² - p²)

(a constant, the linear layers, attention). All coefficients stay non-negative, so a prediction is never negative, never
falls when the prompt grows, and never rises when more of it is reused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar, Final, Self

from librt.vecs import vec
from mypy_extensions import i64

# How strongly a prior pulls its coefficient, in samples; this matters where measurements say nothing.
PRIOR_WEIGHT: Final = 1e-4
# A single sample counts as at most this multiple of the prediction: a hiccup must not pass for the machine's speed.
OUTLIER_RATIO: Final = 8.0
# The factor by which older samples fade: the last ~100 have most of the weight.
FORGETTING: Final = 0.99
# A sample that took less than half of its prediction weighs as much as the last few before it. A hiccup makes a machine
# look slower than it is, but nothing makes it look faster. So a slow spell, or a slow first sample, is soon forgotten.
SURPRISE_RATIO: Final = 0.5
SURPRISE_FORGETTING: Final = 0.25
# Predictions below this multiple of the prior's get no such weight: few samples would not outweigh the prior.
SURPRISE_FLOOR: Final = 100 * PRIOR_WEIGHT
# One sample hardly moves a well-trained fit, and solving is costly. So a trained fit is solved once in a few samples.
TRAINED_SAMPLES: Final = 64
SAMPLES_PER_SOLVE: Final = 8


class NonNegativeLeastSquares:
    """Recursive least squares with exponential forgetting under ``coefficient >= 0``.

    Every sample is divided by the prior's prediction for it. So the fit minimises relative errors, and small requests
    count as much as large ones. The unknowns are multiples of the prior's coefficients, at most four. So the normal
    equations are solved exactly, by trying which coefficients are zero."""

    __slots__ = ("_moments", "_multiples", "_prior", "_shape", "_solved", "_surprised", "_targets", "count")

    def __init__(self, prior: Sequence[float], *, shape: bool = False) -> None:
        """Starts from a prior. If samples cannot tell the terms apart, they scale all coefficients alike when ``shape``
        is true, and otherwise mostly the coefficient of the largest term."""
        if not 1 <= len(prior) <= 4 or min(prior) <= 0:
            raise ValueError(f"a prior has one to four positive coefficients, got {list(prior)}")
        size = len(prior)
        self._prior = vec[float](prior)
        self._shape = shape
        self._moments = vec[float]([0.0] * (size * size))
        """The weighted moment matrix, row by row."""
        self._targets = vec[float]([0.0] * size)
        self._multiples = vec[float]([1.0] * size)
        self._solved = 0
        self._surprised = False
        self.count = 0

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """Learns that work with these ``terms`` (non-negative, not all zero) took ``seconds``."""
        size: i64 = len(self._prior)
        if len(terms) != size:
            raise ValueError(f"{size} terms are needed, got {list(terms)}")
        shares = self._prior[:]
        expected = 0.0
        for i in range(size):
            shares[i] *= terms[i]
            expected += shares[i]
        if expected <= 0 or seconds < 0:
            raise ValueError(f"cannot learn from terms {list(terms)} and {seconds} s")
        target, now = seconds / expected, 0.0
        multiples = self._now()
        for i in range(size):
            shares[i] /= expected
            now += multiples[i] * shares[i]
        forgetting = FORGETTING
        if self.count:
            # the bound never falls to zero: a model that learned "takes nothing" could not leave zero again
            target = min(target, OUTLIER_RATIO * max(now, 1e-3))
            if now > SURPRISE_FLOOR and target < SURPRISE_RATIO * now:
                forgetting = SURPRISE_FORGETTING
                self._surprised = True
        moments, targets = self._moments, self._targets
        for i in range(size):
            for j in range(size):
                at = i * size + j
                moments[at] = forgetting * moments[at] + shares[i] * shares[j]
            targets[i] = forgetting * targets[i] + shares[i] * target
        self.count += 1

    @property
    def multiples(self) -> list[float]:
        """The fitted coefficients as multiples of the prior's."""
        return list(self._now())

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The seconds per unit of each term, all >= 0."""
        multiples, prior = self._now(), self._prior
        return tuple([prior[i] * multiples[i] for i in range(i64(len(prior)))])

    def copy_from(self, other: NonNegativeLeastSquares) -> None:
        """Starts from what ``other`` has learned, and from its prior; it must have as many coefficients."""
        self._prior, self._shape = other._prior, other._shape
        self._moments, self._targets = other._moments[:], other._targets[:]
        self._multiples = other._multiples
        self._solved = other._solved
        self._surprised = other._surprised
        self.count = other.count

    def _now(self) -> vec[float]:
        """Returns :attr:`multiples` as a vector that nobody may change."""
        news = self.count - self._solved
        if news >= SAMPLES_PER_SOLVE or (news and (self._surprised or self.count <= TRAINED_SAMPLES)):
            self._multiples = self._solve()
            self._solved = self.count
            self._surprised = False
        return self._multiples

    def _solve(self) -> vec[float]:
        size: i64 = len(self._prior)
        matrix, rhs = self._moments[:], self._targets[:]
        drawn_to = 1.0
        if self._shape:  # a sample's shares add up to one: these are the sums of all targets and of all weights
            targets = weights = 0.0
            for i in range(size):
                targets += rhs[i]
                weight = 0.0
                for j in range(size):
                    weight += matrix[i * size + j]
                weights += weight
            drawn_to = (targets + PRIOR_WEIGHT) / (weights + PRIOR_WEIGHT)
        for i in range(size):
            matrix[i * size + i] += PRIOR_WEIGHT
            rhs[i] += PRIOR_WEIGHT * drawn_to
        every: i64 = (i64(1) << size) - 1
        best = _solve_positive_definite(matrix, rhs, every)
        if _all_positive(best):
            return best  # the unconstrained minimum is inside: nothing beats it
        best, best_cost = vec[float]([0.0] * size), 0.0
        for free in _FEWER[size]:
            part = _solve_positive_definite(matrix, rhs, free)
            if not _all_positive(part):
                continue
            # at a stationary point the quadratic's value is -1/2 rhs·x
            cost = 0.0
            for i in range(size):
                if free >> i & 1:
                    cost += rhs[i] * part[i]
            if -cost < best_cost:
                best, best_cost = part, -cost
        return best


_FEWER: Final = {
    size: [sum([1 << i for i in free]) for count in range(size - 1, 0, -1) for free in combinations(range(size), count)]
    for size in range(1, 5)
}
"""Proper subsets of the coefficients, as bits of those that may be non-zero, by their number; the largest first."""


def _solve_positive_definite(matrix: vec[float], rhs: vec[float], free: i64) -> vec[float]:
    """Returns the solution (n,) in which only the unknowns in ``free`` (bits) may be non-zero. ``matrix`` is (n, n),
    row by row. Gaussian elimination: the prior's weight on the diagonal keeps every pivot positive."""
    size: i64 = len(rhs)
    rows, result = matrix[:], rhs[:]
    for i in range(size):
        if not free >> i & 1:
            continue
        for below in range(i + 1, size):
            if not free >> below & 1:
                continue
            factor = rows[below * size + i] / rows[i * size + i]
            for j in range(i + 1, size):
                rows[below * size + j] -= factor * rows[i * size + j]
            result[below] -= factor * result[i]
    for i in range(size - 1, -1, -1):
        if not free >> i & 1:
            result[i] = 0.0
            continue
        known = 0.0
        for j in range(i + 1, size):
            if free >> j & 1:
                known += rows[i * size + j] * result[j]
        result[i] = (result[i] - known) / rows[i * size + i]
    return result


def _all_positive(values: vec[float]) -> bool:
    return all(value >= 0 for value in values)


class _CostModel:
    """The cost model of one instance: a fit, with its coefficients at hand for loops over many instances."""

    __slots__ = ("_fit", "_k")

    PRIOR: ClassVar[tuple[float, ...]]
    SHAPE: ClassVar[bool] = False

    def __init__(self, prior: tuple[float, ...] | None = None) -> None:
        """Starts from ``prior``, by default the class's ``PRIOR``."""
        self._fit = NonNegativeLeastSquares(prior or self.PRIOR, shape=self.SHAPE)
        self._k: tuple[float, ...] | None = None

    @property
    def samples(self) -> int:
        return self._fit.count

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The seconds per unit of each term, for loops over instances that evaluate the formula in place."""
        if self._k is None:
            self._k = self._fit.coefficients
        return self._k

    def copy_from(self, other: Self) -> None:
        """Starts from what another instance's model has learned."""
        self._fit.copy_from(other._fit)
        self._k = None

    def _observe(self, terms: Sequence[float], seconds: float) -> None:
        self._fit.observe(terms, seconds)
        self._k = None


class PrefillCostModel(_CostModel):
    """Seconds to compute the rest of a prompt; coefficients ``(k0 s, k1 s/token, k2 s/token²)``.

    The prior is 2 ms plus 100 µs per token. In it, attention costs as much as the linear layers at 45,000 tokens
    (formula (1) of Mooncake with its a = 4, b = 22, d = 8192)."""

    __slots__ = ()

    PRIOR = (2e-3, 1e-4, 1e-4 / 45_000)

    def predict_s(self, prompt_tokens: int, prefix_tokens: int) -> float:
        """Returns the seconds to compute a prompt of ``prompt_tokens`` whose first ``prefix_tokens`` are reused."""
        k0, k1, k2 = self.coefficients
        rest = prompt_tokens - prefix_tokens
        return k0 + k1 * rest + k2 * rest * (prompt_tokens + prefix_tokens)

    def backlog_s(self, tokens: int) -> float:
        """Returns a lower bound of the seconds for queued prompt tokens of unknown requests: only their linear part."""
        return self.coefficients[1] * tokens

    def observe(self, computed_tokens: int, prefix_tokens: int, seconds: float) -> None:
        """Learns from one measured prefill, without its queueing and transfers."""
        if computed_tokens > 0:
            total = computed_tokens + prefix_tokens
            self._observe((1.0, computed_tokens, computed_tokens * (total + prefix_tokens)), seconds)


class DecodeCostModel(_CostModel):
    """Seconds between tokens; coefficients ``(k0 s, k1 s/request, k2 s/token of KV)``.

    A step reads the weights, does some work for each request of the batch, and reads the requests' KV. The prior is 10
    ms, 100 µs and 50 ns, the order of the profiles in :mod:`pinyon.profiles`. While only one batch size has been seen,
    a further request costs the same small share of the step as in the prior. If that is too small, it corrects itself
    as the batch grows. Too large a share would keep requests away, and with them the measurements that correct it."""

    __slots__ = ()

    PRIOR = (1e-2, 1e-4, 5e-8)
    SHAPE = True

    def predict_s(self, batch: float, kv_tokens: float = 0) -> float:
        """Returns the seconds between tokens of a batch that reads ``kv_tokens`` tokens of KV in all."""
        base, per_request, per_token = self.coefficients
        return base + per_request * batch + per_token * kv_tokens

    def observe(self, batch: float, kv_tokens: float, seconds: float) -> None:
        """Learns that a batch of this size, which read ``kv_tokens`` tokens of KV, took ``seconds`` per token."""
        if batch > 0:
            self._observe((1.0, batch, kv_tokens), seconds)
