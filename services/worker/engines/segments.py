"""Softmax over keys in segments of a fixed length, each computed by itself, merged in a fixed order.

Segment ``s`` holds the positions ``[s * SEGMENT_TOKENS, (s + 1) * SEGMENT_TOKENS)``. A query at position ``p`` sees all
of the segments before its own, and of its own as many keys as :func:`last_length` says. This is a function of ``p``
alone, and so are the shapes of all its products. Each segment gives the highest score, the sum of ``exp(score -
highest)`` and the output weighted by the same; how these become one softmax depends on the number of segments only. So
a query's bits do not depend on the queries for which a segment was read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.engines.blas import TILE

_F32 = npt.NDArray[np.float32]

SEGMENT_TOKENS = 256
"""The keys of a segment, a multiple of :data:`LENGTH_STEP`. All processes that exchange KV need the same number.

A query's bits depend on it. Longer segments need fewer NumPy calls; shorter ones stay in the second-level cache beside
their scores and are shared more often."""

LENGTH_STEP = 64
"""A query's last segment is padded to a multiple of this; a prompt's queries go in panels of as many positions."""

_ELEMENTS = [np.dtype((np.void, 4 * lanes)) for lanes in range(TILE + 1)]
"""The element types by their number of float32."""

_ABREAST = 32
"""The keys whose sums are taken side by side."""


def last_length(position: int) -> int:
    """Returns the number of keys in the products of a query at ``position`` with its last segment."""
    return (position % SEGMENT_TOKENS // LENGTH_STEP + 1) * LENGTH_STEP


def blocks_of_lanes(array: _F32, lanes: int) -> npt.NDArray[np.void]:
    """Returns a view of the last axis with ``lanes`` lanes an element, the rest cut off: it is far faster to copy."""
    if left_over := array.shape[-1] % lanes:
        array = array[..., :-left_over]
    return array.view(_ELEMENTS[lanes])


def exp_of_softmax(scores: _F32) -> tuple[_F32, _F32]:
    """Computes ``exp(scores - their highest)`` in place over ``(..., length, lanes)``.

    Returns the highest scores and the sums over the keys, ``(..., 1, lanes)`` each. It takes ``_ABREAST`` keys side by
    side: inner loops are long, and the order of sums is still fixed."""
    *outer, length, lanes = scores.shape
    wide = scores.reshape(-1, length // _ABREAST, _ABREAST * lanes)
    highest = _reduce_keys(np.maximum, wide, lanes)
    wide -= np.repeat(highest, _ABREAST, axis=1).reshape(-1, 1, _ABREAST * lanes)
    np.exp(wide, out=wide)
    shape = (*outer, 1, lanes)
    return highest.reshape(shape), _reduce_keys(np.add, wide, lanes).reshape(shape)


def _reduce_keys(operation: np.ufunc, wide: _F32, lanes: int) -> _F32:
    """Reduces ``(n, length / 32, 32 * lanes)`` over all keys to ``(n, 1, lanes)``.

    First it reduces over the multiples of 32, then 4 by 4, then the rest. Each step runs over an outer axis, which
    NumPy takes one by one in order: the order of the sums depends on the length only."""
    folded = operation.reduce(wide, axis=1)
    folded = operation.reduce(folded.reshape(-1, 8, 4 * lanes), axis=1)
    result: _F32 = operation.reduce(folded.reshape(-1, 4, lanes), axis=1, keepdims=True)
    return result


def merge(parts: _F32) -> _F32:
    """Returns the output of one softmax over all segments, ``(..., head_dim, lanes)``, and overwrites ``parts``.

    ``parts`` is ``(segments, ..., head_dim + 2, lanes)``, contiguous: each segment's output, below it the sum that
    divides it, and the highest score. The segments are added one after the other, in order: their axis is not the
    innermost."""
    segments, *shape = parts.shape
    total = parts[0]
    if segments > 1:
        highest = parts[..., -1:, :]
        weights = highest - np.maximum.reduce(highest, axis=0)
        np.exp(weights, out=weights)
        flat = parts.reshape(segments, -1)
        # Repeated, as broadcasting would make NumPy's inner loops only as long as there are lanes.
        flat *= np.repeat(weights, shape[-2], axis=-2).reshape(segments, -1)
        total = np.add.reduce(flat, axis=0).reshape(shape)
    result: _F32 = total[..., :-2, :] / total[..., -2:-1, :]
    return result
