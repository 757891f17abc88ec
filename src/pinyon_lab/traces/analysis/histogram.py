"""Times counted in classes, each as wide as a fixed share of its value: bounded memory for any number of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINS", "EDGES_S", "bins_of", "ks_exponential", "quantile_s", "share_within"]

PER_DECADE = 256
LEAST_S = 1e-3
"""What is less is in the first class."""
DECADES = 12
BINS = 1 + PER_DECADE * DECADES
EDGES_S: NDArray[np.float64] = LEAST_S * 10.0 ** (np.arange(BINS) / PER_DECADE)
"""Where each class ends, 0.9 % above where it begins; what is longer than the last is in the last."""

Floats = NDArray[np.float64]


def bins_of(times_s: Floats) -> NDArray[np.int64]:
    """The class of each time."""
    decades = np.log10(np.maximum(times_s, LEAST_S / 2) / LEAST_S)
    bins: NDArray[np.int64] = np.clip(np.floor(decades * PER_DECADE) + 1, 0, BINS - 1).astype(np.int64)
    return bins


def quantile_s(counts: Floats, share: float) -> float | None:
    """The end of the class where ``share`` of all is reached: the true quantile, or up to 0.9 % more. Below 1 ms: 0."""
    total = counts.sum()
    if not total:
        return None
    found = int(np.searchsorted(np.cumsum(counts), share * total * (1 - 1e-12)))
    return float(EDGES_S[found]) if found else 0.0


def share_within(counts: Floats, limit_s: float) -> float | None:
    """Share of the times up to ``limit_s``, which is taken to the end of its class."""
    total = counts.sum()
    return float(counts[: int(bins_of(np.array([limit_s]))[0]) + 1].sum() / total) if total else None


def ks_exponential(counts: Floats, mean_s: float) -> float | None:
    """Kolmogorov-Smirnov distance from an exponential distribution of this mean, at the ends of the classes: no more
    than the true one, and less by at most the greatest share that a class has in either distribution. None: no times,
    or a mean within the first class."""
    total = counts.sum()
    if not total or mean_s < LEAST_S:
        return None
    return float(np.abs(np.cumsum(counts) / total + np.expm1(-EDGES_S / mean_s)).max())
