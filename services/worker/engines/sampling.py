"""The next token from one row of logits: a pure function of (logits, parameters, index of the generated token).

Order: suppressed tokens out, temperature, top-k, top-p, then one draw by inverse distribution function over tokens in
order of falling probability (equal ones by rising id). The uniform number is a hash of (seed, index), so a request
that goes on elsewhere draws the same numbers without carrying a generator along.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import Internal
from pinyon.core.request import SamplingParams

__all__ = ["Sampler", "uniform"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """A number in ``[0, 1)`` with 53 random bits: SplitMix64's finaliser over the seed, then over seed and index.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014). Neighbouring seeds are mixed
    before the index is added, so ``(seed, index + 1)`` and ``(seed + golden, index)`` do not collide.
    """
    return (_mix(_mix(seed) + (index + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """Holds the model's suppressed tokens; otherwise without state."""

    def __init__(self, vocab_size: int, suppress_tokens: tuple[int, ...] = ()) -> None:
        allowed = np.ones(vocab_size, dtype=np.bool_)
        allowed[list(suppress_tokens)] = False
        # Indices of what may be sampled, rising; None when that is everything.
        self._allowed: npt.NDArray[np.int64] | None = None if allowed.all() else np.flatnonzero(allowed)

    def sample(self, logits: npt.NDArray[np.float32], params: SamplingParams, index: int) -> int:
        """``logits``: ``(vocab_size,)``. Raises :class:`Internal` if one of them is not finite."""
        if not np.isfinite(logits).all():
            raise Internal("the model computed a logit that is not finite")
        allowed = self._allowed
        if allowed is not None:
            logits = logits[allowed]
        if params.temperature == 0.0 or params.top_k == 1:
            choice = int(np.argmax(logits))  # the first of equals
        else:
            choice = _draw(logits, params, uniform(params.seed, index))
        return choice if allowed is None else int(allowed[choice])


def _draw(logits: npt.NDArray[np.float32], params: SamplingParams, u: float) -> int:
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    # A tiny temperature sends all but the best to -inf, which exp makes an exact zero.
    with np.errstate(over="ignore", under="ignore"):
        scaled /= params.temperature
        order = _candidates(scaled, params.top_k)
        weights = np.exp(scaled[order])
    cumulative = np.cumsum(weights)
    if params.top_p < 1.0:
        # The smallest set whose probability reaches top_p; it always has its first member.
        keep = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
        cumulative = cumulative[:keep]
    # u < 1, but the product may round up to the total: the last candidate with weight is meant then.
    at = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(order[min(at, int(np.searchsorted(cumulative, cumulative[-1], side="left")))])


def _candidates(scaled: npt.NDArray[np.float64], top_k: int) -> npt.NDArray[np.int64]:
    """Ids by falling score, equal ones by rising id; the first ``top_k`` of them if ``top_k`` is on."""
    size = scaled.shape[0]
    if 0 < top_k < size:
        # Everything at or above the k-th score, so that ties are cut by id and not by partition's whim.
        kth = np.partition(scaled, size - top_k)[size - top_k]
        ids = np.flatnonzero(scaled >= kth)
        return ids[np.argsort(-scaled[ids], kind="stable")][:top_k]
    return np.argsort(-scaled, kind="stable")
